"""Collection: what goes, what stays and why."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from sample_logs import WEIGHTS, Interrupted, SampleRun, contents
from sample_sweeps import KEEP_3, folders, hold, n_anchor_bytes, n_bytes_of, sample, sweep, versions

from weightwire.errors import ForkedHistory, StopError, UntrustedHistory
from weightwire.store import layout
from weightwire.store.history import HistoryReader
from weightwire.store.plan import Held, plan
from weightwire.store.receipts import Receipt, write_receipt
from weightwire.store.retention import Retention, collect


def test_everything_before_the_newest_anchor_goes_if_nobody_needs_it() -> None:
    run = sample()
    done = sweep(run)
    assert (done.boundary_before, done.boundary) == (0, 6)
    assert done.versions == (0, 1, 2, 3, 4, 5)
    assert versions(run) == [6, 7, 8, 9]
    assert folders(run, "patch") == [6, 7, 8, 9]
    assert folders(run, "anchor") == [6]
    assert HistoryReader(run.run).refresh(-1).boundary == 6


def test_newcomer_and_follower_reach_the_newest_version_after_a_collection() -> None:
    run = sample()
    sweep(run)
    history = HistoryReader(run.run).refresh(-1)
    assert plan(history, None, 9).anchor is not None
    assert len(plan(history, Held(6, run.commits[6].digest), 9).patches) == 3


def test_boundary_goes_no_further_than_the_newest_complete_anchor() -> None:
    run = sample(anchors=(4,))
    assert sweep(run, Retention(keep_versions=1)).boundary == 4


def test_without_a_newer_anchor_nothing_goes() -> None:
    run = sample(anchors=())
    before = contents(run.store)
    done = sweep(run, Retention(keep_versions=1))
    assert done.boundary == 0
    assert done.keys == ()
    assert contents(run.store) == before


def test_anchor_in_a_commit_record_counts_like_an_offered_one() -> None:
    run = SampleRun().commit_many(5)
    run.commit(anchor=True)
    run.commit_many(4)
    assert sweep(run).boundary == 5


@pytest.mark.parametrize("damage", ["missing file", "short file", "no manifest", "other manifest"])
def test_incomplete_newest_anchor_leaves_the_next_older_one_in_charge(damage: str) -> None:
    run = sample(anchors=(4,))
    ref = run.offer_anchor(8).anchor
    assert ref is not None
    weights, manifest = ref.folder + "model.safetensors", ref.folder + layout.ANCHOR_MANIFEST
    if damage == "missing file":
        run.store.delete([weights])
    elif damage == "short file":
        run.store.put(weights, WEIGHTS[:-1])
    elif damage == "no manifest":
        run.store.delete([manifest])
    else:
        run.store.put(manifest, run.store.read(manifest).replace(b"model", b"medal"))
    assert sweep(run, Retention(keep_versions=1)).boundary == 4
    assert folders(run, "anchor") == [4, 8]


def test_the_newest_versions_stay_by_count() -> None:
    run = sample(anchors=(9,))
    assert sweep(run, Retention(keep_versions=4)).boundary == 6
    assert versions(run) == [6, 7, 8, 9]


def test_the_newest_versions_stay_by_age() -> None:
    run = sample(anchors=(9,))
    run.clock.time += 0.5
    assert sweep(run, Retention(keep_versions=1, keep_s=4.0)).boundary == 7
    assert versions(run) == [7, 8, 9]


def test_a_run_shorter_than_the_policy_is_left_alone() -> None:
    run = sample(anchors=(9,))
    assert sweep(run, Retention()).keys == ()


def test_live_receipt_holds_what_its_worker_needs() -> None:
    run = sample()
    hold(run, 2)
    done = sweep(run)
    assert done.boundary == 2
    assert done.kept[0].boundary == 2
    assert "worker w holds 2" in done.kept[0].why
    history = HistoryReader(run.run).refresh(-1)
    assert len(plan(history, Held(2, run.commits[2].digest), 9).patches) == 7


def test_live_receipt_holds_what_its_worker_needs_though_its_record_is_damaged() -> None:
    """The worker goes on by the patch of the next version, not by its own version's record."""
    run = sample()
    hold(run, 2)
    run.store.put(layout.commit_key(2), b"damaged")
    assert sweep(run).boundary == 2
    history = HistoryReader(run.run).refresh(-1)
    assert len(plan(history, Held(2, run.commits[2].digest), 9).patches) == 7


def test_live_receipt_holds_nothing_where_no_way_leads_on_from_its_version() -> None:
    run = sample()
    hold(run, 2)
    for version in (2, 3):
        run.store.put(layout.commit_key(version), b"damaged")
    assert sweep(run).boundary == 6


def test_receipt_that_came_too_late_for_one_collection_counts_in_the_next() -> None:
    """Its version's record is gone; the patch that leads on from it is not, and must stay."""
    run = sample()
    assert sweep(run).boundary == 6
    hold(run, 5)
    run.commit_many(4)
    run.offer_anchor(12)
    assert sweep(run).boundary == 6
    history = HistoryReader(run.run).refresh(-1)
    assert len(plan(history, Held(5, run.commits[5].digest), 13).patches) == 8
    hold(run, 4)
    assert sweep(run).boundary == 11


