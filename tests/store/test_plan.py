from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightwire.errors import NoWay
from weightwire.store import layout
from weightwire.store.history import History
from weightwire.store.plan import Held, Plan, plan
from weightwire.store.records import AnchorRef, Commit, Offer, PatchRef

_IDS = count()


def put_id() -> str:
    return f"{next(_IDS):032x}"


def digest(version: int) -> str:
    return f"{version:032x}"


def patch_ref(base: int, version: int, n_bytes: int) -> PatchRef:
    folder = layout.patch_folder(base, version, put_id())
    return PatchRef(folder, base, digest(base), "compact", 1, 1, n_bytes, 1, "0" * 64)


def anchor_ref(version: int, n_bytes: int) -> AnchorRef:
    return AnchorRef(layout.anchor_folder(version, put_id()), n_bytes, 1, "0" * 64)


def commit(version: int, n_bytes: int | None, anchor: int | None = None) -> Commit:
    return Commit(
        run="0" * 32,
        version=version,
        epoch=1,
        put_id=put_id(),
        previous="",
        time_ms=0,
        digest=digest(version),
        n_elements=1,
        n_state_bytes=1,
        patch=None if n_bytes is None else patch_ref(version - 1, version, n_bytes),
        anchor=None if anchor is None else anchor_ref(version, anchor),
    )


def offer(
    version: int, *, patch: PatchRef | None = None, anchor: AnchorRef | None = None
) -> dict[str, Offer]:
    key = put_id()
    return {key: Offer("0" * 32, version, 1, key, 0, digest(version), patch, anchor)}


def chain(sizes: list[int], anchor: int = 1000) -> History:
    commits = {0: commit(0, None, anchor)}
    commits |= {v: commit(v, n_bytes) for v, n_bytes in enumerate(sizes, start=1)}
    return History(commits)


def way(found: Plan) -> list[int]:
    return [step.version for step in found.steps]


def test_single_patches_are_taken_in_order() -> None:
    assert way(plan(chain([5, 5, 5]), Held(1, digest(1)), 3)) == [2, 3]


def test_skip_is_taken_when_it_is_smaller_and_not_when_it_is_larger() -> None:
    history = chain([5] * 8)
    for n_bytes, expected in ((39, [8]), (41, list(range(1, 9)))):
        offers = offer(8, patch=patch_ref(0, 8, n_bytes))
        found = plan(History(history.commits, {}, offers), Held(0, digest(0)), 8)
        assert way(found) == expected
        assert found.n_bytes == min(n_bytes, 40)


def test_anchor_is_taken_when_the_chain_costs_more() -> None:
    history = chain([500] * 4)
    offers = offer(3, anchor=anchor_ref(3, 1000))
    found = plan(History(history.commits, {}, offers), Held(0, digest(0)), 4)
    assert way(found) == [3, 4]
    assert found.anchor is not None


def test_newcomer_starts_from_the_anchor_that_is_cheapest_in_all() -> None:
    history = chain([1, 1, 1, 900])
    offers = offer(4, anchor=anchor_ref(4, 1000))
    assert way(plan(History(history.commits, {}, offers), None, 4)) == [4]


def test_what_is_on_disk_costs_nothing() -> None:
    history = chain([400, 400])
    folders = [record.patch.folder for record in history.commits.values() if record.patch]
    anchor = history.commits[0].anchor
    assert anchor is not None
    offers = offer(2, anchor=anchor_ref(2, 1000))
    at_hand = [anchor.folder, *folders]
    found = plan(History(history.commits, {}, offers), None, 2, at_hand=at_hand)
    assert way(found) == [0, 1, 2]


def test_empty_version_is_a_free_step() -> None:
    history = chain([5])
    empty = commit(2, None)
    same = History({**history.commits, 2: commit_like(empty, digest(1))})
    found = plan(same, Held(0, digest(0)), 2)
    assert (way(found), found.n_bytes) == ([1, 2], 5)


def commit_like(record: Commit, bits: str) -> Commit:
    from dataclasses import replace

    return replace(record, digest=bits)


def test_state_of_other_bits_cannot_use_a_patch() -> None:
    found = plan(chain([5, 5]), Held(1, "f" * 32), 2)
    assert found.anchor is not None


def test_what_was_found_bad_is_gone_around_until_nothing_is_left() -> None:
    history = chain([5, 5])
    first = plan(history, Held(0, digest(0)), 2)
    bad = {first.steps[0].folder}
    with pytest.raises(NoWay, match="1 were tried"):
        plan(history, Held(0, digest(0)), 2, avoid=bad)


Edges = list[tuple[int, int, int]]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 12), st.integers(1, 200)), max_size=8),
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 300)), max_size=3),
    st.integers(0, 12),
)
def test_no_way_is_cheaper_than_the_one_taken(
    sizes: list[int], skips: Edges, anchors: list[tuple[int, int]], start: int
) -> None:
    n = len(sizes)
    history = chain(sizes)
    offers: dict[str, Offer] = {}
    edges = [(v - 1, v, size) for v, size in enumerate(sizes, start=1)]
    for base, version, size in skips:
        if base < version <= n:
            offers |= offer(version, patch=patch_ref(base, version, size))
            edges.append((base, version, size))
    whole = [(0, 1000), *((v, size) for v, size in anchors if v <= n)]
    for version, size in whole[1:]:
        offers |= offer(version, anchor=anchor_ref(version, size))
    start = min(start, n)
    found = plan(History(history.commits, {}, offers), Held(start, digest(start)), n)
    assert found.n_bytes == cheapest(n, start, edges, whole)


def cheapest(n: int, start: int, edges: Edges, whole: list[tuple[int, int]]) -> int:
    """Bellman's sum, version by version."""
    best = {start: 0}
    for version in range(n + 1):
        costs = [size for v, size in whole if v == version]
        costs += [best[a] + size for a, b, size in edges if b == version and a in best]
        costs += [best[version]] if version in best else []
        if costs:
            best[version] = min(costs)
    return best[n]
