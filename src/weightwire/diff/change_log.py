"""Who is told what a diff found, beside the patch that it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from weightwire.codec.record import RecordHead
from weightwire.model import Changes

if TYPE_CHECKING:
    from weightwire.codec.device_pieces import DevicePiece


class ChangeLog(Protocol):
    """Told what every piece of the target differs in, in state order, from one thread.

    A publisher advances its copy of the base with it, without a second pass over memory. ``add`` is
    called once for each piece of each target tensor, those without a change and those of empty
    tensors included: they may still be reshaped, and their heads hold digests. Tensors that are
    removed or tied have no pieces. A diff that raises may have told any part of it: what was added
    counts only once ``diff_states`` has returned.
    """

    def add(self, head: RecordHead, changes: Changes) -> None:
        """Take one piece's changes: positions from ``head.start`` on, and the new bits there.

        For a FULL record, which has no base, that is every element. The arrays are the log's to
        keep: none of them is live memory.
        """


@runtime_checkable
class CodedLog(ChangeLog, Protocol):
    """A ``ChangeLog`` that takes what was coded on a device as it was coded.

    With a log that does not, everything is coded on the host: in clear, changes are several times
    as large, and would all have to be copied from the device.
    """

    def add_coded(self, head: RecordHead, piece: DevicePiece) -> None:
        """Take one piece; decoded against the base it gives what ``add`` would have been told."""
