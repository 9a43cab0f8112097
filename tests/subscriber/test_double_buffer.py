from __future__ import annotations

import numpy as np
import pytest
import torch

from sample_training import bits_of, inline, train, weights, zeros_like
from weightwire.apply.swap import SwapTarget
from weightwire.apply.targets import Ready
from weightwire.errors import TargetMismatch
from weightwire.publisher import Publisher
from weightwire.store.memory import MemoryStore
from weightwire.subscriber import State, Subscriber


def test_versions_change_places_and_every_one_is_exact() -> None:
    store, state = MemoryStore(), weights()
    live = zeros_like(state)
    with Publisher(store, state, background=inline) as pub:
        pub.publish().result()
        sub = Subscriber(store, live, double_buffer=True, background=inline)
        sub.update()
        for seed in range(6):
            train(state, seed)
            pub.publish().result()
            sub.stage()
            in_use = bits_of(live)
            assert sub.state is State.STAGED
            assert bits_of(live) == in_use
            sub.activate()
            assert bits_of(live) == bits_of(state)


def test_module_keeps_its_parameters_and_gets_other_memory() -> None:
    store, model, copy = MemoryStore(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    weight = copy.weight
    with Publisher(store, model, background=inline) as pub, torch.no_grad():
        pub.publish().result()
        sub = Subscriber(store, copy, double_buffer=True, background=inline)
        for step in range(4):
            sub.update()
            model.weight[step] += 1
            model.bias[step] = float("nan")
            pub.publish().result()
        sub.update()
    assert copy.weight is weight
    assert bits_of(copy) == bits_of(model)


def test_staged_version_that_was_dropped_leaves_nothing_behind() -> None:
    store, state = MemoryStore(), weights()
    live = zeros_like(state)
    with Publisher(store, state, background=inline) as pub:
        pub.publish().result()
        sub = Subscriber(store, live, double_buffer=True, background=inline)
        sub.update()
        for seed in range(3):
            train(state, seed)
            pub.publish().result()
            sub.stage()
        sub.abort()
        train(state, 9)
        pub.publish().result()
        sub.update()
    assert bits_of(live) == bits_of(state)


def test_tensors_may_come_and_go() -> None:
    store, state = MemoryStore(), weights()
    live = zeros_like(state)
    with Publisher(store, state, background=inline) as pub:
        pub.publish().result()
        sub = Subscriber(store, live, double_buffer=True, background=inline)
        sub.update()
        state["new"] = np.arange(4, dtype=np.int16)
        del state["norm"]
        pub.publish().result()
        sub.update()
        assert bits_of(live) == bits_of(state)
        train(state, 1)
        pub.publish().result()
        sub.update()
    assert bits_of(live) == bits_of(state)


class HalfWay(SwapTarget):
    """Dies in the middle of an exchange, once."""

    n_left = -1

    def _put(self, live: object, name: str, tensor: object) -> None:
        self.n_left -= 1
        if self.n_left == 0:
            raise RuntimeError("interrupted")
        super()._put(live, name, tensor)


@pytest.mark.parametrize("n_puts", [1, 2, 3, 4, 5])
def test_interrupted_exchange_is_dirty_and_can_be_repeated(n_puts: int) -> None:
    store, state = MemoryStore(), weights()
    live = zeros_like(state)
    with Publisher(store, state, background=inline) as pub:
        pub.publish().result()
        target = HalfWay(live)
        sub = Subscriber(store, target, background=inline)
        sub.update()
        train(state, 1)
        pub.publish().result()
        sub.stage()
        target.n_left = n_puts
        with pytest.raises(RuntimeError):
            sub.activate()
        assert sub.is_dirty
        sub.activate()
        assert bits_of(live) == bits_of(state)
        for seed in (2, 3):
            train(state, seed)
            pub.publish().result()
            sub.update()
            assert bits_of(live) == bits_of(state)


def test_memory_aside_that_goes_bad_never_comes_into_use() -> None:
    store, state = MemoryStore(), weights()
    live = zeros_like(state)
    with Publisher(store, state, background=inline) as pub:
        pub.publish().result()
        target = SwapTarget(live)
        sub = Subscriber(store, target, background=inline)
        sub.update()
        for seed in range(2):
            train(state, seed)
            pub.publish().result()
            sub.update()
        target._back["norm"].view(np.uint16)[3] ^= 1
        before = bits_of(live)
        train(state, 5)
        pub.publish().result()
        seen: list[dict[str, bytes]] = []
        activate = target.activate

        def spy(ready: Ready) -> None:
            seen.append(bits_of(live))
            activate(ready)

        target.activate = spy  # type: ignore[method-assign]
        with pytest.raises(TargetMismatch, match="digest"):
            sub.update()
        assert bits_of(live) == before
        sub.update()
    assert bits_of(live) == bits_of(state)
    assert seen == [before]
