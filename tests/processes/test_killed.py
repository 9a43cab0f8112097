"""Processes killed, or frozen for long, at chosen places: in uploads, in staging, in the middle of files."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from actor_states import FENCED, first_state, sha256_of, sha256_of_folder, train
from stopping_actor import CHUNK_BYTES
from supervision import Actor, place_in

import weightwire as ww
from weightwire import limits
from weightwire.clock import SystemClock
from weightwire.store import layout
from weightwire.store.history import HistoryReader
from weightwire.store.retention import Retention, collect
from weightwire.store.run import Run, require_identity
from weightwire.testing.seaweed import S3Server


def zeros() -> dict[str, Any]:
    return {name: np.zeros_like(tensor) for name, tensor in first_state().items()}


def folder_store(folder: Path) -> tuple[str, dict[str, str]]:
    return str(folder / "store"), {}


class Trainer:
    """A publisher in this process, to prepare a run or to go on with one."""

    def __init__(self, store: Any, seed: int = 7, **options: Any) -> None:
        self.state, self._rng = first_state(), np.random.default_rng(seed)
        self.publisher = ww.Publisher(store, self.state, **options)

    def publish(self, n_versions: int = 1) -> ww.Published:
        for _ in range(n_versions):
            train(self.state, self._rng)
            published = self.publisher.publish().result()
        return published

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.close()


# In which place of which file a worker is killed, and from what it was updating.
PLACES = {
    "staging an anchor": ("read anchors", 3, False),
    "staging patches": ("read patches", 3, True),
    "staging patches over an anchor": ("read patches", 3, False),
    "overwriting files": ("journal", 3, True),
    "writing new files": ("rewrite", 3, False),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_killed_in_the_middle_resumes_from_disk_and_ends_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(limits, "ANCHOR_CHUNK_BYTES", CHUNK_BYTES)
    key, number, is_behind = PLACES[place]
    store = folder_store(tmp_path)
    target, cache, log = tmp_path / "target", tmp_path / "cache", tmp_path / "worker.err"
    with Trainer(store[0]) as trainer:
        trainer.publish(3)
        if is_behind:
            assert _work(store, target, cache, log, "never", 1) == trainer.publisher.version
            trainer.publish(3)
        with Actor(
            "stopping_actor.py", "work", target, cache, key, number, store=store, log=log
        ) as a:
            a.until_frozen()
            a.kill()
        n_fresh = _bytes_of_work(store, tmp_path / "fresh", tmp_path / "fresh-cache", log)
        n_bytes = _bytes_of_work(store, target, cache, log)
        assert n_bytes < n_fresh
        assert sha256_of_folder(target) == sha256_of(trainer.state)


def _work(
    store: tuple[str, dict[str, str]], target: Path, cache: Path, log: Path, key: str, number: int
) -> int:
    with Actor("stopping_actor.py", "work", target, cache, key, number, store=store, log=log) as a:
        word, version, *_ = a.hear().split() or ["gone", "-1"]
        assert (word, a.end()) == ("holds", 0), a.errors()
    return int(version)


def _bytes_of_work(store: tuple[str, dict[str, str]], target: Path, cache: Path, log: Path) -> int:
    with Actor("stopping_actor.py", "work", target, cache, "never", 1, store=store, log=log) as a:
        said = a.hear().split()
        assert a.end() == 0, a.errors()
    return int(said[-1])


# Where a publisher is killed, the how-manieth time it comes there, and what exists by then.
UPLOADS = {
    "in the first anchor": ("middle 0 of anchors/000000000000", 1, -1),
    "before the first commit": (f"create {layout.commit_key(0)}", 1, -1),
    "in a background anchor": ("middle 0 of anchors/000000000003", 1, 3),
    "before announcing an anchor": ("put log/000000000003-anchor", 1, 3),
    "in a skip patch": ("put patches/000000000002-000000000000", 1, 2),
    "before announcing a skip patch": ("put log/000000000002-skip", 1, 2),
    "in a patch": ("put patches/000000000002-000000000001", 1, 1),
}


@pytest.mark.parametrize("place", UPLOADS)
def test_a_publisher_killed_while_uploading_leaves_readers_alone_and_the_next_goes_on(
    s3_server: S3Server, tmp_path: Path, place: str
) -> None:
    key, number, newest = UPLOADS[place]
    prefix = "killed-" + place.replace(" ", "-")
    store, log = place_in(s3_server, prefix), tmp_path / "publisher.err"
    with Actor("stopping_actor.py", "publish", 4, key, number, store=store, log=log) as actor:
        actor.until_frozen()
        actor.kill()
    live = zeros()
    if newest >= 0:
        with ww.Subscriber(s3_server.open(prefix), live) as reader:
            reader.update()
            assert reader.version >= newest
            assert ww.digest(live) == reader.digest
    with Trainer(s3_server.open(prefix)) as trainer:
        assert trainer.publisher.version > newest or newest == -1
        assert (trainer.publisher.epoch == 1) == (newest == -1)
        published = trainer.publish()
        with ww.Subscriber(s3_server.open(prefix), live) as reader:
            reader.update()
            assert reader.version == published.version
        assert sha256_of(live) == sha256_of(trainer.state)


def test_a_frozen_publisher_that_wakes_after_its_slot_was_collected_is_fenced(
    s3_server: S3Server, tmp_path: Path
) -> None:
    """It stops between uploading and committing; the world goes on without it, and cleans up."""
    store, log = place_in(s3_server, "frozen"), tmp_path / "publisher.err"
    slot = layout.commit_key(2)
    objects = s3_server.open("frozen")
    with Actor("stopping_actor.py", "publish", 4, f"create {slot}", 1, store=store, log=log) as old:
        old.until_frozen()
        with Trainer(objects, anchors=ww.AnchorPolicy(every=2)) as trainer:
            trainer.publish(8)
            trainer.publisher.wait()
            run = Run(objects, require_identity(objects))
            collected = collect(run, Retention(keep_versions=1, keep_anchors=1), SystemClock())
            assert 2 in collected.versions, "its slot must be free again, or this tests nothing"
            live = zeros()
            with ww.Subscriber(objects, live) as reader:
                reader.update()
                old.signal(signal.SIGCONT)
                _check_fenced(old)
                assert reader.update() is None
                published = trainer.publish()
                reader.update()
                assert reader.version == published.version
            assert sha256_of(live) == sha256_of(trainer.state)
    history = HistoryReader(run).refresh(-1)
    assert 2 not in history.commits
    assert slot not in [info.key for info in objects.list(layout.LOG)]


def _check_fenced(actor: Actor) -> None:
    heard = [actor.hear() for _ in range(3)]
    assert [line.split()[0] for line in heard] == ["published", "published", "fenced"], (
        actor.errors()
    )
    assert actor.end() == FENCED
