"""``weightwire publish``."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from sample_runs import FORMS, model, run, save, state_on_disk, stepped
from sample_stores import Chain, flip, make_chain, version

import weightwire as ww
from weightwire.cli.baseline_folder import default_folder, open_baseline
from weightwire.errors import FencedWriter
from weightwire.store.open import open_store


def latest(store: Path, out: Path) -> dict[str, object]:
    """What a newcomer gets."""
    outcome = run("follow", store, "-o", out, "--once", "--json")
    assert outcome.code == 0, outcome.stderr
    return outcome.json


def test_the_first_version_is_an_anchor_with_the_files_beside_the_weights(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "run", [])
    said = chain.publish_next()
    assert (said["version"], said["epoch"], said["density"]) == (0, 1, 1.0)
    assert said["digest"] == ww.digest(model())
    anchor = chain.one("anchors/*/model.safetensors").parent
    assert state_on_disk(anchor) == state_on_disk(chain.checkpoints[0])
    assert (anchor / "config.json").read_text() == "{}"


def test_each_call_makes_one_version_and_a_newcomer_gets_its_bits(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 4)
    assert len(list(chain.store.glob("log/*-commit.json"))) == 4
    assert latest(chain.store, tmp_path / "out")["version"] == 3
    assert state_on_disk(tmp_path / "out") == state_on_disk(chain.checkpoints[3])


def test_later_versions_are_patches_against_a_local_file(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    shutil.rmtree(chain.one("anchors/*"))
    said = chain.publish_next()
    assert said["n_changed"] == 590
    assert said["n_bytes"] < said["n_full_bytes"]  # type: ignore[operator]
    assert not list(chain.store.glob("anchors/*"))


def test_a_lost_baseline_is_rebuilt_from_the_store(tmp_path: Path, cache_home: Path) -> None:
    chain = make_chain(tmp_path, 3)
    shutil.rmtree(cache_home)
    said = chain.publish_next()
    assert (said["version"], said["n_changed"]) == (3, 590)
    latest(chain.store, tmp_path / "out")
    assert state_on_disk(tmp_path / "out") == state_on_disk(chain.checkpoints[3])


@pytest.mark.parametrize("damage", ["flipped", "cut", "old"])
def test_a_damaged_or_old_baseline_is_noticed(
    tmp_path: Path, cache_home: Path, damage: str
) -> None:
    chain = make_chain(tmp_path, 2)
    file = next(cache_home.rglob("model.safetensors"))
    if damage == "flipped":
        flip(file)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:100])
    else:
        chain.publish_next("--baseline", tmp_path / "elsewhere")
    said = chain.publish_next()
    assert said["n_changed"] == 590
    latest(chain.store, tmp_path / "out")
    assert state_on_disk(tmp_path / "out") == state_on_disk(chain.checkpoints[-1])


def test_a_store_that_cannot_give_the_last_version_gets_an_anchor(
    tmp_path: Path, cache_home: Path
) -> None:
    chain = make_chain(tmp_path, 2)
    shutil.rmtree(cache_home)
    shutil.rmtree(chain.store / "anchors")
    said = chain.publish_next()
    assert (said["version"], said["density"]) == (2, 1.0)
    assert latest(chain.store, tmp_path / "out")["version"] == 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_every_form_and_codec_arrives(tmp_path: Path, form: str, codec: str) -> None:
    for number in range(2):
        path = save(tmp_path / f"step-{number}", form, version(number))
        assert run("publish", tmp_path / "run", path, "--codec", codec, "--threads", 1).code == 0
    latest(tmp_path / "run", tmp_path / "out")
    assert state_on_disk(tmp_path / "out") == state_on_disk(path)
    found = run("log", tmp_path / "run", "--json").json["versions"]
    assert [each["codec"] for each in found] == [None, codec]


def test_tensors_may_come_go_and_change_shape(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    new = stepped(model())
    del new["norm.weight"]
    new["fresh.weight"] = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = save(tmp_path / "new", "folder", new)
    assert run("publish", chain.store, path).code == 0
    last = save(tmp_path / "last", "folder", stepped(new, 9))
    assert run("publish", chain.store, last, "--json").json["n_changed"] == 590
    latest(chain.store, tmp_path / "out")
    assert state_on_disk(tmp_path / "out") == state_on_disk(last)


def test_anchors_come_as_often_as_asked_for(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 5, "--anchor-every", 2)
    assert run("log", chain.store, "--json").json["anchors"] == [0, 2, 4]


def test_the_same_checkpoint_again_is_an_empty_version(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    said = run("publish", chain.store, chain.checkpoints[0], "--json").json
    assert (said["version"], said["n_changed"], said["n_bytes"]) == (1, 0, 0)
    assert said["times_smaller"] is None


def test_a_call_fences_whoever_published_before(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    state = version(0)
    with ww.Publisher(chain.store, state) as old:
        said = chain.publish_next()
        assert said["epoch"] == old.epoch + 1
        state["steps"] = np.array(8, np.int64)
        with pytest.raises(FencedWriter):
            old.publish().result()


def test_a_publisher_that_claims_late_commits_nothing_before_its_first_version(
    tmp_path: Path,
) -> None:
    chain = make_chain(tmp_path, 1)
    before = chain.objects()
    state = version(1)
    with ww.Publisher(chain.store, state, claim="with the first version") as late:
        assert chain.objects() == before
        assert (late.version, late.epoch) == (0, 2)
        published = late.publish().result()
    assert (published.version, published.epoch) == (1, 2)


def test_a_publisher_that_claims_late_is_fenced_by_a_version_it_did_not_see(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    with ww.Publisher(chain.store, version(5), claim="with the first version") as late:
        chain.publish_next()
        with pytest.raises(FencedWriter, match="took over"):
            late.publish().result()
    found = run("log", chain.store, "--json").json["versions"]
    assert [each["epoch"] for each in found] == [1, 2]


def test_of_two_publishers_that_claim_late_one_wins(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    outcomes: list[str] = []
    start = threading.Barrier(2)

    def publish(seed: int) -> None:
        state = stepped(version(0), seed)
        with ww.Publisher(chain.store, state, claim="with the first version") as publisher:
            start.wait()
            error = publisher.publish().exception()
            outcomes.append(type(error).__name__ if error else "won")

    workers = [threading.Thread(target=publish, args=(seed,)) for seed in (11, 12)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(outcomes) == ["FencedWriter", "won"]


def test_a_signed_run_takes_only_its_own_key(tmp_path: Path) -> None:
    run("keygen", "-o", tmp_path / "key")
    run("keygen", "-o", tmp_path / "other")
    chain = make_chain(tmp_path, 2, "--key", tmp_path / "key")
    path = save(tmp_path / "next", "folder", version(2))
    for key in ([], ["--key", tmp_path / "other"]):
        before = len(list(chain.store.glob("log/*")))
        outcome = run("publish", chain.store, path, *key, "--json")
        if key:
            assert outcome.json["error"]["type"] == "BadSignature"
            assert len(list(chain.store.glob("log/*"))) == before
    public = run("keygen", "--show", tmp_path / "key").stdout.strip()
    refused = run(
        "follow", chain.store, "-o", tmp_path / "out", "--once", "--key", public, "--json"
    )
    assert refused.json["error"]["type"] == "UnsignedRecord"


def test_the_baseline_is_never_somebody_elses_folder(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    before = state_on_disk(chain.checkpoints[0])
    path = save(tmp_path / "next", "folder", version(1))
    outcome = run("publish", chain.store, path, "--baseline", chain.checkpoints[0], "--json")
    assert (outcome.code, outcome.json["error"]["type"]) == (2, "OutputExists")
    assert state_on_disk(chain.checkpoints[0]) == before


def test_a_second_publish_waits_for_the_first(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    notes: list[str] = []
    done = threading.Event()

    def wait_for_it() -> None:
        with open_baseline(default_folder(str(chain.store)), tmp_path, notes.append):
            done.set()

    with open_baseline(default_folder(str(chain.store)), tmp_path):
        waiter = threading.Thread(target=wait_for_it)
        waiter.start()
        assert not done.wait(0.2)
    waiter.join()
    assert done.is_set()
    assert "waiting" in notes[0]


def test_stores_do_not_share_a_baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_folder("run") == default_folder(str(tmp_path / "run"))
    assert default_folder("run") != default_folder("run-2")
    assert default_folder("s3://bucket/run") == default_folder("s3://bucket/run/")


def test_a_store_in_memory_works_within_one_process(tmp_path: Path) -> None:
    path = save(tmp_path / "step", "folder", model())
    store = f"memory://{tmp_path.name}-publish"
    assert run("publish", store, path).code == 0
    assert [info.key for info in open_store(store).list("log/")]


@pytest.mark.parametrize(
    ("store", "checkpoint", "kind"),
    [
        ("run", "nowhere", "NotACheckpoint"),
        ("ftp://host/run", "step", "StoreRefused"),
        ("file/run", "step", "StoreRefused"),
    ],
)
def test_what_cannot_work_is_a_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, checkpoint: str, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "step", "folder", model())
    (tmp_path / "file").write_text("")
    outcome = run("publish", store, checkpoint, "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["type"] == kind


def test_a_full_disk_under_the_baseline_is_an_error_and_nothing_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "step", "folder", model())

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patcher:
        patcher.setattr(sys.modules["weightwire.diff.baseline"], "write_state", fail)
        outcome = run("publish", tmp_path / "run", path, "--json")
    assert outcome.code == 2
    assert "No space left" in outcome.json["error"]["message"]
    assert not list(tmp_path.glob("run/log/*"))
    assert run("publish", tmp_path / "run", path, "--json").json["version"] == 0


def test_events_go_to_a_file(tmp_path: Path) -> None:
    make_chain(tmp_path, 2, "--metrics-file", tmp_path / "events.jsonl")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(each["event"], each["version"]) for each in events] == [
        ("published", 0),
        ("published", 1),
    ]


def test_metrics_go_to_a_text_file(tmp_path: Path) -> None:
    make_chain(tmp_path, 2, "--metrics-file", tmp_path / "ww.prom")
    text = (tmp_path / "ww.prom").read_text()
    assert "weightwire_published_version 1.0" in text
    assert 'weightwire_store_requests_total{verb="create"}' in text


def test_people_see_what_it_cost(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    path = save(tmp_path / "next", "folder", version(1))
    outcome = run("publish", chain.store, path)
    assert "590 of 5,951 (9.91%)" in outcome.stdout
    assert "× smaller than full" in outcome.stdout
    assert "read: 100%" in outcome.stderr
