"""A patch onto live tensors: prove the base, decode everything, prove the target, then overwrite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightwire.apply.proof import check_promise, require_base, require_target
from weightwire.apply.structure import restructures
from weightwire.codec.patch import Patch
from weightwire.codec.patched import PatchedState
from weightwire.codec.piece import thread_count
from weightwire.diff.memory import MemoryState, State, tensors_of
from weightwire.diff.views import new_like
from weightwire.digest import digest_tensor
from weightwire.errors import BaseMismatch, UnsupportedLayout
from weightwire.model import Bits, Changes, TensorSpec


@dataclass(frozen=True)
class Staged:
    """A decoded and proven patch, ready to be written; nothing has been touched yet."""

    patch: Patch
    writes: tuple[tuple[str, int, Changes], ...]
    """Tensor, first element of the piece, changes within it."""
    fresh: Mapping[str, tuple[TensorSpec, Bits]]
    """Tensors to be created or replaced: new, retyped or reshaped."""
    copies: Mapping[str, tuple[str, ...]]
    """Names the sender has tied to a tensor but this state keeps as copies: written like it."""
    retied: frozenset[str]
    """Names that held other bits before the sender tied them: they get the tensor itself."""


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
    state = list(state) if isinstance(state, Iterator) else state
    staged = stage(state, patch)
    activate(state, staged, n_threads=n_threads)
    require_target(_open(state, patch), patch)
    return Applied(patch.target_digest, patch.n_changed)


def stage(state: State, patch: Patch) -> Staged:
    """Decode and prove a patch against a state without writing to it.

    Raises:
        the same as ``apply``.
    """
    memory = _open(state, patch)
    require_base(memory, patch)
    patched = PatchedState(memory, patch)
    _check_new_aliases(memory, patch)
    copies, retied = _aliases(memory, patch)
    if (restructures(patch) or retied) and not isinstance(state, MutableMapping):
        raise UnsupportedLayout(
            "the patch adds, removes, ties or reshapes tensors; pass a dict, not a module"
        )
    writes, fresh = [], {}
    for name, pieces in patch.heads.items():
        head = pieces[0][1]
        if head.is_fresh:
            fresh[name] = (head.spec, patched.read(name, 0, head.spec.n_elements))
            continue
        for each in (name, *copies.get(name, ())):
            memory.views[each].require_writable()
        writes += [(name, h.start, patched.changes(bucket, h)) for bucket, h in pieces]
    check_promise(patch, patched.specs)
    return Staged(patch, tuple(writes), fresh, copies, retied)


def activate(state: State, staged: Staged, *, n_threads: int | None = None) -> None:
    """Overwrite live tensors with a staged patch; safe to repeat after an interruption."""
    made = _make_fresh(state, staged)
    memory = _open(state, staged.patch)
    for name, start, changes in staged.writes:
        for each in (name, *staged.copies.get(name, ())):
            memory.views[each].write(start, changes, thread_count(n_threads))
    if isinstance(state, MutableMapping):
        _restructure(state, staged, made)


def _open(state: State, patch: Patch) -> MemoryState:
    """The state's views. Of the names of one storage the first counts, and the sender chose which."""
    return MemoryState(sorted(tensors_of(state), key=lambda pair: pair[0] in patch.index.tied))


def _aliases(
    memory: MemoryState, patch: Patch
) -> tuple[dict[str, tuple[str, ...]], frozenset[str]]:
    """Names tied in the target but not in this state: copies by tensor, and those that are none."""
    copies: dict[str, tuple[str, ...]] = {}
    retied = set()
    for alias, name in patch.index.tied.items():
        if alias in memory.views and _is_copy(memory, alias, name):
            copies[name] = (*copies.get(name, ()), alias)
        elif alias in memory.views:
            retied.add(alias)
    return copies, frozenset(retied)


def _check_new_aliases(memory: MemoryState, patch: Patch) -> None:
    """Aliases are in no digest: one that is new beside one that is unknown is a damaged name."""
    there = memory.views.keys() | memory.ties.keys()
    new = {name: alias for alias, name in patch.index.tied.items() if alias not in there}
    for alias, name in memory.ties.items():
        if name in new and alias not in patch.index.tied:
            raise BaseMismatch(
                f"the state ties {alias!r} to {name!r}, the patch ties {new[name]!r} to it instead;"
                " nothing was written; fetch the patch again"
            )


def _is_copy(memory: MemoryState, alias: str, name: str) -> bool:
    if name not in memory.views:
        return False
    one, other = memory.specs[alias], memory.specs[name]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return digest_tensor(memory, alias) == digest_tensor(memory, name)


def _make_fresh(state: State, staged: Staged) -> dict[str, Any]:
    """New tensors, made before the first write: memory may run out here, and no later."""
    if not staged.fresh:
        return {}
    neighbour = next(iter(state.values()), np.empty(0))
    return {name: new_like(spec, bits, neighbour) for name, (spec, bits) in staged.fresh.items()}


def _restructure(state: MutableMapping[str, Any], staged: Staged, made: dict[str, Any]) -> None:
    state.update(made)
    for alias, name in staged.patch.index.tied.items():
        if alias not in state or name in made or alias in staged.retied:
            state[alias] = state[name]
    for name in staged.patch.index.removed:
        state.pop(name, None)
