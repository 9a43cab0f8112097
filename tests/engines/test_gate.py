"""The gate: generations side by side, one activation alone, nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weightwire.engines.gate import Gate


def ready() -> bool:
    return True


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_two_generations_are_inside_at_once() -> None:
    gate, both = Gate(), threading.Barrier(2, timeout=10)

    def generate() -> None:
        with gate.generation(ready, 10):
            both.wait()

    threads = [in_thread(generate), in_thread(generate)]
    for thread in threads:
        thread.join(10)
    assert not both.broken


def test_an_activation_waits_for_the_generation_inside_and_keeps_new_ones_out() -> None:
    gate, order = Gate(), []
    wants, written = threading.Event(), threading.Event()

    def activate() -> None:
        wants.set()
        with gate.activation() as may_write:
            assert may_write
            order.append("write")
        written.set()

    with gate.generation(ready, 10):
        thread = in_thread(activate)
        wants.wait(10)
        assert not written.wait(0.05)
        late = in_thread(lambda: enter(gate, order))
        late.join(0.05)
        order.append("first leaves")
    thread.join(10)
    late.join(10)
    assert order == ["first leaves", "write", "late enters"]


def enter(gate: Gate, order: list[str]) -> None:
    with gate.generation(ready, 10):
        order.append("late enters")


def test_a_thread_that_is_inside_enters_again_although_an_activation_waits() -> None:
    gate, written = Gate(), threading.Event()

    def activate() -> None:
        with gate.activation():
            written.set()

    with gate.generation(ready, 10):
        thread = in_thread(activate)
        assert not written.wait(0.05)
        with gate.generation(ready, 10) as is_in:
            assert is_in
        assert not written.is_set()
    thread.join(10)
    assert written.is_set()


def test_whoever_is_not_ready_in_time_does_not_get_in_and_blocks_nobody() -> None:
    gate = Gate()
    with gate.generation(lambda: False, 0.01) as is_in:
        assert not is_in
        assert not gate.is_inside
    with gate.activation() as may_write:
        assert may_write


def test_closing_lets_a_waiting_activation_go_without_writing() -> None:
    gate, answers = Gate(), []

    def activate() -> None:
        with gate.activation() as may_write:
            answers.append(may_write)

    with gate.generation(ready, 10):
        thread = in_thread(activate)
        thread.join(0.05)
        gate.close()
        thread.join(10)
        assert answers == [False]
