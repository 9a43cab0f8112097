from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.apply.layouts.regions import MAX_REPEATS, Axis, Box, boxes, strided
from weightwire.errors import UnsupportedLayout


@st.composite
def views(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...], np.ndarray]:
    """A view of a contiguous tensor, as a loader could take it: offset, shape, strides, positions."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    flat = np.arange(int(np.prod(shape)))
    view = flat.reshape(shape).transpose(draw(st.permutations(range(len(shape)))))
    for axis in range(view.ndim):
        first = draw(st.integers(0, view.shape[axis] - 1))
        last = draw(st.integers(first + 1, view.shape[axis]))
        step = draw(st.integers(1, 3))
        view = view[(slice(None),) * axis + (slice(first, last, step),)]
    return int(view.flat[0]), view.shape, tuple(s // flat.itemsize for s in view.strides), view


def box_of(offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Box, np.ndarray]:
    """The view's elements, held one after another in the view's order."""
    places = np.arange(int(np.prod(shape))).reshape(shape)
    axes = [
        Axis(n, s, p // places.itemsize)
        for n, s, p in zip(shape, strides, places.strides, strict=True)
    ]
    [box] = boxes(offset, 100, axes)
    return box, places + 100


@settings(deadline=None)
@given(views(), st.integers(0, 700), st.integers(0, 700))
def test_part_of_a_box_between_two_positions_is_a_few_boxes(
    view: tuple[int, tuple[int, ...], tuple[int, ...], np.ndarray], one: int, other: int
) -> None:
    box, places = box_of(*view[:3])
    start, stop = sorted((one, other))
    where = dict(zip(view[3].ravel().tolist(), places.ravel().tolist(), strict=True))
    found = {}
    inner = list(box.within(start, stop))
    for part in inner:
        source = part.source_positions()
        grid = strided(
            np.arange(1000, dtype=np.uint64), part.place, part.shape, [a.place for a in part.axes]
        )
        assert (np.diff(source) > 0).all()
        assert part.stop == source[-1] + 1
        found.update(zip(source.tolist(), grid.ravel().tolist(), strict=True))
    assert found == {s: p for s, p in where.items() if start <= s < stop}
    assert sum(part.n_elements for part in inner) == len(found)
    assert len(inner) <= 2 * len(box.axes) + 1


@settings(deadline=None)
@given(views(), st.sets(st.integers(0, 700)))
def test_positions_are_found_where_the_box_has_them(
    view: tuple[int, tuple[int, ...], tuple[int, ...], np.ndarray], asked: set[int]
) -> None:
    box, places = box_of(*view[:3])
    where = dict(zip(view[3].ravel().tolist(), places.ravel().tolist(), strict=True))
    positions = np.array(sorted(asked), np.int64)
    chosen, inside, found = box.find(positions)
    hits = positions[chosen] if inside is None else positions[chosen][inside]
    assert dict(zip(hits.tolist(), found.tolist(), strict=True)) == {
        p: where[p] for p in asked if p in where
    }


def test_axes_that_continue_one_another_are_one_run() -> None:
    [box] = boxes(7, 3, [Axis(4, 6, 6), Axis(3, 2, 2), Axis(2, 1, 1)])
    assert box == Box(7, 3, (Axis(24, 1, 1),))
    assert box.is_run


def test_element_in_several_places_is_several_boxes() -> None:
    found = boxes(5, 0, [Axis(3, 0, 10), Axis(2, 1, 1)])
    assert [box.place for box in found] == [0, 10, 20]
    assert {box.n_elements for box in found} == {2}


def test_element_in_too_many_places_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="spread"):
        boxes(0, 0, [Axis(MAX_REPEATS + 1, 0, 1)])


def test_overlapping_source_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="overlap"):
        boxes(0, 0, [Axis(3, 2, 3), Axis(3, 1, 1)])


def test_box_outside_its_memory_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="of 10"):
        strided(np.zeros(10, np.uint8), 4, (3,), (3,))


def test_empty_view_is_no_box() -> None:
    assert boxes(0, 0, [Axis(0, 1, 1), Axis(3, 1, 1)]) == ()
