"""A patch onto live tensors: prove the base, decode everything, prove the target, then overwrite."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightwire.apply.proof import check_promise, require_base, require_target
from weightwire.apply.structure import is_fresh, restructures
from weightwire.codec.patch import Patch
from weightwire.codec.patched import PatchedState
from weightwire.codec.piece import default_threads
from weightwire.diff.memory import MemoryState, State, tensors_of
from weightwire.diff.views import new_like
from weightwire.errors import UnsupportedLayout
from weightwire.model import Bits, Changes, TensorSpec


@dataclass(frozen=True)
class Staged:
    """A decoded and proven patch, ready to be written; nothing has been touched yet."""

    patch: Patch
    writes: tuple[tuple[str, int, Changes], ...]
    """Tensor, first element of the piece, changes within it."""
    fresh: Mapping[str, tuple[TensorSpec, Bits]]
    """Tensors to be created or replaced: new, retyped or reshaped."""


@dataclass(frozen=True)
class Applied:
    """What an apply did."""

    digest: str
    n_changed: int


def apply(state: State, patch: Patch, *, n_threads: int | None = None) -> Applied:
    """Bring a state from the patch's base to its target, in place.

    ``state`` is a mapping of names to NumPy arrays, torch CPU tensors or DLPack objects, or a torch
    module. All checks come before the first write; after the last one, live memory is read again.

    Raises:
        BaseMismatch, MissingTensor: not the state this patch was made for; nothing was written.
        RetryError: the patch is damaged; nothing was written.
        UnsupportedLayout: a tensor cannot be written in place; nothing was written.
        TargetMismatch: live memory is not what was written to it.
    """
    staged = stage(state, patch)
    activate(state, staged, n_threads=n_threads)
    require_target(MemoryState(tensors_of(state)), patch)
    return Applied(patch.target_digest, patch.n_changed)


def stage(state: State, patch: Patch) -> Staged:
    """Decode and prove a patch against a state without writing to it.

    Raises:
        the same as ``apply``.
    """
    memory = MemoryState(tensors_of(state))
    require_base(memory, patch)
    patched = PatchedState(memory, patch)
    _check_writable(state, memory, patch)
    writes, fresh = [], {}
    for name, pieces in patch.heads.items():
        head = pieces[0][1]
        if is_fresh(head):
            fresh[name] = (head.spec, patched.read(name, 0, head.spec.n_elements))
            continue
        writes += [(name, h.start, patched.changes(bucket, h)) for bucket, h in pieces]
    check_promise(patch, patched.specs)
    return Staged(patch, tuple(writes), fresh)


def activate(state: State, staged: Staged, *, n_threads: int | None = None) -> None:
    """Overwrite live tensors with a staged patch; safe to repeat after an interruption."""
    memory = MemoryState(tensors_of(state))
    aliases = _aliases(memory, staged.patch)
    for name, start, changes in staged.writes:
        for each in (name, *aliases.get(name, ())):
            memory.views[each].write(start, changes, n_threads or default_threads())
    if isinstance(state, MutableMapping):
        _restructure(state, staged)


def _aliases(memory: MemoryState, patch: Patch) -> dict[str, list[str]]:
    """Names the sender has tied but this state keeps apart: they are written too."""
    found: dict[str, list[str]] = {}
    for alias, name in patch.index.tied.items():
        if alias in memory.views:
            found.setdefault(name, []).append(alias)
    return found


def _restructure(state: MutableMapping[str, Any], staged: Staged) -> None:
    neighbour = next(iter(state.values()), np.empty(0))
    for name, (spec, bits) in staged.fresh.items():
        state[name] = new_like(spec, bits, neighbour)
    for alias, name in staged.patch.index.tied.items():
        if alias not in state or name in staged.fresh:
            state[alias] = state[name]
    for name in staged.patch.index.removed:
        state.pop(name, None)


def _check_writable(state: State, memory: MemoryState, patch: Patch) -> None:
    if restructures(patch) and not isinstance(state, MutableMapping):
        raise UnsupportedLayout(
            "the patch adds, removes or reshapes tensors; pass a dict, not a module"
        )
    for name in patch.heads:
        view = memory.views.get(name)
        if view is not None and not view.array.flags.writeable:
            raise UnsupportedLayout(f"{name!r} is read-only; pass writable tensors")
