"""What a diff found, kept until its version is committed: only then may the baseline move.

Pieces that were coded on a device are kept as they were coded: that is the size of the patch, and
nothing more has to leave the device. The baseline decodes them against itself, as a receiver would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightwire.codec.record import RecordHead
from weightwire.diff.spill import Spill
from weightwire.model import Changes

if TYPE_CHECKING:
    from weightwire.codec.device_pieces import DevicePiece
    from weightwire.diff.device_advance import Staged


@dataclass(frozen=True)
class CodedStep:
    """One piece's changes, coded against the bits it had."""

    head: RecordHead
    piece: DevicePiece


class RedoLog:
    """Implements ``CodedLog``; replays what it was told, as often as asked.

    What is coded can be decoded only while the old bits are there. So a batch is decoded, kept here
    in clear as ``staged``, written, and then told ``written``: wherever that is interrupted, the next
    attempt writes what is staged once more and goes on with what is left.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[RecordHead, Changes]] = []
        self._coded: dict[int, CodedStep] = {}
        self._spill = Spill()
        self.staged: Staged | None = None
        """Decoded, and perhaps written."""
        self.is_short_of_memory = False
        """Whether a device had no memory left to decode some of it."""

    def add(self, head: RecordHead, changes: Changes) -> None:
        """Keep the changes of one piece; those without any are passed over."""
        if len(changes) or head.is_fresh:
            self._entries.append((head, self._spill.keep(changes)))

    def add_coded(self, head: RecordHead, piece: DevicePiece) -> None:
        """Keep one piece as it was coded; those without a change are passed over."""
        if piece.streams.n_changed:
            payload = self._spill.keep_array(piece.streams.payload)
            kept = piece._replace(streams=piece.streams._replace(payload=payload))
            self._coded[len(self._coded)] = CodedStep(head, kept)

    def __iter__(self) -> Iterator[tuple[RecordHead, Changes]]:
        return iter(self._entries)

    @property
    def coded(self) -> Mapping[int, CodedStep]:
        """The coded pieces that are not known to be written yet, by number."""
        return self._coded

    def written(self) -> None:
        """What was staged is in the baseline."""
        if self.staged is not None:
            for number in self.staged.numbers:
                self._coded.pop(number, None)
        self.staged = None

    def close(self) -> None:
        """Give back memory and disk."""
        self._entries.clear()
        self._coded.clear()
        self.staged = None
        self._spill = Spill()
