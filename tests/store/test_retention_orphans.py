"""Collection of what no record names: data in the making, left behind, or announced too late."""

from __future__ import annotations

import pytest
from sample_logs import contents
from sample_sweeps import folders, sample, sweep, versions

from weightwire.store import layout
from weightwire.store.history import HistoryReader
from weightwire.store.plan import plan
from weightwire.store.records import offer_bytes
from weightwire.store.retention import Retention


def test_data_for_a_version_that_does_not_exist_yet_is_never_deleted() -> None:
    run = sample()
    record = run.record(anchor=True)
    run.clock.time += 1e9
    sweep(run)
    assert 10 in folders(run, "patch")
    assert 10 in folders(run, "anchor")
    assert record.version == 10
    run.commit_record(record)
    assert HistoryReader(run.run).refresh(-1).newest == record


@pytest.mark.parametrize("kind", ["patch", "anchor"])
def test_orphan_of_a_version_that_exists_goes_after_its_grace(kind: str) -> None:
    run = sample()
    upload = {
        "patch": lambda: run.upload_patch(6, 8, "e" * 32, "0" * 32),
        "anchor": lambda: run.upload_anchor(8, "e" * 32, "0" * 32),
    }
    upload[kind]()
    run.clock.time += 3599
    sweep(run)
    assert any("e" * 32 in key for key in contents(run.store))
    run.clock.time += 2
    sweep(run)
    data = [key for key in contents(run.store) if layout.parse_data(key)]
    assert not any("e" * 32 in key for key in data)


def test_orphan_with_one_young_object_is_still_in_the_making() -> None:
    run = sample()
    ref = run.upload_anchor(8, "e" * 32, "0" * 32)
    run.clock.time += 3601
    run.store.put(ref.folder + "tokenizer.json", b"{}")
    sweep(run)
    assert 8 in folders(run, "anchor")


def test_orphan_below_the_boundary_goes_at_once() -> None:
    run = sample()
    run.upload_anchor(3, "e" * 32, "0" * 32)
    run.upload_patch(2, 3, "e" * 32, "0" * 32)
    sweep(run)
    assert folders(run, "anchor") == [6]
    assert folders(run, "patch") == [6, 7, 8, 9]


def test_anchor_announced_after_its_data_was_collected_is_not_counted_on() -> None:
    run = sample(anchors=(4,))
    ref = run.upload_anchor(8, "e" * 32, run.commits[8].digest)
    run.clock.time += 3601
    sweep(run, Retention(keep_versions=1))
    run.announce_anchor(8, "e" * 32, ref)
    assert sweep(run, Retention(keep_versions=1)).boundary == 4
    assert plan(HistoryReader(run.run).refresh(-1), None, 9, avoid=[ref.folder]).anchor


def test_marks_on_anchors_go_with_the_boundary() -> None:
    run = sample(anchors=(2, 3, 5))
    sweep(run, Retention(keep_anchors=1))
    assert len([key for key in contents(run.store) if "-gone-" in key]) == 2
    run.offer_anchor(9)
    sweep(run, Retention(keep_versions=1))
    assert not [key for key in contents(run.store) if "-gone-" in key]


def test_record_that_a_sleeping_publisher_created_again_goes_with_the_next_collection() -> None:
    run = sample()
    sweep(run)
    run.store.create(layout.commit_key(2), run.raw_commit(run.commits[2]))
    assert 2 not in HistoryReader(run.run).refresh(-1).commits
    assert sweep(run).versions == (2,)
    assert versions(run) == [6, 7, 8, 9]


def test_data_of_an_offer_that_cannot_be_read_is_not_an_orphan() -> None:
    run = sample()
    offer = run.offer_skip(6, 9)
    damaged = offer_bytes(offer, None)[:-5]
    run.store.put(layout.skip_offer_key(6, 9, offer.put_id), damaged)
    run.clock.time += 1e6
    sweep(run)
    assert folders(run, "patch") == [6, 7, 8, 9, 9]


def test_names_that_this_release_does_not_know_are_left_alone() -> None:
    run = sample()
    strange = ("log/000000000001-index.json", "patches/readme.txt", "anchors/x/y", "other/z")
    for key in strange:
        run.store.put(key, b"?")
    run.clock.time += 1e6
    sweep(run)
    assert set(strange) <= contents(run.store).keys()