def test_receipt_older_than_its_grace_holds_nothing() -> None:
    run = sample()
    hold(run, 2)
    run.clock.time += 3601
    assert sweep(run).boundary == 6


def test_receipt_of_a_worker_whose_clock_is_wrong_counts_by_the_stores_clock() -> None:
    run = sample()
    digest = run.commits[2].digest
    receipt = Receipt("w", run.run.name, 2, digest, 1, "active", 0, 0, 0, 0, 0, 0, 0, 0)
    write_receipt(run.store, receipt)
    assert sweep(run).boundary == 2


def test_receipt_that_its_digest_does_not_prove_holds_nothing() -> None:
    run = sample()
    hold(run, 2, digest="f" * 32)
    run.store.put(layout.receipt_key("damaged"), b"{}")
    assert sweep(run).boundary == 6


def test_max_bytes_removes_more_than_count_and_age_allow_and_no_more_than_it_must() -> None:
    run = sample(anchors=(9,))
    everything = n_bytes_of(run)
    generous = Retention(keep_versions=64, keep_s=1e9, max_bytes=everything)
    assert sweep(run, generous).boundary == 0
    assert sweep(run, replace(generous, max_bytes=everything - 1)).boundary == 1
    n_wanted = everything - n_anchor_bytes(run) - 4_000
    assert sweep(run, replace(generous, max_bytes=n_wanted)).boundary in range(3, 6)
    assert n_bytes_of(run) <= n_wanted + len("versions before 5 are gone, or going\n")


def test_max_bytes_never_overrides_anchors_and_receipts() -> None:
    run = sample(anchors=(6,))
    hold(run, 3)
    assert sweep(run, Retention(max_bytes=0)).boundary == 3
    run.clock.time += 3601
    assert sweep(run, Retention(max_bytes=0)).boundary == 6


def test_skip_patch_goes_with_the_version_it_starts_from() -> None:
    run = sample()
    run.offer_skip(4, 8)
    run.offer_skip(6, 9)
    sweep(run)
    skips = [key for key in contents(run.store) if "-skip-" in key]
    assert [layout.parse_entry(key).base for key in skips] == [6]  # type: ignore[union-attr]
    assert folders(run, "patch") == [6, 7, 8, 9, 9]


def test_of_the_offered_anchors_only_the_newest_stay() -> None:
    run = sample(anchors=(2, 4, 6, 8))
    done = sweep(run, Retention(keep_versions=64, keep_anchors=2))
    assert done.boundary == 0
    assert folders(run, "anchor") == [0, 6, 8]
    offers = [key for key in contents(run.store) if "-anchor-" in key]
    assert [key[4:16] for key in offers] == ["000000000006", "000000000008"]


def test_boundary_moves_again_and_again_and_one_is_left() -> None:
    run = sample()
    for _ in range(3):
        run.commit_many(3)
        run.offer_anchor(len(run.commits) - 1)
        sweep(run)
    left = [key for key in contents(run.store) if "boundary" in key]
    assert left == [layout.boundary_key(16)]


def test_boundary_that_a_stranger_wrote_deletes_nothing() -> None:
    for version in (9, 900):
        run = sample(anchors=(6,))
        run.store.put(layout.boundary_key(version), b"")
        before = contents(run.store)
        with suppress(UntrustedHistory):
            assert sweep(run, Retention(keep_versions=1)).keys == ()
        assert contents(run.store) == before


def test_history_that_must_not_be_followed_is_not_collected() -> None:
    run = sample()
    other = replace(run.commits[3], digest="f" * 32)
    run.store.put(layout.commit_key(3), run.raw_commit(other))
    before = contents(run.store)
    with pytest.raises(ForkedHistory):
        sweep(run)
    assert contents(run.store) == before


def test_dry_run_says_what_would_go_and_writes_nothing() -> None:
    run = sample(anchors=(1, 2, 6, 8))
    run.offer_skip(1, 5)
    run.upload_anchor(9, "e" * 32, "0" * 32)
    run.clock.time += 3601
    before = contents(run.store)
    watched = Interrupted(run.store)
    told = collect(run.on(watched), KEEP_3, run.clock, dry_run=True)
    assert watched.n_writes == 0
    assert contents(run.store) == before
    assert sweep(run) == told
    gone = before.keys() - contents(run.store).keys()
    assert sorted(told.keys) == sorted(gone)
    n_bytes = sum(len(before[key]) for key in gone)
    assert sum(told.n_bytes.values()) == n_bytes
    assert sum(told.n_objects.values()) == len(gone)
    assert set(told.n_bytes) == {"record", "patch", "anchor"}


def test_empty_run_is_left_alone() -> None:
    run = SampleRun()
    assert sweep(run).keys == ()


@pytest.mark.parametrize(
    "wrong",
    [{"keep_versions": 0}, {"keep_anchors": 0}, {"max_bytes": -1}, {"orphan_grace_s": -1.0}],
)
def test_policy_that_would_delete_what_is_needed_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(StopError):
        Retention(**wrong)  # type: ignore[arg-type]
