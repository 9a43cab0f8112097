"""A run worth collecting, and what is left of it afterwards."""

from __future__ import annotations

from sample_logs import SampleRun, contents

from weightwire.store import layout
from weightwire.store.receipts import Receipt, write_receipt
from weightwire.store.retention import Collected, Retention, collect

KEEP_3 = Retention(keep_versions=3)


def sample(n: int = 10, anchors: tuple[int, ...] = (6,)) -> SampleRun:
    run = SampleRun().commit_many(n)
    for version in anchors:
        run.offer_anchor(version)
    return run


def sweep(run: SampleRun, policy: Retention = KEEP_3) -> Collected:
    return collect(run.run, policy, run.clock)


def versions(run: SampleRun) -> list[int]:
    """Versions whose commit records are there."""
    entries = [layout.parse_entry(key) for key in contents(run.store)]
    return [entry.version for entry in entries if entry and entry.kind == "commit"]


def folders(run: SampleRun, kind: str) -> list[int]:
    """Versions of which there is data of this kind, once per folder."""
    data = {layout.parse_data(key) for key in contents(run.store)}
    return sorted(each.version for each in data if each and each.kind == kind)


def hold(run: SampleRun, version: int, worker: str = "w", digest: str | None = None) -> None:
    """Write the receipt of a worker that holds a version."""
    digest = digest or run.commits[version].digest
    time_ms = int(run.clock.now() * 1000)
    name = run.run.name
    receipt = Receipt(worker, name, version, digest, 1, "active", time_ms, 0, 0, 0, 0, 0, 0, 0)
    write_receipt(run.store, receipt)


def n_bytes_of(run: SampleRun) -> int:
    """Everything but the run's identity."""
    return sum(len(data) for key, data in contents(run.store).items() if key != layout.RUN)


def n_anchor_bytes(run: SampleRun) -> int:
    """The size of one anchor."""
    ref = run.commits[0].anchor
    assert ref is not None
    return ref.n_bytes
