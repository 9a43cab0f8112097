"""Where the elements of a tensor come from, through any number of views and copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weightwire.apply.layouts.regions import Axis
from weightwire.model import DType


@dataclass(frozen=True)
class Piece:
    """A box of a checkpoint tensor (``source``) that lies in some memory (``place``)."""

    name: str
    dtype: DType
    """As published, or as the loader chose to read the published bits."""
    source: int
    place: int
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Known:
    """A storage whose elements are copies of checkpoint elements, as far as they are anything."""

    pieces: tuple[Piece, ...]
    dtype: DType
    """Of the storage; wider than published after a cast."""


@dataclass(frozen=True)
class Unknown:
    """A storage that holds what was computed; nobody can say from which elements."""

    operation: str


@dataclass(frozen=True)
class View:
    """A tensor in a storage, and where each of its elements is to go."""

    offset: int
    target: int
    axes: tuple[Axis, ...]
    """``source`` is the stride in the storage, ``place`` the stride where it goes."""


def view_to(
    shape: Sequence[int],
    strides: Sequence[int],
    offset: int,
    target_strides: Sequence[int],
    target: int,
) -> View:
    """A view, element by element to another one of the same shape."""
    axes = zip(shape, strides, target_strides, strict=True)
    return View(offset, target, tuple(Axis(*axis) for axis in axes if axis[0] != 1))


def pieces_behind(known: Known, view: View) -> tuple[Piece, ...] | None:
    """The checkpoint elements that a view shows, placed where it goes; None if that is no box."""
    if any(axis.n == 0 for axis in view.axes):
        return ()
    for piece in known.pieces:
        found = _view_in_piece(piece, view)
        if found is not None:
            return (found,)
    parts = []
    for piece in known.pieces:
        found = _piece_in_view(piece, view)
        if found is not None:
            parts.append(found)
        elif _overlap(piece, view):
            return None
    return tuple(parts)


def read_as(record: Known, dtype: DType) -> Known | None:
    """The same elements, seen as another type of the same size; None if that is no reading of them."""
    if record.dtype == dtype:
        return record
    is_plain = all(piece.dtype == record.dtype for piece in record.pieces)
    if not is_plain or record.dtype.n_bytes != dtype.n_bytes:
        return None
    pieces = (Piece(p.name, dtype, p.source, p.place, p.axes) for p in record.pieces)
    return Known(tuple(pieces), dtype)


def _view_in_piece(piece: Piece, view: View) -> Piece | None:
    around = [Axis(axis.n, axis.place, axis.source) for axis in piece.axes]
    followed = _follow(around, view.offset - piece.place, view.axes)
    if followed is None:
        return None
    offset, axes = followed
    return replace(piece, source=piece.source + offset, place=view.target, axes=axes)


def _piece_in_view(piece: Piece, view: View) -> Piece | None:
    inside = [Axis(axis.n, axis.place, axis.source) for axis in piece.axes]
    followed = _follow(list(view.axes), piece.place - view.offset, inside)
    if followed is None:
        return None
    offset, axes = followed
    swapped = tuple(Axis(axis.n, axis.place, axis.source) for axis in axes)
    return replace(piece, place=view.target + offset, axes=swapped)


def _overlap(piece: Piece, view: View) -> bool:
    stop = piece.place + 1 + sum((axis.n - 1) * axis.place for axis in piece.axes)
    view_stop = view.offset + 1 + sum((axis.n - 1) * axis.source for axis in view.axes)
    return piece.place < view_stop and view.offset < stop


def _follow(
    around: list[Axis], offset: int, axes: Sequence[Axis]
) -> tuple[int, tuple[Axis, ...]] | None:
    """A box inside another one, seen from the other's far side.

    ``around`` maps ``source`` strides to ``place`` strides; ``axes`` walk along the same memory by
    ``source``. Gives the far side's offset, and the axes with far strides as ``source``. None if
    the walk leaves the box, or turns a corner in the middle of an axis.
    """
    ordered = sorted((a for a in around if a.n > 1), key=lambda axis: -axis.source)
    at = _digits(ordered, offset)
    if at is None:
        return None
    walk: list[tuple[Axis, list[int]]] = []
    for axis in _split(ordered, at, axes):
        steps = _digits(ordered, axis.source)
        if steps is None:
            return None
        walk.append((axis, steps))
    for number, outer in enumerate(ordered):
        if at[number] + sum((axis.n - 1) * steps[number] for axis, steps in walk) >= outer.n:
            return None
    far = tuple(
        replace(a, source=sum(k * o.place for k, o in zip(steps, ordered, strict=True)))
        for a, steps in walk
    )
    return sum(k * o.place for k, o in zip(at, ordered, strict=True)), far


def _split(ordered: list[Axis], at: list[int], axes: Sequence[Axis]) -> list[Axis]:
    """Cut axes that run on into the next dimension: a flattened view of a copy."""
    waiting, found = list(axes), []
    while waiting:
        axis = waiting.pop(0)
        for number, outer in enumerate(ordered):
            fits = axis.source == outer.source and axis.n > outer.n and axis.n % outer.n == 0
            if fits and at[number] == 0 and number > 0:
                rest = Axis(axis.n // outer.n, axis.source * outer.n, axis.place * outer.n)
                waiting.insert(0, rest)
                axis = replace(axis, n=outer.n)
                break
        found.append(axis)
    return found


def _digits(ordered: list[Axis], number: int) -> list[int] | None:
    """A distance as steps along each axis; None if it is not a sum of whole steps."""
    if number < 0:
        return None
    found = []
    for axis in ordered:
        found.append(number // axis.source if axis.source else 0)
        number -= found[-1] * axis.source
    return None if number else found
