"""Where an engine holds which elements of which checkpoint tensor, checked for sense.

A layout is made from what a loader did in a dry run. It is refused, by the parameter's name, if
anything the engine serves from would be left over, or written twice from different elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weightwire.apply.layouts.casts import Cast
from weightwire.apply.layouts.engine_memory import EngineMemory
from weightwire.apply.layouts.regions import Box, strided
from weightwire.errors import UnsupportedLayout
from weightwire.model import TensorSpec

_PADDED, _HELD = 1, 2
_Cover = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Part:
    """A box of a checkpoint tensor and the engine memory that holds it."""

    name: str
    """The checkpoint tensor."""
    parameter: str
    """The engine's name for it, for messages."""
    memory: int
    """Which of the layout's memories."""
    box: Box
    cast: Cast
    is_copy: bool = False
    """Another part holds the same elements: written like it, and counted once."""


@dataclass(frozen=True)
class Place:
    """A strided piece of engine memory: a parameter, or a part of one."""

    parameter: str
    memory: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Padding:
    """Engine memory that the loader fills with constants, whatever the checkpoint says."""

    place: Place
    view: Any
    """The engine's tensor, narrowed to what is filled."""
    value: Any
    """A tensor that can be copied to it."""


@dataclass(frozen=True)
class Layout:
    """Every part of every checkpoint tensor, and what else the engine has."""

    specs: Mapping[str, TensorSpec]
    parts: Mapping[str, tuple[Part, ...]]
    """By checkpoint tensor; a tensor that this engine does not use is not listed."""
    paddings: tuple[Padding, ...]
    untouched: tuple[str, ...]
    """Parameters the loader leaves alone: nothing of the run is in them."""
    memories: tuple[EngineMemory, ...] = field(repr=False)

    def parts_of(self, name: str) -> tuple[Part, ...]:
        """All parts of a checkpoint tensor; none if it is of no use here."""
        return self.parts.get(name, ())

    def n_held(self, name: str) -> int:
        """How many elements of a checkpoint tensor this engine holds."""
        return sum(part.box.n_elements for part in self.parts_of(name) if not part.is_copy)

    def is_whole(self, name: str) -> bool:
        """Whether it holds all of them."""
        return self.n_held(name) == self.specs[name].n_elements


@dataclass(frozen=True)
class DryRun:
    """What a loader did, in order, and the engine it did it to."""

    written: Sequence[Part | Padding]
    parameters: Sequence[Place]
    memories: tuple[EngineMemory, ...]
    sizes: tuple[int, ...]
    """Elements in each memory."""


def check_layout(specs: Mapping[str, TensorSpec], run: DryRun) -> Layout:
    """The layout that follows from a dry run. One byte per element of one storage is needed at a time.

    Raises:
        UnsupportedLayout: names the parameter that it would not be right for.
    """
    written = _without_repeats(run.written)
    by_memory: dict[int, list[Part | Padding]] = {}
    for each in written:
        by_memory.setdefault(_memory_of(each), []).append(each)
    owners: dict[int, list[Place]] = {}
    for place in run.parameters:
        owners.setdefault(place.memory, []).append(place)
    untouched: list[str] = []
    for number, places in owners.items():
        cover = _cover(run.sizes[number], by_memory.get(number, ()))
        untouched += [place.parameter for place in places if not _is_complete(place, cover)]
    paddings = tuple(each for each in written if isinstance(each, Padding))
    parts = _by_name(specs, [each for each in written if isinstance(each, Part)])
    return Layout(specs, parts, paddings, tuple(untouched), run.memories)


def _without_repeats(written: Iterable[Part | Padding]) -> list[Part | Padding]:
    """A name tied to another one writes the same elements to the same places a second time."""
    found: dict[object, Part | Padding] = {}
    for number, each in enumerate(written):
        is_part = isinstance(each, Part)
        key = (each.name, each.memory, each.box) if is_part else number  # type: ignore[union-attr]
        found.setdefault(key, each)
    return list(found.values())


def _memory_of(written: Part | Padding) -> int:
    return written.memory if isinstance(written, Part) else written.place.memory


def _cover(size: int, written: Iterable[Part | Padding]) -> _Cover:
    """What becomes of each element of one storage."""
    cover = np.zeros(size, np.uint8)
    for each in written:
        if isinstance(each, Padding):
            view, kind = _see(cover, each.place), _PADDED
        else:
            box = each.box
            view = strided(cover, box.place, box.shape, [a.place for a in box.axes])
            kind = _HELD
        _require_free(view, each)
        view[...] = kind
    return cover


def _require_free(view: _Cover, written: Part | Padding) -> None:
    """Padding may be overwritten; what was loaded may not."""
    if not (view == _HELD).any():
        return
    if isinstance(written, Padding):
        raise UnsupportedLayout(
            f"parameter {written.place.parameter!r:.200}: its loader fills over what it loaded"
        )
    raise UnsupportedLayout(
        f"parameter {written.parameter!r:.200}: {written.name!r:.200} and another tensor of the"
        " checkpoint are loaded to the same place; the run must tie them, or drop one"
    )


def _see(cover: _Cover, place: Place) -> _Cover:
    if 0 in place.shape:
        return cover[:0]
    return strided(cover, place.offset, place.shape, place.strides)


def _is_complete(place: Place, cover: _Cover) -> bool:
    """Whether the loader fills a parameter; False if it leaves it alone.

    Raises:
        UnsupportedLayout: it fills some of it.
    """
    view = _see(cover, place)
    n_filled = int(np.count_nonzero(view))
    if n_filled not in (0, view.size):
        raise UnsupportedLayout(
            f"parameter {place.parameter!r:.200}: the loader fills {n_filled:,} of"
            f" {view.size:,} elements; the others would keep whatever they hold"
        )
    return n_filled == view.size


def _by_name(specs: Mapping[str, TensorSpec], parts: Iterable[Part]) -> dict[str, tuple[Part, ...]]:
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(part.name, []).append(part)
    return {name: _with_copies(specs[name], group) for name, group in found.items()}


def _with_copies(spec: TensorSpec, parts: list[Part]) -> tuple[Part, ...]:
    """Tell which parts only repeat what others hold.

    Raises:
        UnsupportedLayout: some elements are held twice and some once, by the same part.
    """
    if len(parts) == 1:
        return tuple(parts)
    cover = np.zeros(spec.n_elements, np.uint8)
    found = []
    for part in sorted(parts, key=lambda part: -part.box.n_elements):
        box = part.box
        view = strided(cover, box.source, box.shape, [axis.source for axis in box.axes])
        n_held = int(np.count_nonzero(view))
        if n_held not in (0, box.n_elements):
            raise UnsupportedLayout(
                f"parameter {part.parameter!r:.200}: it shares some elements of {part.name!r:.200}"
                " with other parameters, and not all"
            )
        view[...] = _HELD
        found.append(replace(part, is_copy=n_held > 0))
    return tuple(found)
