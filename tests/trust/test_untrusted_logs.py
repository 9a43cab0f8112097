"""What a hostile or broken store can show a reader, and the error that names each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sample_logs import SampleRun, copy_of

from weightwire.codec.index import index_bytes, parse_index
from weightwire.errors import (
    BadSignature,
    ForkedHistory,
    FrozenHistory,
    HashMismatch,
    NotARun,
    ReplayedRecord,
    RolledBack,
    StopError,
    UnsignedRecord,
)
from weightwire.store import layout
from weightwire.store.anchor import manifest_bytes, parse_manifest
from weightwire.store.cache import Cache
from weightwire.store.contract import ObjectStore
from weightwire.store.fetch import Fetcher
from weightwire.store.history import HistoryReader
from weightwire.store.plan import Step
from weightwire.store.records import Commit, commit_bytes, offer_bytes, sha256
from weightwire.trust.freshness import check_fresh
from weightwire.trust.keys import SigningKey
from weightwire.trust.verify import require

KEY, OTHER_KEY = SigningKey.generate(), SigningKey.generate()
both = pytest.mark.parametrize("signed", [True, False])


def sample(signed: bool, name: str = "a", n: int = 6) -> SampleRun:
    """A run of a few versions, read by someone who pinned its key, or by someone who has none."""
    if not signed:
        return SampleRun(name=name).commit_many(n)
    return SampleRun(sign=KEY.sign, verify=require(KEY.public), name=name).commit_many(n)


def look(run: SampleRun, store: ObjectStore | None = None) -> HistoryReader:
    reader = HistoryReader(run.on(store or run.store))
    reader.refresh(-1)
    return reader


def changed(run: SampleRun, version: int, sign: Callable[[bytes], str] | None) -> bytes:
    """A record with other weights behind it, sealed as well as anyone can."""
    return commit_bytes(replace(run.commits[version], digest="f" * 32), sign)


@both
def test_an_honest_log_is_accepted(signed: bool) -> None:
    run = sample(signed)
    run.offer_anchor(3)
    run.offer_skip(1, 4)
    history = look(run).history
    assert history.newest == run.commits[-1]
    assert len(history.offers) == 2


@both
def test_record_of_another_run_is_refused(signed: bool) -> None:
    run, other = sample(signed), sample(signed, "b")
    run.store.put(layout.commit_key(3), other.store.read(layout.commit_key(3)))
    with pytest.raises(ReplayedRecord, match="000000000003-commit"):
        look(run)


@both
def test_record_of_another_version_is_refused(signed: bool) -> None:
    run = sample(signed)
    run.store.put(layout.commit_key(6), run.store.read(layout.commit_key(2)))
    with pytest.raises(ReplayedRecord, match="record of version 2"):
        look(run)


@both
def test_offer_in_the_place_of_a_commit_is_refused(signed: bool) -> None:
    run = sample(signed)
    offer = run.offer_anchor(5)
    run.store.put(layout.commit_key(5), offer_bytes(offer, run.run.sign))
    with pytest.raises(NotARun, match=r"weightwire\.offer"):
        look(run)


@pytest.mark.parametrize(("signed", "error"), [(True, BadSignature), (False, ForkedHistory)])
def test_log_with_a_changed_middle_record_is_refused(signed: bool, error: type[Exception]) -> None:
    run = sample(signed)
    signature = run.store.read(layout.commit_key(3)).split(b'"signature":"')[1][:128].decode()
    run.store.put(layout.commit_key(3), changed(run, 3, (lambda _: signature) if signed else None))
    with pytest.raises(error):
        look(run)


@both
def test_record_with_a_flipped_bit_is_not_believed(signed: bool) -> None:
    run = sample(signed)
    raw = run.store.read(layout.commit_key(3))
    run.store.put(layout.commit_key(3), raw.replace(b'"n_elements":10', b'"n_elements":11'))
    history = look(run).history
    assert history.unreadable == {3}
    assert 3 not in history.commits


@pytest.mark.parametrize(("signed", "error"), [(True, BadSignature), (False, ForkedHistory)])
def test_record_signed_again_by_another_key_is_refused(
    signed: bool, error: type[Exception]
) -> None:
    run = sample(signed)
    run.store.put(layout.commit_key(3), changed(run, 3, OTHER_KEY.sign))
    with pytest.raises(error):
        look(run)


def test_record_without_its_signature_is_refused() -> None:
    run = sample(True)
    run.store.put(layout.commit_key(5), commit_bytes(run.commits[5], None))
    with pytest.raises(UnsignedRecord, match="000000000005-commit"):
        look(run)


def test_signature_spelled_another_way_is_refused() -> None:
    run = sample(True)
    raw = commit_bytes(run.commits[5], lambda message: KEY.sign(message).upper())
    run.store.put(layout.commit_key(5), raw)
    with pytest.raises(BadSignature):
        look(run)


def test_several_keys_may_be_pinned_while_they_are_rotated() -> None:
    run = SampleRun(sign=KEY.sign).commit_many(2)
    run.run = replace(run.run, sign=OTHER_KEY.sign, verify=require(KEY.public, OTHER_KEY.public))
    run.commit_many(2)
    assert look(run).history.newest == run.commits[3]
    run.run = replace(run.run, verify=require(OTHER_KEY.public))
    with pytest.raises(BadSignature, match=OTHER_KEY.public.fingerprint):
        look(run)


def test_requiring_no_key_at_all_is_refused() -> None:
    with pytest.raises(StopError, match="at least one"):
        require()


@both
def test_old_copy_of_the_store_is_refused_by_who_saw_a_newer_one(signed: bool) -> None:
    run = sample(signed, n=3)
    old = copy_of(run)
    run.commit_many(3)
    reader = HistoryReader(run.on(old))
    reader.remember(5, sha256(run.raw_commit(run.commits[5])))
    with pytest.raises(RolledBack, match="newest version is 2"):
        reader.refresh(-1)


@both
def test_truncated_log_is_refused_by_who_saw_it_whole(signed: bool) -> None:
    run = sample(signed)
    reader = HistoryReader(run.run)
    reader.remember(5, sha256(run.raw_commit(run.commits[5])))
    run.store.delete([layout.commit_key(4), layout.commit_key(5)])
    with pytest.raises(RolledBack, match="version 5 was seen"):
        reader.refresh(-1)


@both
def test_version_that_is_not_the_one_seen_before_is_refused(signed: bool) -> None:
    run = sample(signed)
    reader = HistoryReader(run.run)
    reader.remember(5, "0" * 64)
    with pytest.raises(ForkedHistory, match="version 5 is not the one"):
        reader.refresh(-1)


@both
def test_record_of_an_older_epoch_is_refused(signed: bool) -> None:
    run = sample(signed, n=2)
    run.commit(epoch=3)
    run.commit(epoch=2)
    with pytest.raises(ForkedHistory, match="epoch 2"):
        look(run)


@both
def test_frozen_log_is_an_alarm(signed: bool) -> None:
    run = sample(signed)
    newest = look(run).history.newest
    assert newest is not None
    with pytest.raises(FrozenHistory):
        check_fresh(newest, run.clock.now() + 3600, 600)


def test_unsigned_offer_is_refused() -> None:
    run = sample(True)
    offer = run.offer_anchor(3)
    run.store.put(layout.anchor_offer_key(3, offer.put_id), offer_bytes(offer, None))
    with pytest.raises(UnsignedRecord, match="anchor"):
        look(run)


def test_tampered_offer_is_refused() -> None:
    run = sample(True)
    offer = run.offer_skip(1, 4)
    raw = offer_bytes(replace(offer, digest="f" * 32), lambda _: KEY.sign(b"other"))
    run.store.put(layout.skip_offer_key(1, 4, offer.put_id), raw)
    with pytest.raises(BadSignature, match="skip"):
        look(run)


def test_tampered_offer_is_not_a_way_where_there_is_no_key() -> None:
    run = sample(False)
    offer = run.offer_skip(1, 4)
    key = layout.skip_offer_key(1, 4, offer.put_id)
    run.store.put(key, offer_bytes(replace(offer, digest="f" * 32), None))
    assert look(run).history.offers == {}
    run.store.put(key, offer_bytes(offer, None)[:-9])
    assert look(run).history.offers == {}


@both
def test_offer_moved_to_another_version_is_refused(signed: bool) -> None:
    run = sample(signed)
    offer = run.offer_anchor(3)
    raw = offer_bytes(offer, run.run.sign)
    run.store.put(layout.anchor_offer_key(4, offer.put_id), raw)
    with pytest.raises(ReplayedRecord):
        look(run)


def test_tampered_anchor_manifest_is_refused_even_if_sealed_again(tmp_path: Path) -> None:
    run = sample(False)
    ref = run.commits[0].anchor
    assert ref is not None
    key = ref.folder + layout.ANCHOR_MANIFEST
    manifest = parse_manifest(run.store.read(key), ref)
    run.store.put(key, manifest_bytes(replace(manifest, ties={"b": "a"})))
    step = Step(0, run.commits[0].digest, anchor=ref)
    with pytest.raises(HashMismatch, match=r"anchor\.json"):
        Fetcher(run.store, Cache(tmp_path)).anchor(step)


def test_tampered_patch_index_is_refused_even_if_sealed_again(tmp_path: Path) -> None:
    run = sample(False)
    ref = run.commits[3].patch
    assert ref is not None
    key = ref.folder + "patch.json"
    index = parse_index(run.store.read(key), key)
    run.store.put(key, index_bytes(replace(index, n_changed=4)))
    with pytest.raises(HashMismatch, match=r"patch\.json"):
        Fetcher(run.store, Cache(tmp_path)).patch(Step(3, run.commits[3].digest, patch=ref))


@pytest.mark.parametrize("digits", ["٠٠٠٠٠٠٠٠٠٠٠٣", "00000000000３"])
def test_digits_of_other_scripts_are_no_second_name_for_a_version(digits: str) -> None:
    run = sample(False)
    run.store.put(f"log/{digits}-commit.json", changed(run, 3, None))
    run.store.put(f"log/boundary-{digits}", b"")
    history = look(run).history
    assert history.boundary == 0
    assert history.commits[3] == run.commits[3]


def test_a_commit_is_read_as_it_was_written() -> None:
    run = sample(True)
    found: Commit | None = look(run).history.newest
    assert found == run.commits[-1]
