"""Is everything a run needs there, and is it what its records say? Reads all, changes nothing.

Records first: each parses, is signed if a key is pinned, follows the one before it. Then data: every
index, bucket, manifest and anchor file has its length and SHA-256. Damage is collected, not raised.
What it means for readers is asked of the code they run: can the log be followed, and which versions
can a newcomer still reach without what is damaged?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from weightwire.errors import (
    BaseMismatch,
    ForkedHistory,
    ObjectMissing,
    StoreRefused,
    StoreUnavailable,
    WeightwireError,
)
from weightwire.store import layout
from weightwire.store.audit_data import DataChecker, Progress
from weightwire.store.history import History, HistoryReader
from weightwire.store.plan import Step
from weightwire.store.records import Commit, Offer
from weightwire.store.run import Run, read_boundary
from weightwire.store.survey import Damage, Survey, damage_of, survey


@dataclass(frozen=True)
class Audit:
    """How a run stands."""

    n_versions: int
    n_objects: int
    n_bytes: int
    """Read and checked."""
    newest: int
    """-1 before the first."""
    damages: tuple[Damage, ...]
    trouble: str
    """Why readers cannot follow the log; "" if they can."""
    unreachable: tuple[int, ...]
    """Versions that a newcomer cannot get to any more."""
    n_rebuilt: int = 0
    """Versions that were rebuilt and proven by digest."""

    @property
    def is_newest_reachable(self) -> bool:
        """Whether a newcomer can still start."""
        return not self.trouble and self.newest >= 0 and self.newest not in self.unreachable

    @property
    def affected(self) -> tuple[int, ...]:
        """Versions of which something is damaged."""
        return tuple(sorted({damage.version for damage in self.damages}))


def edges(history: History, gone: frozenset[str] = frozenset()) -> Iterator[Step]:
    """Every patch and anchor that a record names."""
    records: list[Commit | Offer] = [*history.commits.values(), *history.offers.values()]
    for record in sorted(records, key=lambda each: each.version):
        if record.patch is not None:
            yield Step(record.version, record.digest, patch=record.patch)
        if record.anchor is not None and record.anchor.folder not in gone:
            yield Step(record.version, record.digest, anchor=record.anchor)


def audit(run: Run, stage: Callable[[str, int], Progress]) -> tuple[Audit, Survey]:
    """Check a whole run.

    Raises:
        StoreUnavailable, StoreRefused: the store's own errors; nobody can tell then.
    """
    found = survey(run)
    damages = [*found.damages, *_chain_damages(found)]
    steps = list(edges(found.history, found.gone))
    checker = DataChecker(run, stage("check", sum(step.n_bytes for step in steps)))
    for step in steps:
        damages += checker.check(step)
    # What was collected while we looked is not damaged, only gone.
    boundary = read_boundary(run.store)
    damages = [damage for damage in damages if damage.version >= boundary]
    result = Audit(
        n_versions=len(found.history.commits),
        n_objects=checker.n_objects,
        n_bytes=checker.n_bytes,
        newest=found.newest,
        damages=tuple(damages),
        trouble=_trouble(run),
        unreachable=(),
    )
    return weigh(result, found), found


def weigh(result: Audit, found: Survey) -> Audit:
    """Which versions can still be reached without what is damaged."""
    bad = {damage.key[: damage.key.rindex("/") + 1] for damage in result.damages}
    reachable: dict[int, str] = {}
    by_version: dict[int, list[Step]] = {}
    for step in edges(found.history, found.gone):
        if step.folder not in bad:
            by_version.setdefault(step.version, []).append(step)
    for version, commit in found.history.commits.items():
        is_same = commit.is_empty and reachable.get(version - 1) == commit.digest
        if is_same or any(_leads_there(step, reachable) for step in by_version.get(version, ())):
            reachable[version] = commit.digest
    lost = (version for version in found.versions if version not in reachable)
    return replace(result, unreachable=tuple(lost))


def _leads_there(step: Step, reachable: dict[int, str]) -> bool:
    if step.patch is None:
        return True
    return reachable.get(step.patch.base_version) == step.patch.base_digest


def _trouble(run: Run) -> str:
    """What a newcomer's first look at the log fails with."""
    try:
        HistoryReader(run).refresh(-1)
    except (StoreUnavailable, StoreRefused):
        raise
    except WeightwireError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _chain_damages(found: Survey) -> Iterator[Damage]:
    """Holes, forks, and records that contradict the ones they build on."""
    history = found.history
    expected = history.boundary
    for version in found.versions:
        if version > expected:
            yield _hole(expected, version - 1)
        expected = version + 1
        commit, before = history.commits.get(version), history.commits.get(version - 1)
        if commit is not None and before is not None:
            problem = _contradiction(before, history.hashes[version - 1], commit)
            if problem is not None:
                yield damage_of(problem, layout.commit_key(version), version)


def _hole(first: int, last: int) -> Damage:
    key = layout.commit_key(first)
    text = f"{key}: not there" if first == last else f"{key}: not there, nor those up to {last}"
    return damage_of(ObjectMissing(text), key, first)


def _contradiction(before: Commit, record_sha256: str, commit: Commit) -> WeightwireError | None:
    key = layout.commit_key(commit.version)
    is_fresh_start = commit.previous == "" and commit.anchor is not None
    if commit.previous != record_sha256 and not is_fresh_start:
        return ForkedHistory(f"{key}: not committed on top of the version {before.version} here")
    if commit.epoch < before.epoch:
        return ForkedHistory(f"{key}: epoch {commit.epoch} after epoch {before.epoch}")
    if commit.is_empty and commit.digest != before.digest:
        return BaseMismatch(f"{key}: says that nothing changed, and has another digest")
    return None
