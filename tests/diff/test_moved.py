"""What a publisher learns of a state before it reads it: counts of writes, and where streams are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sample_device_states import bits_of

import weightwire as ww
from sample_training import inline
from weightwire.diff.device_streams import devices_in_use
from weightwire.diff.moved import MoveGuard
from weightwire.errors import StateMoved
from weightwire.store.memory import MemoryStore


class Stream:
    """A stream of one device that marks where it is, and sees who waits for that."""

    def __init__(self, device: torch.device, seen: list[str]) -> None:
        self._device, self._seen = device, seen

    def record_event(self) -> Stream:
        self._seen.append(f"marked {self._device}")
        return self

    def synchronize(self) -> None:
        self._seen.append(f"awaited {self._device}")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Eight GPUs, of which this process uses the third and stands on the sixth."""
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda number: 1 << 20 if number == 2 else 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, seen))
    return seen


def test_devices_in_use_are_those_with_memory_and_the_current_one(seen: list[str]) -> None:
    assert devices_in_use() == [torch.device("cuda", 2), torch.device("cuda", 5)]


def test_no_device_is_in_use_before_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert devices_in_use() == []


@pytest.mark.parametrize("wrap", [lambda make: make, lambda make: ww.cast(make, "bf16")])
def test_a_callable_is_asked_after_all_that_the_caller_submitted(
    wrap: Any, seen: list[str]
) -> None:
    weight = torch.zeros(100)

    def made() -> dict[str, torch.Tensor]:
        seen.append("asked")
        return {"w": weight}

    with ww.Publisher(MemoryStore(), wrap(made), overlap=True) as pub:
        pub.publish().result()
    marked, awaited = ([f"{did} cuda:2", f"{did} cuda:5"] for did in ("marked", "awaited"))
    assert seen == [*marked, *awaited, "asked"]


def test_of_tensors_that_are_known_only_their_own_devices_count(seen: list[str]) -> None:
    guard = MoveGuard({"w": torch.zeros(3)})
    guard.wait_for_caller()
    assert not guard.moment
    assert seen == []


def test_states_made_in_inference_mode_are_published_and_not_watched() -> None:
    store = MemoryStore()
    with torch.inference_mode():
        state = {"w": torch.arange(100, dtype=torch.float32)}
    counted = {"v": torch.zeros(3)}
    with ww.Publisher(store, {**state, **counted}, background=inline) as pub:
        pub.publish().result()
        with torch.inference_mode():
            state["w"][7] = -1
        assert pub.publish().result().n_changed == 1
    live: dict[str, Any] = {}
    ww.Subscriber(store, live, background=inline).update()
    assert bits_of(live) == bits_of({**state, **counted})
    guard = MoveGuard({**state, **counted})
    counted["v"].add_(1)
    with pytest.raises(StateMoved, match="'v'"):
        guard.check()
