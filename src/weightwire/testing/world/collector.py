"""The actor that removes old versions, at bad moments, sometimes beside another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from weightwire.errors import NoWay, WeightwireError
from weightwire.store import layout
from weightwire.store.history import History, HistoryReader
from weightwire.store.plan import Step, plan
from weightwire.store.receipts import Receipt, is_proven, list_receipts
from weightwire.store.records import Verify
from weightwire.store.retention import Collected, collect
from weightwire.store.retry import RetryingStore
from weightwire.store.run import Run, require_identity
from weightwire.testing.faults import OF_LIST, OF_READ
from weightwire.testing.world.handles import ActorStore, Killed, SimClock
from weightwire.testing.world.promises import Violation, require
from weightwire.testing.world.stage import RETRY, Stage
from weightwire.testing.world.troubles import CLOCKS, Trouble
from weightwire.trust import verify


class Collector:
    """One scheduled collection job."""

    def __init__(self, stage: Stage, number: int) -> None:
        self._stage = stage
        self.name = f"collector-{number}"
        self._pause_s = stage.chance.uniform(5.0, 60.0)

    def run(self) -> None:
        """Collect every now and then until the world's time is up."""
        while self._stage.is_going:
            self._stage.scheduler.sleep(self._stage.chance.uniform(0.0, 2 * self._pause_s))
            life, store, clock = self._stage.begin_life(self.name)
            try:
                self._collect(store, clock)
                self._stage.check_operations(life, 0)
            except Killed:
                self._stage.chances.count(Trouble.KILLED_COLLECTING)
            check_reachable(self._stage)

    def _collect(self, store: ActorStore, clock: SimClock) -> None:
        stage = self._stage
        before = _look(stage) if self._is_exact() else _Seen()
        try:
            objects = RetryingStore(store, clock, RETRY)
            run = Run(objects, require_identity(objects), verify=_verify(stage))
            collected = collect(run, stage.settings.retention, clock)
        except WeightwireError as error:
            stage.check_error(self.name, error)
            return
        stage.chances.tell(f"{self.name} deleted {len(collected.keys)} objects")
        self._check_receipts(before, collected)

    def _check_receipts(self, before: _Seen, collected: Collected) -> None:
        """Retention never passes a version that a live receipt proved all the while."""
        if collected.boundary == collected.boundary_before:
            return
        history = _still_readable(self._stage, before.history, collected.boundary_before)
        for receipt in _young_receipts(self._stage) if before.versions else ():
            is_same = before.versions.get(receipt.worker) == receipt.version
            if is_same and is_proven(receipt, history):
                is_kept = receipt.version >= collected.boundary
                require(is_kept, "receipts are kept", receipt.worker, receipt.version)

    def _is_exact(self) -> bool:
        """Whether a collector sees every receipt, and its age, as it is."""
        settings = self._stage.settings
        has_wrong_clock = any(settings.odds.get(kind) for kind in CLOCKS)
        reads_wrong = any(settings.store_faults.odds.get(kind) for kind in (*OF_READ, *OF_LIST))
        return not (has_wrong_clock or reads_wrong)


@dataclass(frozen=True)
class _Seen:
    """What lay in the store before a collection."""

    versions: Mapping[str, int] = field(default_factory=dict)
    """Of workers with young receipts: nobody may take them for dead."""
    history: History = field(default_factory=History)


def _verify(stage: Stage) -> Verify | None:
    return verify.require(stage.key.public) if stage.key else None


def _look(stage: Stage) -> _Seen:
    if stage.truth.newest < 0:
        return _Seen()
    versions = {receipt.worker: receipt.version for receipt in _young_receipts(stage)}
    return _Seen(versions, _raw_history(stage))


def _still_readable(stage: Stage, history: History, boundary: int) -> History:
    """What nobody took away while a collector looked: another one, damage, loss."""
    gone = stage.damaged_versions
    commits = {v: c for v, c in history.commits.items() if v >= boundary and v not in gone}
    return replace(history, commits=commits, offers={})


def _young_receipts(stage: Stage) -> list[Receipt]:
    """Those younger than half the grace, as they really are."""
    now = SimClock(stage.scheduler, stage.chances).now()
    young = now - stage.settings.retention.receipt_grace_s / 2
    found = list_receipts(stage.witness.objects)
    return [receipt for info, receipt in found if info.modified > young]


def check_reachable(stage: Stage) -> None:
    """Nothing committed is lost: a newcomer finds a whole way to the newest version."""
    if stage.truth.newest < 0 or stage.is_damaged or stage.n_forged:
        return
    history = _raw_history(stage)
    newest = stage.truth.newest
    require(newest in history.commits, "nothing committed is lost", "no record of", newest)
    bad: set[str] = set()
    while (broken := _broken_step(stage, history, bad)) is not None:
        bad.add(
            broken.folder
        )  # offered too late, after it was collected: there must be another way


def _broken_step(stage: Stage, history: History, bad: set[str]) -> Step | None:
    """A step of the best way that is not whole in the store, or None."""
    try:
        way = plan(history, None, stage.truth.newest, avoid=bad)
    except NoWay as error:
        raise Violation(f"nothing committed is lost: {error}") from error
    return next((step for step in way.steps if not _is_whole(stage, step)), None)


def _raw_history(stage: Stage) -> History:
    """The log as it is, seen without any fault on the way."""
    objects = stage.witness.objects
    try:
        return HistoryReader(Run(objects, require_identity(objects))).refresh(-1)
    except WeightwireError as error:
        if stage.is_log_damaged:
            return History()
        raise Violation(f"nothing committed is lost: the log cannot be read: {error}") from error


def _is_whole(stage: Stage, step: Step) -> bool:
    n_objects = len(list(stage.witness.objects.list(step.folder))) if step.folder else 0
    if step.patch is not None:
        return n_objects == step.patch.n_buckets + 1
    manifest = step.folder + layout.ANCHOR_MANIFEST
    infos = stage.witness.objects.list(step.folder) if step.anchor else ()
    return step.anchor is None or (n_objects >= 2 and any(info.key == manifest for info in infos))
