"""Collection beside crashes, publishers, readers and other collectors, at every operation of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from sample_logs import Crash, Interrupted, SampleRun, contents, die_at

from weightwire.errors import FencedWriter, ObjectMissing
from weightwire.store import layout
from weightwire.store.contract import ObjectStore
from weightwire.store.history import History, HistoryReader
from weightwire.store.plan import plan
from weightwire.store.records import AnchorRef
from weightwire.store.retention import Retention, collect
from weightwire.store.run import commit, read_boundary

KEEP = Retention(keep_versions=6)


def eventful() -> SampleRun:
    """A run with something of every kind to collect: old versions, data left by a collection that
    died, old anchors of versions that stay, skip patches, orphans."""
    run = SampleRun().commit_many(10)
    for version in (1, 5, 6, 7, 8):
        run.offer_anchor(version)
    run.offer_skip(1, 5)
    run.offer_skip(5, 9)
    run.upload_anchor(7, "d" * 32, "0" * 32)
    run.upload_patch(4, 7, "d" * 32, "0" * 32)
    run.store.create(layout.boundary_key(1), b"")
    run.store.delete([layout.commit_key(0)])
    run.clock.time += 3601
    return run


def sweep(run: SampleRun, store: ObjectStore | None = None) -> None:
    collect(run.on(store or run.store), KEEP, run.clock)


def undisturbed() -> dict[str, bytes]:
    run = eventful()
    sweep(run)
    return contents(run.store)


def n_operations() -> int:
    run = eventful()
    watched = Interrupted(run.store)
    sweep(run, watched)
    return watched.n_operations


def during(run: SampleRun, number: int, event: Callable[[], object]) -> Interrupted:
    """A store in which something happens just before one operation."""

    def before(n_done: int) -> None:
        if n_done == number:
            event()

    return Interrupted(run.store, before)


def check_sound(run: SampleRun) -> History:
    """Nothing committed is lost: all that the log promises can be fetched, also by a newcomer."""
    history = HistoryReader(run.run).refresh(-1)
    assert history.newest == run.commits[-1]
    assert list(history.commits) == list(range(history.boundary, len(run.commits)))
    there = {data.folder for data in map(layout.parse_data, contents(run.store)) if data}
    for record in history.commits.values():
        assert record.patch is None or record.patch.folder in there
    missing = [offer.anchor.folder for offer in history.offers.values() if offer.anchor]
    missing = [folder for folder in missing if not is_loadable(run, folder)]
    assert plan(history, None, run.commits[-1].version, avoid=missing).anchor is not None
    return history


def is_loadable(run: SampleRun, folder: str) -> bool:
    names = (layout.ANCHOR_MANIFEST, "model.safetensors")
    return all(folder + name in contents(run.store) for name in names)


def test_there_is_something_of_every_kind_to_do() -> None:
    before, after = contents(eventful().store), undisturbed()
    gone = before.keys() - after.keys()
    for part in ("-commit", "-anchor-", "-skip-", "boundary", "patches/", "anchors/", "d" * 32):
        assert any(part in key for key in gone), part
    assert any("-gone-" in key for key in after)
    assert n_operations() > 30


@pytest.mark.parametrize("number", range(n_operations()))
def test_crash_at_any_operation_leaves_a_sound_run_and_the_next_collection_finishes(
    number: int,
) -> None:
    run = eventful()
    with pytest.raises(Crash):
        sweep(run, Interrupted(run.store, die_at(number)))
    check_sound(run)
    sweep(run)
    assert contents(run.store) == undisturbed()


@pytest.mark.parametrize("number", range(n_operations()))
def test_two_collectors_at_once_do_what_one_does(number: int) -> None:
    run = eventful()
    sweep(run, during(run, number, lambda: sweep(run)))
    check_sound(run)
    assert contents(run.store) == undisturbed()


@pytest.mark.parametrize("number", range(n_operations()))
def test_what_a_publisher_commits_meanwhile_is_kept(number: int) -> None:
    run = eventful()

    def publish() -> None:
        run.commit(anchor=True)
        run.commit()
        run.offer_anchor(11)
        run.offer_skip(9, 11)

    sweep(run, during(run, number, publish))
    history = check_sound(run)
    assert [offer.version for offer in history.offers.values()].count(11) == 2
    sweep(run)
    check_sound(run)


@pytest.mark.parametrize("number", range(n_operations()))
def test_upload_that_is_under_way_meanwhile_can_be_committed_later(number: int) -> None:
    run = eventful()
    pending = []
    sweep(run, during(run, number, lambda: pending.append(run.record(anchor=True))))
    run.clock.time += 1e6
    sweep(run)
    run.commit_record(pending[0])
    check_sound(run)


@pytest.mark.parametrize("number", range(n_operations()))
def test_publisher_that_slept_is_fenced_whenever_it_wakes(number: int) -> None:
    run = eventful()
    late = replace(run.commits[2], put_id="c" * 32, digest="c" * 32)

    def wake() -> None:
        with pytest.raises(FencedWriter):
            commit(run.run, late)

    sweep(run, during(run, number, wake))
    check_sound(run)
    sweep(run)
    assert contents(run.store) == undisturbed()


@pytest.mark.parametrize("number", range(4))
def test_publisher_is_fenced_by_a_collection_at_any_operation_of_its_commit(number: int) -> None:
    run = eventful()
    late = replace(run.commits[2], put_id="c" * 32, digest="c" * 32)
    with pytest.raises(FencedWriter):
        commit(run.on(during(run, number, lambda: sweep(run))), late)
    sweep(run)
    assert contents(run.store) == undisturbed()


def test_record_of_a_publisher_that_died_in_its_sleep_is_not_trusted() -> None:
    run = eventful()
    sweep(run)
    late = replace(run.commits[2], put_id="c" * 32, digest="c" * 32)
    with pytest.raises(Crash):
        commit(run.on(Interrupted(run.store, die_at(1))), late)
    assert layout.commit_key(2) in contents(run.store)
    check_sound(run)
    sweep(run)
    assert contents(run.store) == undisturbed()


def test_reader_that_is_paused_at_any_operation_sees_a_sound_history() -> None:
    watched = Interrupted(eventful().store)
    HistoryReader(eventful().on(watched)).refresh(-1)
    for number in range(watched.n_operations):
        run = eventful()
        reader = HistoryReader(run.on(during(run, number, lambda run=run: sweep(run))))  # type: ignore[misc]
        history = reader.refresh(-1)
        assert history.boundary == read_boundary(run.store)
        assert list(history.commits) == list(range(history.boundary, 10))


def test_reader_whose_way_was_collected_finds_another() -> None:
    run = eventful()
    reader = HistoryReader(run.run)
    way = plan(reader.refresh(-1), None, 2)
    sweep(run)
    with pytest.raises(ObjectMissing):
        run.store.read(way.patches[-1].folder + "patch.json")
    assert plan(reader.refresh(2), None, 9).anchor is not None


def stopped_maker() -> tuple[SampleRun, AnchorRef]:
    """A run whose newest anchor is uploaded and old, but its maker was stopped before it said so."""
    run = SampleRun().commit_many(3)
    ref = run.upload_anchor(2, "e" * 32, run.commits[2].digest)
    run.clock.time += 3601
    return run, ref


def test_boundary_never_rests_on_an_anchor_that_another_collector_removes() -> None:
    """The maker wakes at any operation of one collector, another collects at any later one."""
    policy = Retention(keep_versions=1)
    run, _ = stopped_maker()
    watched = Interrupted(run.store)
    collect(run.on(watched), policy, run.clock)
    for announced in range(watched.n_operations):
        for collected in range(announced, watched.n_operations + 5):
            run, ref = stopped_maker()

            def before(
                n_done: int,
                run: SampleRun = run,
                ref: AnchorRef = ref,
                events: tuple[int, int] = (announced, collected),
            ) -> None:
                if n_done == events[0]:
                    run.announce_anchor(2, "e" * 32, ref)
                if n_done == events[1]:
                    collect(run.run, policy, run.clock)

            collect(run.on(Interrupted(run.store, before)), policy, run.clock)
            collect(run.run, policy, run.clock)
            check_sound(run)
