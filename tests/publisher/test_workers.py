"""Threads that work beside the caller: on the caller's GPU, and keeping nothing of what failed."""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from weightwire.workers import (
    _clear_callers,
    finished,
    flatten,
    forget_frames,
    forget_frames_of,
    threads,
)


class Gpus(threading.local):
    """Which GPU each thread is on, as CUDA keeps it: at first the first."""

    is_initialized = True
    current = 0


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: Gpus.is_initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: gpus.current)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: setattr(gpus, "current", number))
    return gpus


def test_threads_work_on_the_gpu_of_the_thread_that_asks(gpus: Gpus) -> None:
    gpus.current = 5
    with threads(1, "test") as pool, threads(1, "inner") as inner:
        assert pool.submit(lambda: gpus.current).result() == 5
        assert pool.submit(lambda: inner.submit(lambda: gpus.current).result()).result() == 5
        gpus.current = 2
        assert pool.submit(lambda: gpus.current).result() == 2


def test_threads_made_before_there_is_a_gpu_find_it_later(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gpus, "is_initialized", False)
    with threads(1, "test") as pool:
        gpus.current = 5
        assert pool.submit(lambda: gpus.current).result() == 0
        monkeypatch.setattr(Gpus, "is_initialized", True)
        assert pool.submit(lambda: gpus.current).result() == 5


def test_threads_neither_load_torch_nor_begin_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: asked.append(1))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with threads(1, "test") as pool:
        pool.submit(int).result()
        monkeypatch.delitem(sys.modules, "torch")
        assert pool.submit(lambda: "torch" in sys.modules).result() is False
    assert not asked


class Memory:
    """Something that a function has in hand when it fails."""


def failing(held: list[weakref.ref[Memory]]) -> None:
    memory = Memory()
    held.append(weakref.ref(memory))
    try:
        raise KeyError("the first")
    except KeyError as error:
        raise ValueError("the second") from error


def test_a_kept_error_tells_where_it_happened_and_holds_nothing() -> None:
    held: list[weakref.ref[Memory]] = []
    try:
        failing(held)
    except ValueError as error:
        kept = error
    assert held[0]() is not None
    told = "".join(traceback.format_exception(kept))
    forget_frames(kept)
    assert held[0]() is None
    assert "".join(traceback.format_exception(kept)) == told
    assert "in failing" in told
    assert "the first" in told


def test_the_error_of_a_future_is_found_through_others() -> None:
    held: list[weakref.ref[Memory]] = []
    with threads(1, "inner") as inner, threads(1, "outer") as outer:
        flat = flatten(outer.submit(lambda: inner.submit(failing, held)))
        flat.add_done_callback(forget_frames_of)
    assert isinstance(flat.exception(), ValueError)
    assert held[0]() is None


def test_futures_without_an_error_are_left_alone() -> None:
    never: Future[int] = Future()
    never.cancel()
    for future in (finished(1), never):
        future.add_done_callback(forget_frames_of)
    assert finished(1).result() == 1


def test_what_has_not_ended_goes_on_after_an_error_passed_through_it() -> None:
    def generating() -> Iterator[Any]:
        memory = Memory()
        try:
            failing([])
        except ValueError as error:
            yield error
        yield memory

    going = generating()
    kept = next(going)
    _clear_callers(kept.__traceback__.tb_next.tb_frame)
    assert isinstance(next(going), Memory)
