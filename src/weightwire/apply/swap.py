"""Live tensors kept twice: the next version is written beside the one in use, and the two change places.

The pause shrinks to exchanging pointers; the price is the weights' memory once more. It suits
modules and mappings whose tensors nobody else holds on to: whoever kept a reference to a tensor's
memory keeps the old version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from weightwire.apply.device_stream import settle
from weightwire.apply.memory import view_live
from weightwire.apply.staging import Staging
from weightwire.apply.targets import MemoryTarget, Ready, require_digest
from weightwire.codec.piece import thread_count
from weightwire.diff.memory import MemoryState, State, tensors_of
from weightwire.diff.state import StateReader
from weightwire.diff.views import is_torch, new_like, view_tensor
from weightwire.errors import TargetMismatch, UnsupportedLayout
from weightwire.model import Changes

_Write = tuple[str, int, Changes]


class SwapTarget:
    """Implements ``Target``: prepares the whole next version aside, activates by exchange."""

    def __init__(self, state: State, n_threads: int | None = None) -> None:
        self._state, self._n_threads = state, thread_count(n_threads)
        self._live = MemoryTarget(state, n_threads)
        self._back: dict[str, Any] = {}
        self._behind: tuple[_Write, ...] | None = None
        """What the tensors aside lack of the version in use; None if they must be written whole."""

    def open(
        self, names: Iterable[str] | None, ties: Mapping[str, str]
    ) -> AbstractContextManager[StateReader | None]:
        """Views of the version in use."""
        return self._live.open(names, ties)

    def prepare(self, staging: Staging, digest: str, *, folder: Path | None) -> Ready:
        """Write and prove the next version aside; the one in use is not touched.

        Raises:
            UnsupportedLayout: a module would need other tensors.
            TargetMismatch: the memory aside does not hold what was written to it.
        """
        ready = self._live.prepare(staging, digest, folder=folder)
        behind, self._behind = self._behind, None
        is_same = folder is None and not staging.fresh and self._back.keys() == staging.specs.keys()
        if behind is not None and is_same:
            self._catch_up((*behind, *staging.writes()))
        else:
            self._back = self._copies(staging)
        require_digest(MemoryState(self._back.items()), digest)
        return ready

    def activate(self, ready: Ready) -> None:
        """Exchange the tensors; safe to repeat."""
        staging = ready.staging
        live = dict(tensors_of(self._state))
        # What an engine has in its queues still reads the tensors that go aside.
        settle({t.device for t in live.values() if is_torch(t)})
        old = {name: _memory_of(live[name]) for name in self._back if name in live}
        for name, tensor in self._back.items():
            for each in (name, *(a for a, n in staging.ties.items() if n == name)):
                self._put(live.get(each), each, tensor)
        if isinstance(self._state, MutableMapping) and ready.staged is not None:
            for name in ready.staged.removed:
                self._state.pop(name, None)
        self._keep_aside(ready, old)

    def check(self, ready: Ready) -> None:
        """See that what was prepared is what is in use.

        Raises:
            TargetMismatch: it is not.
        """
        memory = view_live(self._state, ready.staging.ties, ready.staging.specs)
        for name, start, changes in ready.staging.writes():
            if not memory.views[name].holds(start, changes, self._n_threads):
                raise TargetMismatch(f"tensor {name!r:.200} is not the one that was put in use")

    def _catch_up(self, writes: Iterable[_Write]) -> None:
        for name, start, changes in writes:
            view_tensor(name, self._back[name]).write(start, changes, self._n_threads)

    def _copies(self, staging: Staging) -> dict[str, Any]:
        live = dict(tensors_of(self._state))
        neighbour = next(iter(live.values()), None)
        return {
            name: new_like(spec, staging.read(name, 0, spec.n_elements), live.get(name, neighbour))
            for name, spec in staging.specs.items()
        }

    def _put(self, live: Any, name: str, tensor: Any) -> None:
        if hasattr(live, "data_ptr"):
            live.data = tensor
        elif isinstance(self._state, MutableMapping):
            self._state[name] = tensor
        else:
            raise UnsupportedLayout(f"{name!r}: neither a torch tensor nor in a mapping")

    def _keep_aside(self, ready: Ready, old: dict[str, Any]) -> None:
        """The tensors that were in use are aside now, one version behind."""
        is_anew = ready.folder is not None or ready.staging.fresh or old.keys() != self._back.keys()
        # After an interrupted exchange some of them are in use already.
        is_repeated = any(
            _is_same(old[name], tensor) for name, tensor in self._back.items() if name in old
        )
        if is_anew or is_repeated:
            self._back, self._behind = {}, None
        else:
            self._back, self._behind = old, tuple(ready.staging.writes())


def _memory_of(tensor: Any) -> Any:
    """The tensor's memory, whatever its owner points to later."""
    return tensor.detach() if hasattr(tensor, "data_ptr") else tensor


def _is_same(one: Any, other: Any) -> bool:
    return view_tensor("", one).storage == view_tensor("", other).storage
