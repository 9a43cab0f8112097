"""What a publish that failed leaves behind: an error to look at, and nothing else."""

from __future__ import annotations

import gc
import logging
import traceback
import weakref
from typing import Any

import pytest

from sample_training import inline, train, weights
from weightwire import publisher as publisher_module
from weightwire.diff.moved import MoveGuard
from weightwire.diff.redo import RedoLog
from weightwire.errors import CommitUnknown, FencedWriter, StateMoved, StoreUnavailable
from weightwire.publisher import Publisher
from weightwire.store.memory import MemoryStore
from weightwire.store.retry import RetryPolicy
from weightwire.workers import threads

ONCE = RetryPolicy(n_attempts=1)


class Refusing(MemoryStore):
    """A store that cannot be written to at times, where it is told."""

    refused = ""

    def put(self, key: str, data: Any) -> None:
        self._refuse(key)
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._refuse(key)
        return super().create(key, data)

    def _refuse(self, key: str) -> None:
        if self.refused and self.refused in key:
            raise StoreUnavailable("down")


@pytest.fixture
def redos(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[RedoLog]]:
    """What a version keeps until it is committed, as long as anyone has it."""
    made: list[weakref.ref[RedoLog]] = []

    class Watched(RedoLog):
        def __init__(self) -> None:
            super().__init__()
            made.append(weakref.ref(self))

    monkeypatch.setattr(publisher_module, "RedoLog", Watched)
    return made


def held(redos: list[weakref.ref[RedoLog]]) -> int:
    gc.collect()
    return sum(each() is not None for each in redos)


def settled(pub: Publisher) -> None:
    """A thread tells of an error before it lets go of it."""
    for executor in (pub._reads, pub._commits):
        executor.submit(int).result()


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"mode": "validate"}], ids=str)
@pytest.mark.parametrize("background", [inline, threads])
def test_a_failed_upload_holds_nothing_until_the_next_publish(
    background: Any, options: dict[str, Any], redos: list[weakref.ref[RedoLog]]
) -> None:
    store, state = Refusing(), weights()
    with Publisher(store, state, background=background, retry=ONCE, **options) as pub:
        pub.publish().result()
        train(state, 1)
        store.refused = "patches"
        failed = pub.publish()
        assert isinstance(failed.exception(), StoreUnavailable)
        settled(pub)
        assert held(redos) == 0
        told = "".join(traceback.format_exception(failed.exception()))
        assert "in _finish_upload" in told
        store.refused = ""
        assert pub.publish().result().version == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_read_holds_nothing_until_the_next_publish(
    overlap: bool, redos: list[weakref.ref[RedoLog]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(_: MoveGuard) -> None:
        raise StateMoved("it did")

    state = weights()
    with Publisher(MemoryStore(), state, overlap=overlap) as pub:
        pub.publish().result()
        train(state, 1)
        with monkeypatch.context() as patch:
            patch.setattr(MoveGuard, "check", moved)
            failed = pub.publish()
            assert isinstance(failed.exception(), StateMoved)
        settled(pub)
        assert held(redos) == 0
        assert "in _read_changes" in "".join(traceback.format_exception(failed.exception()))


def test_a_publisher_that_is_fenced_holds_nothing_of_its_last_version(
    redos: list[weakref.ref[RedoLog]],
) -> None:
    store, state = Refusing(), weights()
    with Publisher(store, state, background=inline, retry=ONCE) as pub:
        pub.publish().result()
        train(state, 1)
        store.refused = "commit"
        assert isinstance(pub.publish().exception(), CommitUnknown)
        assert held(redos) == 1  # it may have to be sent again
        store.refused = ""
        with Publisher(store, weights(), background=inline) as other:
            other.publish().result()
        with pytest.raises(FencedWriter):
            pub.publish()
        assert held(redos) == 0


def test_closing_lets_go_of_everything_whatever_settling_says(
    redos: list[weakref.ref[RedoLog]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, state = Refusing(), weights()
    pub = Publisher(store, state, retry=ONCE)
    pub.publish().result()
    train(state, 1)
    store.refused = "commit"
    assert isinstance(pub.publish().exception(), CommitUnknown)

    def broken(_: Any) -> None:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(pub, "_advance", broken)
    monkeypatch.setattr(pub, "_commit", broken)
    with caplog.at_level(logging.ERROR):
        pub.close()
    assert "the GPU is gone" in caplog.text
    for executor in (pub._reads, pub._commits, pub._uploads, pub._extras_worker):
        with pytest.raises(RuntimeError, match="shutdown"):
            executor.submit(int)
    caplog.clear()
    assert held(redos) == 0
    pub.close()


def test_closing_ends_threads_even_where_extras_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    pub = Publisher(MemoryStore(), weights())
    pub.publish().result()

    def broken() -> None:
        raise MemoryError

    monkeypatch.setattr(pub, "_close_extras", broken)
    with pytest.raises(MemoryError):
        pub.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        pub._commits.submit(int)
