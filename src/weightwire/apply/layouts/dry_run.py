"""Every operation of a loader, seen below Python: what it copies is noted, not copied.

Only imported where torch is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from weightwire.apply.layouts.casts import cast_between, is_exact
from weightwire.apply.layouts.engine_parameters import EngineParameters
from weightwire.apply.layouts.layout import Padding, Part
from weightwire.apply.layouts.origins import Known, Piece, Unknown, pieces_behind, read_as, view_to
from weightwire.apply.layouts.regions import Axis, boxes
from weightwire.apply.layouts.torch_shapes import (
    shape_only,
    untouched_like,
    without_device,
    written_by,
)
from weightwire.diff.views import torch_element_type, torch_type
from weightwire.errors import UnsupportedLayout
from weightwire.model import TensorSpec

_SHAPE_ONLY = frozenset(
    [
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    ]
)
"""Operations that look at a tensor's type and shape, and at none of its elements."""

_COPIES = frozenset(["_to_copy", "clone", "lift_fresh_copy"])


class DryRunMode(TorchDispatchMode):  # type: ignore[misc]
    """Notes copies from probes to parameters; lets nothing be written to a parameter."""

    def __init__(self, parameters: EngineParameters, ties: Mapping[str, str], seed: int) -> None:
        super().__init__()
        self._parameters, self._ties, self._seed = parameters, ties, seed
        self._tracked: dict[int, Known | Unknown] = {}
        self._alive: list[StorageWeakRef] = []
        self._scalars: dict[float, Piece] = {}
        self._born: set[int] = set()
        """Storages made during the run: the loader's own."""
        self.written: list[Part | Padding] = []
        self.refusal: UnsupportedLayout | None = None
        self.latest = ""
        """The tensor the loader took last: the one it fails on, if it fails."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled in here: torch need not load its compiler, which takes seconds."""
        return False

    @property
    def took_scalars(self) -> bool:
        """Whether the loader turned an element into a Python number."""
        return bool(self._scalars)

    def probes(self, specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint's tensors, as nobody has ever written them."""
        names = {**{name: name for name in specs}, **self._ties}
        for name, source in names.items():
            spec = specs[source]
            probe = torch.empty(spec.shape, dtype=torch_type(spec.dtype))
            whole = (Axis(spec.n_elements, 1, 1),)
            self._track(probe, Known((Piece(source, spec.dtype, 0, 0, whole),), spec.dtype))
            self.latest = name
            yield name, probe

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if not self._concerns(args, kwargs) or func.is_view or name in _SHAPE_ONLY:
            return self._done(func, args, kwargs)
        if name == "_unsafe_view":
            return args[0].view(args[1])
        try:
            return self._note(name, func, args, kwargs)
        except UnsupportedLayout as error:
            # A loader may catch what it does not know; the refusal stands.
            self.refusal = self.refusal or error
            raise

    def _done(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """An operation that may happen."""
        found = func(*args, **kwargs)
        if not func.is_view and not written_by(func, args, kwargs):
            for tensor in tree_leaves(found):
                if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                    self._born.add(self._number_of(tensor))
        return found

    def _note(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if name == "copy_":
            return self._copy(args[0], args[1])
        if name in ("fill_", "zero_") and self._parameters.owns(args[0]):
            return self._fill(args[0], args[1] if len(args) > 1 else 0)
        if name in _COPIES and self._record(args[0]) is not None:
            return self._clone(func, args, kwargs)
        if name in ("cat", "stack"):
            return self._join(name, func, args, kwargs)
        if name == "_local_scalar_dense":
            return self._number(func, args[0])
        targets = written_by(func, args, kwargs)
        return self._mutate(name, targets, args) if targets else self._compute(func, args, kwargs)

    # ------------------------------------------------------------------------------- copies

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        record = self._record(source)
        if self._parameters.owns(target):
            self._copy_to_parameter(target, source, record)
            return target
        self._require_own(target)
        if record is None:
            self._track(target, Unknown("copy_ over a probe"))
        else:
            self._add(target, self._pieces(source, target, record))
        return target

    def _copy_to_parameter(
        self, target: torch.Tensor, source: torch.Tensor, record: Known | Unknown | None
    ) -> None:
        place = self._parameters.place(target)
        if record is None and not self._parameters.owns(source):
            self.written.append(Padding(place, target.detach(), source.detach().clone()))
            return
        found = self._pieces(source, target, record or Unknown("reading a parameter"))
        if isinstance(found, Unknown):
            raise UnsupportedLayout(
                f"parameter {place.parameter!r:.200}: its loader computes what it holds"
                f" ({found.operation}); only views, copies and exact casts can be followed"
            )
        for piece in found.pieces:
            self._hold(place.parameter, target, piece)

    def _hold(self, parameter: str, target: torch.Tensor, piece: Piece) -> None:
        memory = self._parameters.memory(target)
        try:
            cast = cast_between(piece.dtype, torch_element_type("", target.dtype))
            for box in boxes(piece.source, piece.place, piece.axes):
                self.written.append(Part(piece.name, parameter, memory, box, cast))
        except UnsupportedLayout as error:
            raise UnsupportedLayout(f"parameter {parameter!r:.200}: {error}") from None

    def _pieces(
        self, source: torch.Tensor, target: torch.Tensor, record: Known | Unknown
    ) -> Known | Unknown:
        """What ``target`` would hold after a copy."""
        if isinstance(record, Unknown):
            return record
        seen = read_as(record, torch_element_type("", source.dtype))
        if seen is None:
            return Unknown("view of other bits")
        source, offset = source.expand(target.shape), target.storage_offset()
        view = view_to(
            source.shape, source.stride(), source.storage_offset(), target.stride(), offset
        )
        pieces, dtype = pieces_behind(seen, view), torch_element_type("", target.dtype)
        if pieces is None:
            return Unknown("view across a copy")
        if not all(is_exact(piece.dtype, dtype) for piece in pieces):
            return Unknown(f"cast from {pieces[0].dtype.name} to {dtype.name}")
        return Known(pieces, dtype)

    def _clone(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor:
        source = args[0]
        copy = untouched_like(
            func(shape_only(source), *args[1:], **without_device(kwargs)), source, kwargs
        )
        record = self._record(source)
        self._track(copy, self._pieces(source, copy, record or Unknown("copy")))
        return copy

    def _join(self, name: str, func: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Tensor:
        tensors = args[0]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        joined = untouched_like(func([shape_only(t) for t in tensors], dim), tensors[0], {})
        at = 0
        for tensor in tensors:
            n = 1 if name == "stack" else tensor.shape[dim]
            room = joined.select(dim, at) if name == "stack" else joined.narrow(dim, at, n)
            record = self._record(tensor) or Unknown(f"{name} with a constant")
            self._add(room, self._pieces(tensor, room, record))
            at += n
        return joined

    # ------------------------------------------------------------------------------- others

    def _fill(self, target: torch.Tensor, value: Any) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            self._copy(target, value)
            return target
        piece = self._scalars.get(value) if not isinstance(value, bool) else None
        place = self._parameters.place(target)
        if piece is None:
            constant = torch.full((), value, dtype=target.dtype, device=target.device)
            self.written.append(Padding(place, target.detach(), constant))
            return target
        sizes = zip(target.shape, target.stride(), strict=True)
        axes = tuple(Axis(n, 0, stride) for n, stride in sizes)
        held = Piece(piece.name, piece.dtype, piece.source, target.storage_offset(), axes)
        self._hold(place.parameter, target, held)
        return target

    def _number(self, func: Any, tensor: torch.Tensor) -> Any:
        """A number that nobody else gives, so that it is known again when it is filled in."""
        record = self._record(tensor)
        if record is None:
            return func(tensor)
        view = view_to((), (), tensor.storage_offset(), (), 0)
        found = pieces_behind(record, view) if isinstance(record, Known) else None
        if not found or tensor.dtype is torch.bool or tensor.dtype.is_complex:
            raise UnsupportedLayout(f"the loader decides by the values it loads: {record}"[:500])
        number = len(self._scalars) + 1 + self._seed * 1_000_003
        value = number * 1.000_000_119 if tensor.dtype.is_floating_point else (1 << 20) + number
        self._scalars[value] = found[0]
        return value

    def _mutate(self, name: str, targets: Sequence[torch.Tensor], args: tuple[Any, ...]) -> Any:
        for target in targets:
            if self._parameters.owns(target):
                place = self._parameters.place(target)
                raise UnsupportedLayout(
                    f"parameter {place.parameter!r:.200}: its loader writes to it by {name};"
                    " only views, copies and exact casts can be followed"
                )
            self._require_own(target)
            self._track(target, Unknown(name))
        return args[0] if args else targets[0]

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What comes out has the right shape, and holds nothing."""
        name = str(func._schema.name)
        tracked = [t for t in tree_leaves((args, kwargs)) if self._record(t) is not None]
        if not tracked:
            found = func(*args, **kwargs)
        else:
            try:
                shapes = func(
                    *tree_map(shape_only, args), **tree_map(shape_only, without_device(kwargs))
                )
            except Exception as error:
                raise UnsupportedLayout(f"the loader calls {name} on what it loads") from error
            found = tree_map(lambda t: untouched_like(t, tracked[0], kwargs), shapes)
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor, Unknown(name))
            elif tracked:
                raise UnsupportedLayout(f"the loader decides by the values it loads ({name})")
        return found

    # ------------------------------------------------------------------------------- records

    def _concerns(self, args: tuple[Any, ...], kwargs: Any) -> bool:
        return any(
            self._record(t) is not None or self._parameters.owns(t)
            for t in tree_leaves((args, kwargs))
        )

    def _record(self, tensor: Any) -> Known | Unknown | None:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == "meta":
            return None
        return self._tracked.get(tensor.untyped_storage()._cdata)

    def _track(self, tensor: torch.Tensor, record: Known | Unknown) -> None:
        self._tracked[self._number_of(tensor)] = record

    def _number_of(self, tensor: torch.Tensor) -> int:
        """A number for a tensor's storage that no other one will have."""
        storage = tensor.untyped_storage()
        number: int = storage._cdata
        if number not in self._tracked and number not in self._born:
            # Held weakly: its memory goes back, but its number is not given out again.
            self._alive.append(StorageWeakRef(storage))
        return number

    def _require_own(self, target: torch.Tensor) -> None:
        """A loader may fill buffers of its own, and parameters; anything else would be missed."""
        number = target.untyped_storage()._cdata
        if number not in self._tracked and number not in self._born:
            raise UnsupportedLayout(
                f"tensor {self.latest!r:.200} is loaded to a {tuple(target.shape)} tensor that is"
                " not among the engine's parameters; list its buffers too"
            )

    def _add(self, tensor: torch.Tensor, more: Known | Unknown) -> None:
        before = self._record(tensor) or Known((), torch_element_type("", tensor.dtype))
        if isinstance(before, Known) and isinstance(more, Known):
            more = Known((*before.pieces, *more.pieces), before.dtype)
        self._track(tensor, before if isinstance(before, Unknown) else more)
