"""Views of a run: every precision follows, in step, and one view's trouble is its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import weightwire as ww
from sample_training import inline
from weightwire.diff.fp8 import fp8
from weightwire.errors import StopError, StoreUnavailable
from weightwire.events import Updated
from weightwire.store.retry import RetryPolicy
from weightwire.trainers.views import ViewPublisher, view_address

VIEWS = {"bf16": "bf16", "fp16": "fp16", "fp8": lambda state: fp8(state, block=8)}


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"q.weight": torch.randn(32, 16) * 0.02, "norm.weight": torch.ones(16)}


def step(state: dict[str, torch.Tensor]) -> None:
    state["q.weight"][::3] *= 1.01


def publisher(store: Path, state: object, **options: object) -> ViewPublisher:
    once = RetryPolicy(n_attempts=1)
    return ViewPublisher(store, state, views=VIEWS, background=inline, retry=once, **options)


def followed(store: Path, name: str) -> tuple[str, Updated]:
    updates: list[Updated] = []
    live: dict[str, np.ndarray] = {}
    address = view_address(store, name)
    with ww.Subscriber(address, live, background=inline, on_updated=updates.append) as subscriber:
        subscriber.update()
        subscriber.wait()
    return ww.digest(live), updates[-1]


def test_receivers_of_every_precision_follow_and_know_the_step(tmp_path: Path) -> None:
    state = model()
    with publisher(tmp_path, state) as published:
        for count in range(3):
            step(state)
            done = published.publish(step=10 * count)
            assert done.result().digest == ww.digest(state)
    expected = {
        "bf16": ww.cast(state, "bf16"),
        "fp16": ww.cast(state, "fp16"),
        "fp8": fp8(state, block=8),
    }
    for name, view in expected.items():
        digest, updated = followed(tmp_path, name)
        assert digest == ww.digest(view)
        assert updated.step == 20


def test_without_a_step_views_carry_the_main_runs_version(tmp_path: Path) -> None:
    state = model()
    with publisher(tmp_path, state) as published:
        for _ in range(3):
            step(state)
            published.publish()
        assert followed(tmp_path, "fp8")[1].step == published.version == 2


def test_view_that_fails_holds_nobody_up_and_its_next_publish_covers_it(tmp_path: Path) -> None:
    state = model()
    with publisher(tmp_path, state) as published:
        published.publish(step=0)
        step(state)
        broken = published._views["fp8"]
        broken._read = lambda: (_ for _ in ()).throw(StoreUnavailable("down"))  # type: ignore[method-assign]
        done = published.publish(step=1)
        assert done.result().version == 1
        assert done.views["bf16"].result().step == 1
        with pytest.raises(StoreUnavailable):
            done.views["fp8"].result()
        del broken._read  # type: ignore[method-assign]
        step(state)
        published.publish(step=2)
    digest, updated = followed(tmp_path, "fp8")
    assert digest == ww.digest(fp8(state, block=8))
    assert updated.step == 2


def test_views_need_names_that_can_stand_in_an_address(tmp_path: Path) -> None:
    with pytest.raises(StopError, match="a/b"):
        ViewPublisher(tmp_path, model(), views={"a/b": "bf16"})
    with pytest.raises(StopError, match="int4"):
        ViewPublisher(tmp_path, model(), views={"x": "int4"})
