"""Weights that come by once are published like weights that stay, and hold no more than a few in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import weightwire as ww
from weightwire.diff.cast import cast
from weightwire.diff.memory import open_state
from weightwire.errors import DuplicateTensor, StateMoved
from weightwire.model import dtype_named
from weightwire.store.memory import MemoryStore
from weightwire.trainers.tensor_stream import (
    PassingState,
    SpooledState,
    Streamed,
    as_streamed,
    streamed,
)

BF16 = dtype_named("BF16")


def make_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(64, 8, generator=source),
        "scale": torch.randn((), generator=source),
        "half": torch.randn(5, generator=source).to(torch.float16),
        "turned": torch.randn(8, 16, generator=source).T,
        "count": torch.arange(7),
    }


def as_stream(weights: Iterable[tuple[str, Any]]) -> Iterator[Streamed]:
    return streamed(weights, lambda name, tensor: [(name, tensor)], lambda _: BF16)


def rounded(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in weights.items()}


def test_spooled_stream_is_the_rounded_state() -> None:
    weights = make_weights()
    spooled = SpooledState(as_stream(weights.items()))
    assert ww.digest(spooled) == ww.digest(rounded(weights))
    spooled.close()


def test_rounding_is_that_of_cast() -> None:
    weights = make_weights()
    with_nan = {"w": torch.tensor([float("nan"), -float("inf"), 1e-45, -0.0, 3.0e38])}
    for state in (weights, with_nan):
        reader = open_state(cast(state, "bf16"))
        for name, tensor in state.items():
            found = as_streamed(name, tensor, BF16)
            assert found.spec == reader.specs[name]
            assert found.bits.tobytes() == reader.read(name, 0, tensor.numel()).tobytes()


def test_passing_stream_is_published_as_one_that_stays() -> None:
    store = MemoryStore()
    first, second = make_weights(0), make_weights(1)
    spooled = SpooledState(as_stream(first.items()))
    state: dict[str, Any] = {"reader": spooled}
    with ww.Publisher(store, lambda: state["reader"]) as publisher, ThreadPoolExecutor(1) as pool:
        publisher.publish().result()
        passing = PassingState(spooled.specs)
        state["reader"] = passing
        reading = pool.submit(publisher.publish)
        passing.feed(as_stream(second.items()))
        done = reading.result().result()
    spooled.close()
    assert done.version == 1
    assert done.digest == ww.digest(rounded(second))
    assert not passing.has_more


def test_few_tensors_are_alive_while_the_stream_passes() -> None:
    alive: set[int] = set()
    most = 0

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for index, name in enumerate(specs):
            memory = np.ones(100, np.int16)
            alive.add(index)
            weakref.finalize(memory, alive.discard, index)
            most = max(most, len(alive))
            tensor = torch.from_numpy(memory[:]).view(torch.bfloat16)
            del memory
            yield name, tensor
            del tensor

    names = {f"t{index}": torch.ones(100, dtype=torch.bfloat16) for index in range(50)}
    specs = open_state(names).specs
    passing = PassingState(specs)
    with ThreadPoolExecutor(1) as pool:
        feeding = pool.submit(passing.feed, as_stream(gather()))
        for name in specs:
            assert len(passing.read(name, 0, 100)) == 100
        passing.abandon()
        feeding.result()
    assert 1 <= most <= 4


def test_other_names_than_expected_are_refused() -> None:
    weights = make_weights()
    passing = PassingState(open_state(rounded(weights)).specs)
    with ThreadPoolExecutor(1) as pool:
        feeding = pool.submit(passing.feed, as_stream({"new": torch.ones(3), **weights}.items()))
        with pytest.raises(StateMoved, match=r"'new' \(3,\) came where 'embed' \(64, 8\)"):
            passing.read("embed", 0, 1)
        passing.abandon()
        feeding.result()
    assert passing.has_more


def test_stream_that_ends_early_or_breaks_is_refused() -> None:
    weights = make_weights()
    specs = open_state(rounded(weights)).specs

    def breaks() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", weights["embed"]
        raise RuntimeError("a rank died")

    with ThreadPoolExecutor(1) as pool:
        short = PassingState(specs)
        feeding = pool.submit(short.feed, as_stream([("embed", weights["embed"])]))
        assert len(short.read("embed", 0, 512)) == 512
        with pytest.raises(StateMoved, match="'scale' did not come"):
            short.read("scale", 0, 1)
        feeding.result()
        broken = PassingState(specs)
        feeding = pool.submit(broken.feed, as_stream(breaks()))
        broken.read("embed", 0, 512)
        with pytest.raises(StateMoved, match="a rank died"):
            broken.read("scale", 0, 1)
        with pytest.raises(StateMoved, match="a rank died"):
            broken.read("half", 0, 1)  # a diff reads ahead: it must not wait for ever
        with pytest.raises(RuntimeError, match="a rank died"):
            feeding.result()


def test_tensor_that_has_passed_cannot_be_read_again() -> None:
    weights = make_weights()
    passing = PassingState(open_state(rounded(weights)).specs)
    with ThreadPoolExecutor(1) as pool:
        feeding = pool.submit(passing.feed, as_stream(weights.items()))
        passing.read("embed", 0, 512)
        passing.read("scale", 0, 1)
        with pytest.raises(StateMoved, match=r"'half' .* came where 'embed'"):
            passing.read("embed", 0, 512)
        with pytest.raises(StateMoved, match="'count' did not come"):
            passing.read("count", 0, 7)
        passing.abandon()
        feeding.result()


def test_name_that_comes_twice_is_refused() -> None:
    pairs = [("w", torch.ones(3)), ("w", torch.ones(3))]
    with pytest.raises(DuplicateTensor, match="'w' came twice"):
        SpooledState(as_stream(pairs))
