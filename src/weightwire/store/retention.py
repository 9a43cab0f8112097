"""Removing old versions while publishers, readers and other collectors go on working.

Versions go from the old end only: a boundary object says "versions before this one are gone", and is
written before anything is deleted. From then on readers pass over older records, and a publisher
that slept through it learns that it is fenced. So a crash at any point leaves nothing but work for
the next collection, which finds what is left by its names.

The boundary never passes the newest complete anchor, so a newcomer always has a start, nor a version
that a live receipt proves, so nobody who works is cut off. Nothing below a boundary is deleted while
no complete anchor stands at or above it: a boundary that a stranger wrote deletes nothing.

Records go oldest first, then data. Below the boundary no order can hurt anyone; this one leaves, after
a crash, a log that still is one unbroken chain up to the newest version.

Data that no record names may belong to someone who is still working, or was stopped for hours:

- for a version that does not exist yet: never deleted, its commit may come at any time;
- a patch for a version that exists: deleted once all of it is older than a grace. If a stopped
  writer then announces it, readers find nothing there and take another way;
- an anchor for a version that exists: the same, but a boundary must never come to rest on it. So the
  collector first leaves a mark in the log, then looks whether it was announced meanwhile, then
  deletes. Whoever sees the mark does not count on the anchor; whoever did not see it looked before
  it was made, and then the announcement it saw is seen by the collector too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from weightwire.clock import Clock
from weightwire.errors import StopError
from weightwire.store import layout
from weightwire.store.contract import ObjectStore
from weightwire.store.inventory import (
    AnchorAt,
    Inventory,
    Kind,
    Stored,
    is_complete,
    named_anchors,
    take_inventory,
)
from weightwire.store.receipts import is_proven, list_receipts
from weightwire.store.run import Run


@dataclass(frozen=True)
class Retention:
    """How much of a run to keep."""

    keep_versions: int = 64
    """At least so many of the newest versions stay."""
    keep_s: float | None = None
    """Versions younger than this stay too."""
    max_bytes: int | None = None
    """Remove more than the two above allow, as far as it is safe, until so much is left."""
    keep_anchors: int = 2
    """So many complete anchors stay, the newest; older ones that were offered later may go."""
    receipt_grace_s: float = 3600.0
    """A worker whose receipt is younger than this is at work."""
    orphan_grace_s: float = 3600.0
    """Data that no record names, for a version that exists, stays for so long."""

    def __post_init__(self) -> None:
        """Refuse what would delete everything.

        Raises:
            StopError: a number below what is safe.
        """
        if self.keep_versions < 1 or self.keep_anchors < 1:
            raise StopError("keep at least one version and one anchor")
        ages = (self.keep_s or 0, self.max_bytes or 0, self.receipt_grace_s, self.orphan_grace_s)
        if not all(age >= 0 for age in ages):
            raise StopError("ages and sizes to keep cannot be negative")


@dataclass(frozen=True)
class Bound:
    """A reason why the boundary goes no further."""

    boundary: int
    why: str


@dataclass(frozen=True)
class Collected:
    """What a collection deleted, or would delete."""

    boundary_before: int
    boundary: int
    versions: tuple[int, ...]
    """Those whose commit records went."""
    keys: tuple[str, ...]
    n_objects: Mapping[Kind, int]
    n_bytes: Mapping[Kind, int]
    kept: tuple[Bound, ...]
    """What holds the boundary back, the strongest first."""


@dataclass(frozen=True)
class _Sweep:
    """What is to be done, in the order in which it is done."""

    before: int
    boundary: int
    kept: tuple[Bound, ...]
    marks: tuple[str, ...]
    """Folders of anchors that go although their version stays."""
    orphans: frozenset[str]
    """Those of them that someone may be about to announce."""
    records: tuple[Stored, ...]
    data: tuple[Stored, ...]
    old_boundaries: tuple[str, ...]


def collect(run: Run, policy: Retention, clock: Clock, *, dry_run: bool = False) -> Collected:
    """Delete what the policy does not keep, as far as nobody needs it.

    May be run at any time, by several at once, and again after a crash.

    Raises:
        UntrustedHistory: a history that must not be followed; nothing was deleted.
        RetryError: the store gave no answer, or a record is damaged; run it again.
        StoreRefused: no permission to delete.
    """
    inventory = take_inventory(run)
    sweep = _plan(run.store, inventory, policy, clock.now())
    if not dry_run:
        sweep = _carry_out(run.store, sweep, inventory)
    return _collected(sweep)


def _plan(store: ObjectStore, inventory: Inventory, policy: Retention, now: float) -> _Sweep:
    complete, surplus = _choose_anchors(store, inventory, policy.keep_anchors)
    safe = [*_anchor_bounds(complete), *_receipt_bounds(store, inventory, policy, now)]
    wishes = list(_policy_bounds(inventory, policy, now))
    orphans = frozenset(_orphans(inventory, now - policy.orphan_grace_s))
    boundary = inventory.history.boundary
    if complete:
        leaving = orphans.union(anchor.ref.folder for anchor in surplus)
        staying = [each for each in inventory.objects if each.folder not in leaving]
        boundary = _choose_boundary(boundary, safe, wishes, staying, policy.max_bytes)
    kept = tuple(sorted([*safe, *wishes], key=lambda bound: bound.boundary))
    # A boundary that no complete anchor stands behind is not ours to act on.
    swept_below = boundary if complete else 0
    return _list_sweep(inventory, boundary, swept_below, kept, surplus, orphans)


def _list_sweep(
    inventory: Inventory,
    boundary: int,
    swept_below: int,
    kept: tuple[Bound, ...],
    surplus: list[AnchorAt],
    orphans: frozenset[str],
) -> _Sweep:
    leaving = orphans.union(anchor.ref.folder for anchor in surplus)
    offers = {anchor.offer_key for anchor in surplus}
    return _Sweep(
        before=inventory.history.boundary,
        boundary=boundary,
        kept=kept,
        marks=tuple(sorted(f for f in leaving if _needs_mark(inventory, f, swept_below))),
        orphans=orphans,
        records=tuple(
            each for each in inventory.records if each.last < swept_below or each.info.key in offers
        ),
        data=tuple(_data_to_delete(inventory, leaving, swept_below)),
        old_boundaries=tuple(
            key for version, key in inventory.boundary_keys.items() if version < swept_below
        ),
    )


def _choose_anchors(
    store: ObjectStore, inventory: Inventory, n_keep: int
) -> tuple[list[AnchorAt], list[AnchorAt]]:
    """The newest complete anchors, and older ones that only an offer names."""
    complete: list[AnchorAt] = []
    surplus: list[AnchorAt] = []
    for anchor in named_anchors(inventory.history):
        if len(complete) < n_keep:
            if is_complete(store, anchor.ref, inventory):
                complete.append(anchor)
        elif anchor.offer_key:
            surplus.append(anchor)
    in_use = {
        anchor.ref.folder for anchor in named_anchors(inventory.history) if anchor not in surplus
    }
    return complete, [anchor for anchor in surplus if anchor.ref.folder not in in_use]


def _anchor_bounds(complete: list[AnchorAt]) -> Iterator[Bound]:
    if complete:
        yield Bound(complete[0].version, f"the newest complete anchor is of {complete[0].version}")
    else:
        yield Bound(0, "there is no complete anchor to start from")


def _receipt_bounds(
    store: ObjectStore, inventory: Inventory, policy: Retention, now: float
) -> Iterator[Bound]:
    for info, receipt in list_receipts(store):
        is_live = info.modified > now - policy.receipt_grace_s
        if is_live and is_proven(receipt, inventory.history):
            yield Bound(receipt.version, f"worker {receipt.worker} holds {receipt.version}")


def _policy_bounds(inventory: Inventory, policy: Retention, now: float) -> Iterator[Bound]:
    commits = inventory.history.commits
    if not commits:
        return
    first = max(0, max(commits) - policy.keep_versions + 1)
    yield Bound(first, f"the newest {policy.keep_versions} versions stay")
    if policy.keep_s is not None:
        oldest_ms = (now - policy.keep_s) * 1000
        young = [version for version, commit in commits.items() if commit.time_ms > oldest_ms]
        if young:
            yield Bound(min(young), f"versions of the last {policy.keep_s:g} s stay")


def _choose_boundary(
    before: int,
    safe: list[Bound],
    wishes: list[Bound],
    staying: list[Stored],
    max_bytes: int | None,
) -> int:
    high = max(before, min(bound.boundary for bound in safe))
    low = max(before, min(high, *(bound.boundary for bound in wishes)))
    return low if max_bytes is None else _boundary_by_size(low, high, staying, max_bytes)


def _boundary_by_size(low: int, high: int, staying: list[Stored], max_bytes: int) -> int:
    """The lowest boundary that leaves at most so many bytes; if none does, the highest."""
    n_left = sum(each.info.n_bytes for each in staying if each.last >= low)
    if n_left <= max_bytes:
        return low
    between = (each for each in staying if low <= each.last < high)
    for each in sorted(between, key=lambda stored: stored.last):
        n_left -= each.info.n_bytes
        if n_left <= max_bytes:
            return each.last + 1
    return high


def _orphans(inventory: Inventory, older_than: float) -> Iterator[str]:
    """Folders nobody names, for versions that exist, whose writers had time enough."""
    for folder in inventory.folders.values():
        exists = folder.version in inventory.history.commits
        if exists and not folder.is_named and folder.modified <= older_than:
            yield folder.name


def _needs_mark(inventory: Inventory, name: str, swept_below: int) -> bool:
    folder = inventory.folders.get(name)
    return folder is not None and folder.kind == "anchor" and folder.version >= swept_below


def _data_to_delete(
    inventory: Inventory, leaving: frozenset[str], swept_below: int
) -> Iterator[Stored]:
    for folder in inventory.folders.values():
        for each in folder.objects:
            if folder.name in leaving or each.last < swept_below:
                yield each


def _carry_out(store: ObjectStore, sweep: _Sweep, inventory: Inventory) -> _Sweep:
    if sweep.boundary > sweep.before:
        text = f"versions before {sweep.boundary} are gone, or going\n"
        store.create(layout.boundary_key(sweep.boundary), text.encode())
    for folder in sweep.marks:
        store.create(layout.gone_key(folder), b"this anchor is gone, or going\n")
    sweep = _spare_announced(store, sweep, inventory)
    for objects in (sweep.records, sweep.data):
        store.delete([each.info.key for each in objects])
    store.delete(sweep.old_boundaries)
    return sweep


def _spare_announced(store: ObjectStore, sweep: _Sweep, inventory: Inventory) -> _Sweep:
    """Leave alone the orphaned anchors of versions of which something was announced meanwhile."""
    doubtful = sweep.orphans.intersection(sweep.marks)
    if not doubtful:
        return sweep
    known = {record.info.key for record in inventory.records}
    entries = (layout.parse_entry(i.key) for i in store.list(layout.LOG) if i.key not in known)
    announced = {entry.version for entry in entries if entry is not None}
    data = tuple(
        each for each in sweep.data if each.folder not in doubtful or each.version not in announced
    )
    return replace(sweep, data=data)


def _collected(sweep: _Sweep) -> Collected:
    objects = [*sweep.records, *sweep.data]
    n_objects: Counter[Kind] = Counter()
    n_bytes: Counter[Kind] = Counter()
    for each in objects:
        n_objects[each.kind] += 1
        n_bytes[each.kind] += each.info.n_bytes
    entries = [layout.parse_entry(each.info.key) for each in sweep.records]
    return Collected(
        sweep.before,
        sweep.boundary,
        tuple(entry.version for entry in entries if entry and entry.kind == "commit"),
        (*(each.info.key for each in objects), *sweep.old_boundaries),
        dict(n_objects),
        dict(n_bytes),
        sweep.kept,
    )
