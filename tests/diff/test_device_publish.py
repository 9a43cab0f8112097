"""A trainer whose weights are on a device, and receivers that never hear of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from sample_device_states import bits_of, drawn, on_host, sample, train

import weightwire as ww
from hand_clock import HandClock
from sample_training import inline
from weightwire.diff.device_room import DeviceBaseline
from weightwire.diff.held import HeldOnDevice
from weightwire.errors import StateMoved, StoreUnavailable
from weightwire.store.extras import AnchorPolicy
from weightwire.store.memory import MemoryStore
from weightwire.store.retry import RetryPolicy

pytest.importorskip("triton", reason="GPU kernels need triton")

from weightwire.codec import device_pieces
from weightwire.kernels.triton import scatter

ONCE = RetryPolicy(n_attempts=1)


class Unsteady(MemoryStore):
    """Loses what it is told to lose."""

    def __init__(self) -> None:
        super().__init__()
        self.loses = ""

    def put(self, key: str, data: Any) -> None:
        self._lose(key)
        super().put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        done = super().create(key, data)
        self._lose(key)
        return done

    def _lose(self, key: str) -> None:
        if self.loses and self.loses in key:
            self.loses = ""
            raise StoreUnavailable("the reply was lost")


def publisher(store: Any, state: Any, **options: Any) -> ww.Publisher:
    return ww.Publisher(
        store, state, background=inline, retry=ONCE, n_threads=1, **{"codec": "plain", **options}
    )


def keys(store: Any, prefix: str = "") -> list[str]:
    return [each.key for each in store.list(prefix)]


def received(store: Any, live: dict[str, np.ndarray]) -> dict[str, bytes]:
    ww.Subscriber(store, live, background=inline).update()
    return bits_of(live)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of the device coder's calls: proof that it was asked at all."""
    sizes: list[int] = []
    encode = device_pieces.encode_pieces

    def counted(olds: Any, *others: Any, **options: Any) -> Any:
        sizes.append(len(olds))
        return encode(olds, *others, **options)

    monkeypatch.setattr(device_pieces, "encode_pieces", counted)
    yield sizes
    assert sizes


@pytest.mark.parametrize("codec", [pytest.param("compact", marks=pytest.mark.long), "plain"])
def test_receivers_on_the_host_follow_a_trainer_on_a_device(
    codec: str, device: torch.device, encoded: list[int]
) -> None:
    store, state, live = MemoryStore(), sample(device), {}
    state["tied"] = state["mlp"]
    with publisher(store, state, codec=codec) as pub:
        pub.publish().result()
        subscriber = ww.Subscriber(store, live, background=inline)
        for seed in range(3):
            subscriber.update()
            assert bits_of(live) == bits_of(state)
            train({name: each for name, each in state.items() if name != "tied"}, seed)
            done = pub.publish().result()
            assert done.version == seed + 1
        subscriber.update()
    assert bits_of(live) == bits_of(state)
    assert encoded == [3, 2] * 3


@pytest.mark.long
def test_the_store_is_the_same_wherever_state_and_baseline_lie(
    device: torch.device,
) -> None:
    stores: list[dict[str, bytes]] = []
    for option in ("host", None, True, False, 400):
        store, state = MemoryStore(), sample(device)
        live = on_host(state) if option == "host" else state
        options = {} if option == "host" else {"device_baseline": option}
        with publisher(store, live, clock=HandClock(), **options) as pub:
            pub.publish().result()
            for seed in range(2):
                train(state, seed)
                if option == "host":
                    for name, array in on_host(state).items():
                        live[name][...] = array
                pub.publish().result()
        stores.append({key: store.read(key) for key in keys(store)})
    assert all(each == stores[0] for each in stores[1:])
    assert len(stores[0]) > 6


@pytest.mark.parametrize("loses", ["patches", "-commit"])
def test_what_failed_is_published_with_the_next_version(
    loses: str, device: torch.device, encoded: list[int]
) -> None:
    store, state = Unsteady(), sample(device)
    with publisher(store, state) as pub:
        pub.publish().result()
        train(state, 1)
        store.loses = loses
        with pytest.raises(ww.errors.RetryError):
            pub.publish().result()
        train(state, 2)
        pub.publish().result()
    assert received(store, {}) == bits_of(state)


