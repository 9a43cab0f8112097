"""The cheapest way, in bytes, from what a receiver holds to a version."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from weightwire.errors import NoWay
from weightwire.store.history import History
from weightwire.store.records import AnchorRef, PatchRef


@dataclass(frozen=True)
class Held:
    """A version a receiver has proven to hold."""

    version: int
    digest: str


@dataclass(frozen=True)
class Step:
    """One edge: a patch, an anchor, or nothing where two versions have the same bits."""

    version: int
    digest: str
    patch: PatchRef | None = None
    anchor: AnchorRef | None = None

    @property
    def n_bytes(self) -> int:
        """What taking it downloads."""
        ref = self.patch or self.anchor
        return 0 if ref is None else ref.n_bytes

    @property
    def folder(self) -> str:
        """Where its data is; "" if it has none."""
        ref = self.patch or self.anchor
        return "" if ref is None else ref.folder


@dataclass(frozen=True)
class Plan:
    """Steps to take in order; an anchor can only be the first."""

    steps: tuple[Step, ...]

    @property
    def n_bytes(self) -> int:
        """What it downloads."""
        return sum(step.n_bytes for step in self.steps)

    @property
    def patches(self) -> tuple[Step, ...]:
        """The steps that are patches."""
        return tuple(step for step in self.steps if step.patch is not None)

    @property
    def anchor(self) -> Step | None:
        """The step that replaces everything, if there is one."""
        return self.steps[0] if self.steps and self.steps[0].anchor is not None else None


_Edge = tuple[int | None, Step]
"""Where a step starts (None: from anything) and the step."""


def plan(
    history: History,
    held: Held | None,
    target: int,
    *,
    avoid: Iterable[str] = (),
    at_hand: Iterable[str] = (),
) -> Plan:
    """The steps that lead to ``target`` for the fewest bytes; then the fewest steps.

    ``avoid`` names folders that turned out bad, ``at_hand`` folders that cost nothing because
    they are on the local disk.

    Raises:
        NoWay: nothing leads there.
    """
    bad, free = frozenset(avoid), frozenset(at_hand)
    edges = [edge for edge in _edges(history, held) if edge[1].folder not in bad]
    wanted = history.commits.get(target)
    found = _search(edges, held, Held(target, wanted.digest), free) if wanted else None
    if found is None:
        start = "nothing" if held is None else f"version {held.version} ({held.digest})"
        raise NoWay(
            f"no patches or anchors lead from {start} to version {target};"
            f" {len(bad)} were tried and found damaged"
        )
    return Plan(found)


def _edges(history: History, held: Held | None) -> Iterator[_Edge]:
    for version, record in history.commits.items():
        if record.is_empty and _starts_at(history, held, version - 1, record.digest):
            yield version - 1, Step(version, record.digest)
        if record.anchor is not None:
            yield None, Step(version, record.digest, anchor=record.anchor)
        if record.patch is not None:
            yield record.patch.base_version, Step(version, record.digest, patch=record.patch)
    for offer in history.offers.values():
        if offer.anchor is not None:
            yield None, Step(offer.version, offer.digest, anchor=offer.anchor)
        if offer.patch is not None:
            yield offer.patch.base_version, Step(offer.version, offer.digest, patch=offer.patch)


def _starts_at(history: History, held: Held | None, version: int, digest: str) -> bool:
    """Whether a version is known to have these bits."""
    if held is not None and held.version == version:
        return held.digest == digest
    record = history.commits.get(version)
    return record is not None and record.digest == digest


def _search(
    edges: list[_Edge], held: Held | None, target: Held, free: frozenset[str]
) -> tuple[Step, ...] | None:
    """Dijkstra's walk; versions only go forward, so it ends."""
    by_start: dict[int | None, list[Step]] = {}
    for start, step in edges:
        by_start.setdefault(start, []).append(step)
    ordinal = count()  # settles ties, so that steps need not be comparable
    queue = [] if held is None else [(0, 0, next(ordinal), held, ())]
    for step in by_start.get(None, ()):
        first = Held(step.version, step.digest)
        queue.append((_cost(step, free), 1, next(ordinal), first, (step,)))  # type: ignore[arg-type]
    heapq.heapify(queue)
    settled: set[Held] = set()
    while queue:
        n_bytes, n_steps, _, at, way = heapq.heappop(queue)
        if at == target:
            return way
        if at in settled:
            continue
        settled.add(at)
        for step in by_start.get(at.version, ()):
            if at.digest == (step.patch.base_digest if step.patch else step.digest):
                cost, there = n_bytes + _cost(step, free), Held(step.version, step.digest)
                heapq.heappush(queue, (cost, n_steps + 1, next(ordinal), there, (*way, step)))  # type: ignore[misc]
    return None


def _cost(step: Step, free: frozenset[str]) -> int:
    return 0 if step.folder in free else step.n_bytes
