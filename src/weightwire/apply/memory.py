"""A patch onto live tensors: prove the base, decode everything, prove the target, then overwrite."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from weightwire.apply.device_stream import settle
from weightwire.apply.device_writes import DeviceWrites
from weightwire.apply.launches import Launches, find_launches, with_copies
from weightwire.apply.proof import require_base, require_target
from weightwire.apply.staging import Staging
from weightwire.codec.patch import Patch
from weightwire.codec.piece import thread_count
from weightwire.diff.device_views import DeviceView
from weightwire.diff.memory import MemoryState, State, tensors_of
from weightwire.diff.views import TensorView, new_like
from weightwire.digest import digest_tensor
from weightwire.errors import TargetMismatch, UnsupportedLayout
from weightwire.model import Bits, Changes, TensorSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Staged:
    """Decoded and proven changes, ready to be written; nothing has been touched yet."""

    writes: tuple[tuple[str, int, Changes], ...]
    """Tensor, first element of the piece, changes within it."""
    fresh: Mapping[str, tuple[TensorSpec, Bits]]
    """Tensors to be created or replaced: new, retyped or reshaped."""
    copies: Mapping[str, tuple[str, ...]]
    """Names the sender has tied to a tensor but this state keeps as copies: written like it."""
    retied: frozenset[str]
    """Names that held other bits before the sender tied them: they get the tensor itself."""
    tied: Mapping[str, str]
    """Every alias of the result."""
    removed: tuple[str, ...]
    names: tuple[str, ...]
    """One name of each storage; others may share it, and must not be taken for it."""
    launches: Launches
    """Further writes: those that a device has itself, for tensors that it holds."""
    devices: frozenset[torch.device]
    """All that are written to, in either way."""


@dataclass(frozen=True)
class Applied:
    """What an apply did."""

    digest: str
    n_changed: int


def apply(state: State, patch: Patch, *, n_threads: int | None = None) -> Applied:
    """Bring a state from the patch's base to its target, in place.

    ``state`` is a mapping of names to NumPy arrays, torch tensors or DLPack objects, or a torch
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
    require_target(view_live(state, patch.index.tied), patch)
    return Applied(patch.target_digest, patch.n_changed)


def stage(state: State, patch: Patch) -> Staged:
    """Decode and prove a patch against a state without writing to it.

    Raises:
        the same as ``apply``.
    """
    memory = view_live(state, patch.index.tied)
    require_base(memory, patch)
    staging = Staging(memory)
    staging.take(patch)
    return ready(state, memory, staging)


def ready(state: State, memory: MemoryState, staging: Staging) -> Staged:
    """Check that what was staged over ``memory`` can be written to ``state``, all of it.

    Raises:
        UnsupportedLayout: a tensor cannot be written in place, or a module would need other tensors.
    """
    specs, tied = staging.specs, staging.ties
    copies, retied = _aliases(memory, tied)
    removed = tuple(name for name in memory.views if name not in specs and name not in tied)
    fresh = {name: (specs[name], bits) for name, bits in staging.fresh.items()}
    if (removed or fresh or retied) and not isinstance(state, MutableMapping):
        raise UnsupportedLayout(
            "the patch adds, removes, ties or reshapes tensors; pass a dict, not a module"
        )
    launches = find_launches(state, memory, copies, staging.device_writes())
    others = [name for name in staging.changed_names if name not in launches.names]
    writes = tuple(staging.writes(others))
    written = {name for name, _, _ in writes} | launches.names
    views = [memory.views[each] for name in written for each in with_copies(copies, name)]
    for view in views:
        view.require_writable()
    return Staged(
        writes,
        fresh,
        copies,
        retied,
        dict(tied),
        removed,
        tuple(memory.views),
        launches,
        devices_of(views),
    )


def activate(state: State, staged: Staged, *, n_threads: int | None = None) -> None:
    """Overwrite live tensors with what was staged; safe to repeat after an interruption."""
    made = _make_fresh(state, staged)
    beside = _launches(state, staged)
    settle(staged.devices)
    beside.write()
    for view, start, changes in _views_of(state, staged):
        view.write(start, changes, thread_count(n_threads))
    settle(staged.devices)
    if isinstance(state, MutableMapping):
        _restructure(state, staged, made)


def check_written(state: State, staged: Staged) -> None:
    """Read back every element that was written.

    Raises:
        TargetMismatch: live memory holds something else; names the tensor.
    """
    wrong = _launches(state, staged).first_wrong() or next(
        (
            view.spec.name
            for view, start, changes in _views_of(state, staged)
            if not view.holds(start, changes, thread_count())
        ),
        None,
    )
    if wrong is not None:
        raise TargetMismatch(
            f"tensor {wrong!r:.200}: live memory is not what was just written to it"
        )


def _launches(state: State, staged: Staged) -> DeviceWrites:
    return staged.launches.now(state, lambda: view_live(state, staged.tied, staged.names))


def _views_of(
    state: State, staged: Staged
) -> Iterator[tuple[TensorView | DeviceView, int, Changes]]:
    """Where the host's changes go, as it is now."""
    views = view_live(state, staged.tied, staged.names).views if staged.writes else {}
    for name, start, changes in staged.writes:
        for each in with_copies(staged.copies, name):
            yield views[each], start, changes


def devices_of(views: Iterable[TensorView | DeviceView]) -> frozenset[torch.device]:
    """Where those tensors are that are not on the host."""
    return frozenset(view.tensor.device for view in views if isinstance(view, DeviceView))


def view_live(
    state: State, tied: Collection[str], names: Iterable[str] | None = None
) -> MemoryState:
    """The state's views. Of the names of one storage the first counts, and those ``tied`` come last."""
    pairs = list(tensors_of(state))
    if names is not None:
        wanted = {*names, *tied}
        pairs = [pair for pair in pairs if pair[0] in wanted]
    return MemoryState(sorted(pairs, key=lambda pair: pair[0] in tied))


def _aliases(
    memory: MemoryState, tied: Mapping[str, str]
) -> tuple[dict[str, tuple[str, ...]], frozenset[str]]:
    """Names tied in the target but not in this state: copies by tensor, and those that are none."""
    copies: dict[str, tuple[str, ...]] = {}
    retied = set()
    for alias, name in tied.items():
        if alias in memory.views and _is_copy(memory, alias, name):
            copies[name] = (*copies.get(name, ()), alias)
        elif alias in memory.views or memory.ties.get(alias, name) != name:
            retied.add(alias)
    return copies, frozenset(retied)


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
    for alias, name in staged.tied.items():
        if alias not in state or name in made or alias in staged.retied:
            state[alias] = state[name]
    for name in staged.removed:
        state.pop(name, None)
