"""Did the state change while it was being read? torch counts writes to a tensor; others do not say."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from weightwire.diff.device_streams import Moment, devices_in_use
from weightwire.diff.memory import tensors_of
from weightwire.diff.state import DerivedState
from weightwire.diff.views import is_torch
from weightwire.errors import StateMoved


class MoveGuard:
    """Remembers how often each torch tensor of a state was written to, and where its streams were.

    States that are made anew at every publish (a callable) or read from disk have nothing to watch.
    Made in the caller's thread, whose streams count.
    """

    def __init__(self, state: Any) -> None:
        watched = list(_watched(state))
        self._counts = [
            (name, tensor, tensor._version) for name, tensor in watched if _is_counted(tensor)
        ]
        self._before = Moment(() if watched else devices_in_use())
        self.moment = Moment(tensor.device for _, tensor in watched if is_torch(tensor))
        """What its tensors are read after: everything that was submitted before this was made."""

    def wait_for_caller(self) -> None:
        """Where nothing is watched: until all is there that the caller's streams had been given.

        A callable makes a state of it in whichever thread reads, on that thread's streams.
        """
        self._before.wait()

    def check(self) -> None:
        """Refuse what was read if any tensor was written to since.

        Raises:
            StateMoved: names the first tensor.
        """
        for name, tensor, count in self._counts:
            if tensor._version != count:
                raise StateMoved(
                    f"tensor {name!r} was written to while it was being read: nothing was published;"
                    " call wait_until_read() before the next optimizer step, or leave out overlap"
                )


def _is_counted(tensor: Any) -> bool:
    """Of what was made in inference mode, torch counts no writes, and refuses to be asked."""
    return is_torch(tensor) and not tensor.is_inference()


def _watched(state: Any) -> Iterable[tuple[str, Any]]:
    while isinstance(state, DerivedState):
        state = state.source
    if "torch" in sys.modules and (hasattr(state, "state_dict") or hasattr(state, "items")):
        return tensors_of(state)
    return ()