@pytest.mark.long
def test_an_advance_that_fails_is_made_good_by_the_next_publish(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, state = MemoryStore(), sample(device)
    write = scatter.write

    def failing(prepared: Any) -> None:
        write(prepared)
        raise OSError("the device was taken away for a moment")

    policy = AnchorPolicy(chain_share=99.0)
    with publisher(store, state, codec="compact", anchors=policy) as pub:
        pub.publish().result()
        train(state, 1)
        with monkeypatch.context() as patch:
            patch.setattr(scatter, "write", failing)
            with pytest.raises(OSError, match="taken away"):
                pub.publish().result()
        expected = bits_of(state)
        assert pub.version == 0
        assert received(store, {}) == expected
        train(state, 2)
        assert pub.publish().result().version == 2
    assert len({key.split("/")[1] for key in keys(store, "anchors/")}) == 1
    assert received(store, {}) == bits_of(state)


def test_a_publisher_that_takes_over_joins_its_state_on_the_device(
    device: torch.device, encoded: list[int]
) -> None:
    store, state = MemoryStore(), sample(device)
    with publisher(store, state) as pub:
        pub.publish().result()
    train(state, 1)
    with publisher(store, state) as pub:
        assert pub.publish().result().n_changed > 0
        assert isinstance(pub._baseline._held["mlp"], HeldOnDevice)
    assert encoded == [3, 2]
    assert received(store, {}) == bits_of(state)


@pytest.mark.parametrize("device_baseline", [True, False])
def test_anchors_and_skip_patches_are_made_from_what_the_device_holds(
    device_baseline: DeviceBaseline, device: torch.device
) -> None:
    store, state = MemoryStore(), {"w": drawn((200,)).to(device)}
    policy = AnchorPolicy(every=2)
    with publisher(
        store, state, skips=(2,), anchors=policy, device_baseline=device_baseline
    ) as pub:
        versions = []
        for seed in range(4):
            pub.publish().result()
            versions.append(bits_of(state))
            train(state, seed)
    log = " ".join(keys(store, "log/"))
    assert "000000000002-anchor-" in log
    assert "000000000002-skip-000000000000-" in log
    assert received(store, {}) == versions[-1]


def test_validating_reads_the_device_back(device: torch.device, encoded: list[int]) -> None:
    store, state = MemoryStore(), sample(device)
    with publisher(store, state, mode="validate") as pub:
        pub.publish().result()
        train(state, 1)
        assert pub.publish().result().is_validated
    assert received(store, {}) == bits_of(state)


def test_observing_counts_what_changes_on_the_device(
    device: torch.device, encoded: list[int]
) -> None:
    state = {"w": drawn((200,)).to(device)}
    with publisher("unused", state, mode="observe") as pub:
        assert pub.publish().result().n_changed == 0
        train(state, 1, share=0.1)
        assert pub.publish().result().n_changed == 20
        assert pub.publish().result().n_changed == 0


def test_masters_on_a_device_are_published_narrow(device: torch.device, encoded: list[int]) -> None:
    store, masters = MemoryStore(), {"w": drawn((30, 10), "fp32").to(device)}
    with publisher(store, ww.cast(masters, "bf16")) as pub:
        pub.publish().result()
        masters["w"] *= 1.01
        pub.publish().result()
    assert received(store, {}) == bits_of({"w": masters["w"].to(torch.bfloat16)})


def test_a_write_while_the_device_is_read_is_noticed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, state = MemoryStore(), {"w": drawn((200,)).to(device)}
    encode = device_pieces.encode_pieces

    def early(*arguments: Any, **options: Any) -> Any:
        with torch.no_grad():
            state["w"].add_(1)
        return encode(*arguments, **options)

    with publisher(store, state) as pub:
        pub.publish().result()
        monkeypatch.setattr(device_pieces, "encode_pieces", early)
        with pytest.raises(StateMoved, match="'w'"):
            pub.publish().result()


@pytest.mark.parametrize("device_baseline", [True, False])
def test_reading_and_committing_in_threads_gives_the_same_bits(
    device_baseline: DeviceBaseline, device: torch.device
) -> None:
    store, state = MemoryStore(), sample(device)
    with ww.Publisher(
        store, state, codec="plain", overlap=True, device_baseline=device_baseline
    ) as pub:
        for seed in range(3):
            train(state, seed)
            done = pub.publish()
            pub.wait_until_read()
        done.result()
    assert received(store, {}) == bits_of(state)


def test_a_damaged_baseline_on_the_device_is_found_and_replaced(device: torch.device) -> None:
    store, state = MemoryStore(), sample(device)
    with publisher(store, state) as pub:
        pub.publish().result()
        held = pub._baseline._held["mlp"]
        assert isinstance(held, HeldOnDevice)
        held.tensor[3] ^= 1
        train(state, 1)
        pub.publish().result()
    assert len({key.split("/")[1] for key in keys(store, "anchors/")}) == 2
    assert received(store, {}) == bits_of(state)
