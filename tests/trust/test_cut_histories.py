"""Histories that were cut, forked or thinned out: each is refused, however it is looked at."""

from __future__ import annotations

import pytest
from sample_logs import SampleRun

from weightwire.errors import ForkedHistory, RolledBack, StopError
from weightwire.store import layout
from weightwire.store.history import HistoryReader
from weightwire.store.records import sha256
from weightwire.trust.keys import SigningKey
from weightwire.trust.verify import require

KEY = SigningKey.generate()
both = pytest.mark.parametrize("signed", [True, False])


def sample(signed: bool, n: int = 6) -> SampleRun:
    """A run of a few versions, read by someone who pinned its key, or by someone who has none."""
    if not signed:
        return SampleRun().commit_many(n)
    return SampleRun(sign=KEY.sign, verify=require(KEY.public)).commit_many(n)


def look(run: SampleRun) -> HistoryReader:
    reader = HistoryReader(run.run)
    reader.refresh(-1)
    return reader


def fork(run: SampleRun, version: int) -> SampleRun:
    """The same run, restored from a copy of the time of ``version`` and continued from there."""
    other = SampleRun(sign=run.run.sign, verify=run.run.verify)
    other.commit_many(version)
    other.clock.n_tokens = 1000
    return other


@both
def test_log_cut_to_nothing_is_refused_by_who_saw_it(signed: bool) -> None:
    run = sample(signed)
    reader = HistoryReader(run.run)
    reader.remember(5, sha256(run.raw_commit(run.commits[5])))
    run.store.delete([layout.commit_key(version) for version in range(6)])
    with pytest.raises(RolledBack):
        reader.refresh(-1)


@both
def test_log_cut_under_a_running_reader_is_refused(signed: bool) -> None:
    run = sample(signed)
    reader = look(run)
    run.store.delete([layout.commit_key(4), layout.commit_key(5)])
    with pytest.raises(RolledBack):
        reader.refresh(-1)


@both
def test_restored_run_that_went_another_way_is_refused_by_who_holds_a_lost_version(
    signed: bool,
) -> None:
    run = sample(signed)
    other = fork(run, 4)
    for _ in range(4):
        other.commit(bits=99)
    reader = HistoryReader(run.on(other.store))
    reader.remember(5, sha256(run.raw_commit(run.commits[5])))
    with pytest.raises(ForkedHistory):
        reader.refresh(5)


@both
def test_log_with_a_hole_is_refused(signed: bool) -> None:
    run = sample(signed)
    run.store.delete([layout.commit_key(3)])
    with pytest.raises(ForkedHistory):
        look(run)


@both
def test_boundary_beyond_the_newest_version_does_not_hide_a_rollback(signed: bool) -> None:
    run = sample(signed)
    reader = HistoryReader(run.run)
    reader.remember(5, sha256(run.raw_commit(run.commits[5])))
    run.store.delete([layout.commit_key(4), layout.commit_key(5)])
    run.store.put(layout.boundary_key(900), b"")
    with pytest.raises(RolledBack):
        reader.refresh(-1)


def test_offer_nobody_can_read_is_a_way_that_is_not_taken() -> None:
    run = sample(False)
    run.store.put(layout.anchor_offer_key(3, "a" * 32), b'{"format":"something"}')
    run.store.put(layout.anchor_offer_key(4, "a" * 32), b" " * (2 << 20))
    assert look(run).history.newest == run.commits[-1]


def test_record_of_any_length_costs_a_bounded_read() -> None:
    run = sample(False, n=2)
    run.store.put(layout.commit_key(2), b" " * (8 << 20))
    n_read = []

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(run.store, name)

        def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            n_read.append(len(run.store.read(key, start, stop)))
            return run.store.read(key, start, stop)

    with pytest.raises(StopError):
        HistoryReader(run.on(Watched())).refresh(-1)  # type: ignore[arg-type]
    assert max(n_read) < 4 << 20
