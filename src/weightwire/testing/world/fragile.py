"""An engine's memory in which activations are interrupted, refused, or silently do nothing."""

from __future__ import annotations

import numpy as np

from weightwire.apply.targets import MemoryTarget, Ready
from weightwire.testing.world.handles import Chances
from weightwire.testing.world.tensors import Array, Model, bits_of
from weightwire.testing.world.troubles import Trouble


class Interrupted(Exception):
    """What an engine raises when it is stopped in the middle of a write."""


class Refused(OSError):
    """What the system raises when it cannot write."""


class FragileTarget(MemoryTarget):
    """Live tensors; undoing a part of a write leaves what an interrupted one leaves."""

    def __init__(self, model: Model, chances: Chances) -> None:
        super().__init__(model, n_threads=1)
        self._model, self._chances = model, chances

    def activate(self, ready: Ready) -> None:
        """Write, or write a part of it.

        Raises:
            Interrupted, Refused: after a part.
        """
        before = {name: (array, array.copy()) for name, array in self._model.items()}
        super().activate(ready)
        if self._chances.strikes(Trouble.ACTIVATION_INTERRUPTED):
            self._undo_some(before)
            raise Interrupted
        if self._chances.strikes(Trouble.ACTIVATION_FAILED):
            self._undo_some(before)
            raise Refused("cannot write (injected)")
        if self._chances.strikes(Trouble.WRITE_LOST):
            for name, (array, old) in before.items():
                if self._model.get(name) is array:
                    self._undo_elements(array, old)

    def _undo_some(self, before: dict[str, tuple[Array, Array]]) -> None:
        for name in list(self._model):
            if self._chances.chance.random() < 0.5:
                continue
            if name not in before:
                del self._model[name]
            elif self._model[name] is before[name][0]:
                self._undo_elements(*before[name])

    def _undo_elements(self, array: Array, old: Array) -> None:
        now, then = bits_of(array), bits_of(old)
        changed = np.flatnonzero(now != then)
        if len(changed):
            first = self._chances.chance.randrange(len(changed))
            now[changed[first:]] = then[changed[first:]]
