"""Wide masters published narrow: exactly what casting the whole model first would have given."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import weightwire as ww
from sample_training import bits_of, inline
from weightwire import limits
from weightwire.checkpoint import Checkpoint
from weightwire.checkpoint.writer import write_state
from weightwire.diff.memory import open_state
from weightwire.errors import StateMoved, StopError
from weightwire.store.memory import MemoryStore

TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def every_kind_of_float(n: int, seed: int = 0) -> torch.Tensor:
    """Random bits: NaNs with payloads, infinities, subnormals, both zeros, halfway cases."""
    bits = np.random.default_rng(seed).integers(0, 1 << 32, n, dtype=np.uint32)
    bits[::5] = (bits[::5] & 0xFFFF0000) | 0x8000  # exactly between two bf16 values
    bits[:4] = (0, 1 << 31, 0x7F800000, 0x7F7FFFFF)
    return torch.from_numpy(bits.view(np.float32).copy())


class Tied(nn.Module):
    """A model with what real ones have: a tie, a buffer of integers, a layer that is narrow already."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(50, 16)
        self.body = nn.Linear(16, 16)
        self.narrow = nn.Linear(16, 4, dtype=torch.float16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("n_seen", torch.tensor(7))

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.body(self.embed(ids))))


def cast_for_good(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The whole model cast first, with its tie and its fp16 layer kept."""
    state = {
        name: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor
        for name, tensor in model.state_dict().items()
    }
    state["head.weight"] = state["embed.weight"]
    return state


@pytest.mark.parametrize("name", TORCH_TYPES)
def test_casting_while_reading_gives_the_bits_torch_gives(name: str) -> None:
    tensor = every_kind_of_float(100_003)
    whole = tensor.to(TORCH_TYPES[name])
    read = open_state(ww.cast({"x": tensor}, name))
    parts = [read.read("x", start, min(start + 999, 100_003)) for start in range(0, 100_003, 999)]
    assert b"".join(part.tobytes() for part in parts) == whole.view(torch.int16).numpy().tobytes()
    assert ww.digest(ww.cast({"x": tensor}, TORCH_TYPES[name])) == ww.digest({"x": whole})


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)])
def test_numpy_arrays_are_rounded_as_their_own_library_rounds(name: str, dtype: Any) -> None:
    array = every_kind_of_float(5_000).numpy().reshape(50, 100).T
    with np.errstate(over="ignore", invalid="ignore"):
        assert ww.digest(ww.cast({"x": array}, name)) == ww.digest({"x": array.astype(dtype)})


@pytest.mark.parametrize("name", TORCH_TYPES)
def test_ties_integers_and_narrow_tensors_survive_a_cast(name: str) -> None:
    model = Tied()
    live = open_state(ww.cast(model, name, only=lambda each: not each.startswith("narrow")))
    assert live.ties == {"head.weight": "embed.weight"}
    assert ww.digest(live) == ww.digest(cast_for_good(model, TORCH_TYPES[name]))


def test_floats_of_the_same_width_are_cast_and_narrower_ones_are_not() -> None:
    state = {
        "half": torch.ones(3, dtype=torch.float16),
        "eight": torch.ones(3).to(torch.float8_e4m3fn),
    }
    specs = open_state(ww.cast(state, "bf16")).specs
    assert [specs[name].dtype.name for name in state] == ["BF16", "F8_E4M3"]


def test_only_the_tensors_that_are_asked_for_are_cast() -> None:
    state = {"w": torch.ones(4), "router": torch.ones(4)}
    specs = open_state(ww.cast(state, "bf16", only=lambda name: name != "router")).specs
    assert [spec.dtype.name for spec in specs.values()] == ["BF16", "F32"]


def test_what_is_made_anew_and_what_lies_on_disk_can_be_cast_too(tmp_path: Path) -> None:
    tensor = torch.linspace(-1, 1, 1_000)
    expected = ww.digest({"x": tensor.to(torch.bfloat16)})
    assert ww.digest(ww.cast(lambda: {"x": tensor}, "bf16")) == expected
    wide = open_state({"x": tensor})
    write_state(tmp_path / "model.safetensors", dict(wide.specs), wide.read)
    with Checkpoint.open(tmp_path) as checkpoint:
        assert ww.digest(ww.cast(checkpoint, "bf16")) == expected


def test_a_type_that_nobody_can_cast_to_is_refused() -> None:
    with pytest.raises(StopError, match=r"int4.*bf16"):
        ww.cast({}, "int4")


def test_several_optimizer_steps_between_publishes_are_one_diff_of_the_cast_weights() -> None:
    store, model, engine = MemoryStore(), Tied(), Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    live = {name: tensor.clone() for name, tensor in cast_for_good(engine, torch.bfloat16).items()}
    live["head.weight"] = live["embed.weight"]
    only = lambda name: not name.startswith("narrow")  # noqa: E731
    with ww.Publisher(store, ww.cast(model, "bf16", only=only), background=inline) as publisher:
        subscriber = ww.Subscriber(store, live, background=inline) if publisher.publish() else None
        for _ in range(3):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.arange(50)).square().mean().backward()
                optimizer.step()
            done = publisher.publish().result()
            assert subscriber is not None
            subscriber.update()
            expected = cast_for_good(model, torch.bfloat16)
            assert done.digest == ww.digest(live) == ww.digest(expected)
            assert done.n_changed > 0
    assert bits_of(live) == bits_of(expected)


def test_a_step_while_a_cast_state_is_read_is_noticed() -> None:
    state = {"x": torch.ones(1_000)}

    def move(name: str) -> bool:
        state["x"].add_(1)  # the optimizer, too early
        return True

    moving = ww.cast(state, "bf16", only=move)
    with ww.Publisher(MemoryStore(), moving, background=inline) as publisher:
        done = publisher.publish()
    with pytest.raises(StateMoved, match="'x'"):
        done.result()


def test_a_cast_needs_room_for_a_few_pieces_and_not_for_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "PIECE_ELEMENTS", 1 << 14)
    state = {"x": np.linspace(-1, 1, 1 << 20, dtype=np.float32)}
    tracemalloc.start()
    try:
        ww.digest(ww.cast(state, "bf16"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < (1 << 20) * 2 / 8
