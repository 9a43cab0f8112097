"""This rank's part of a state: of a DTensor its local rows, of everything else all or nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from weightwire.diff.cast import Cast
from weightwire.diff.memory import MemoryState, State, is_maker, tensors_of
from weightwire.diff.places import Outline
from weightwire.diff.state import DerivedState, StateView
from weightwire.diff.views import is_torch, view_tensor
from weightwire.errors import DuplicateTensor, UnsupportedLayout
from weightwire.model import TensorSpec
from weightwire.trainers.ranks import Ranks
from weightwire.trainers.shards import Shards


def open_shards(state: State, ranks: Ranks) -> Shards:
    """What this rank answers for.

    DTensors: the local rows; of replicas, the first. Plain tensors are the same on every rank, and
    rank 0 answers for them.

    Raises:
        UnsupportedLayout: a tensor that is not spread by rows and cannot be; names it.
        UnsupportedDType, DuplicateTensor: as in any state.
    """
    if isinstance(state, Shards):
        return state
    if isinstance(state, Cast):
        return _cast(state, open_shards(state.source, ranks))
    if isinstance(state, DerivedState):
        raise UnsupportedLayout(
            f"{type(state).__name__} needs whole tensors; only cast takes shards"
        )
    if is_maker(state):
        return open_shards(state(), ranks)
    return _Opening(ranks).open(tensors_of(state))


def _cast(cast: Cast, shards: Shards) -> Shards:
    names = frozenset(name for name, each in shards.watched.items() if is_torch(each))
    specs = {name: cast.spec(spec) for name, spec in shards.outline.specs.items()}
    outline = Outline(specs, shards.outline.ties)
    return replace(shards, outline=outline, local=cast.over(shards.local, names))


class _Opening:
    """Goes through the tensors once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._specs: dict[str, TensorSpec] = {}
        self._ties: dict[str, str] = {}
        self._starts: dict[str, int] = {}
        self._locals: dict[str, Any] = {}
        self._watched: dict[str, Any] = {}
        self._first_name: dict[object, str] = {}

    def open(self, tensors: Iterable[tuple[str, Any]]) -> Shards:
        for name, tensor in tensors:
            if name in self._specs or name in self._ties:
                raise DuplicateTensor(f"{name!r} occurs twice in one state")
            self._add(name, tensor)
        memory = MemoryState(self._locals.items())
        flat = {
            name: replace(spec, shape=(spec.n_elements,)) for name, spec in memory.specs.items()
        }
        outline = Outline(self._specs, self._ties)
        return Shards(outline, self._starts, StateView(memory, flat, {}), self._watched)

    def _add(self, name: str, tensor: Any) -> None:
        is_spread = _is_dtensor(tensor)
        first = self._first_name.setdefault(_identity(name, tensor, is_spread=is_spread), name)
        if first != name:
            self._ties[name] = first
        elif is_spread:
            self._add_spread(name, tensor)
        else:
            self._add_plain(name, tensor)

    def _add_plain(self, name: str, tensor: Any) -> None:
        self._specs[name] = view_tensor(name, tensor).spec
        if self._ranks.rank == 0:
            self._starts[name], self._locals[name] = 0, tensor
        self._watched[name] = tensor

    def _add_spread(self, name: str, tensor: Any) -> None:
        from weightwire.trainers.dtensor_rows import local_rows

        rows = local_rows(name, tensor)
        self._specs[name] = replace(view_tensor(name, rows.tensor).spec, shape=rows.shape)
        is_first_of_empty = self._specs[name].n_elements == 0 and self._ranks.rank == 0
        if rows.is_mine and (rows.tensor.numel() or is_first_of_empty):
            self._starts[name], self._locals[name] = rows.start, rows.tensor
        self._watched[name] = rows.watched


def _identity(name: str, tensor: Any, *, is_spread: bool) -> object:
    """Equal for two names that are one tensor; where this rank has no rows of it, the object tells."""
    view = view_tensor(name, tensor.detach().to_local() if is_spread else tensor)
    if view.spec.n_elements:
        return view.storage
    return id(tensor) if is_spread else name


def _is_dtensor(tensor: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
