"""Damage to an engine's memory is found wherever it is: in every run of a tensor, and in every copy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="engines hold torch tensors")

import numpy as np  # noqa: E402
from sample_devices import bits_of  # noqa: E402
from torch import nn  # noqa: E402

from sample_training import inline  # noqa: E402
from weightwire.apply import needs  # noqa: E402
from weightwire.apply.layouts.target import LayoutTarget  # noqa: E402
from weightwire.publisher import Publisher  # noqa: E402
from weightwire.store.memory import MemoryStore  # noqa: E402
from weightwire.subscriber import Subscriber  # noqa: E402

N_ROWS, N_COLUMNS = 16, 12


class Fused(nn.Module):
    """Rank 0 of 2: of a tensor that is fused in the checkpoint it holds the first rows of each half."""

    def __init__(self) -> None:
        super().__init__()
        zeros = torch.zeros(N_ROWS, N_COLUMNS, dtype=torch.bfloat16)
        self.both = nn.Parameter(zeros, requires_grad=False)

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        n = N_ROWS // 2
        for _, tensor in pairs:
            self.both.data[:n].copy_(tensor[:n])
            self.both.data[n:].copy_(tensor[N_ROWS : N_ROWS + n])


class Copied(nn.Module):
    """The same tensor twice: once wider or transposed, once as it is."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        shape = (N_COLUMNS, 2 * N_ROWS) if kind == "transposed" else (2 * N_ROWS, N_COLUMNS)
        dtype = torch.float32 if kind == "wider" else torch.bfloat16
        self.first = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        plain = torch.zeros(2 * N_ROWS, N_COLUMNS, dtype=torch.bfloat16)
        self.second = nn.Parameter(plain, requires_grad=False)

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in pairs:
            self.first.data.copy_(tensor.t() if self.kind == "transposed" else tensor)
            self.second.data.copy_(tensor)


class Training:
    """One matrix in bf16, published from the host."""

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(3)
        drawn = torch.randn(2 * N_ROWS, N_COLUMNS, generator=source) * 0.02
        self.weights = drawn.to(torch.bfloat16)
        self.store, self.n_steps = MemoryStore(), 0
        self.publisher = Publisher(self.store, {"w": self._array()}, background=inline)
        self.publisher.publish().result()

    def _array(self) -> np.ndarray:
        import ml_dtypes

        return self.weights.view(torch.int16).numpy().view(ml_dtypes.bfloat16)

    def step(self) -> None:
        self.n_steps += 1
        self.weights.view(-1).view(torch.int16)[self.n_steps :: 37] += 1
        self.publisher.publish().result()


CASES = [
    ("fused", "both", 3 * N_COLUMNS + 1),
    ("fused", "both", (N_ROWS // 2 + 3) * N_COLUMNS + 1),
    ("wider", "first", 5),
    ("wider", "second", 5),
    ("transposed", "first", 5),
    ("transposed", "second", 5),
]


def make(kind: str) -> nn.Module:
    return Fused() if kind == "fused" else Copied(kind)


def heals(kind: str, parameter: str, place: int, at: torch.device) -> int:
    """How often damage was found; afterwards everything is right."""
    training, engine = Training(), make(kind).to(at)
    target = LayoutTarget(engine.load_weights, engine.named_parameters)
    subscriber = Subscriber(training.store, target, background=inline, scrub_versions=1)
    subscriber.update()
    training.step()
    subscriber.update()
    getattr(engine, parameter).data.view(-1)[place] = 42.0
    training.step()
    subscriber.update()
    fresh = make(kind)
    fresh.load_weights([("w", training.weights)])
    assert bits_of(dict(engine.named_parameters())) == bits_of(dict(fresh.named_parameters()))
    return subscriber.n_heals


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank keeps is rounded out to little."""
    monkeypatch.setattr(needs, "GRAIN", 1 << 10)
    monkeypatch.setattr("weightwire.codec.piece.choose_chunk_log2", lambda _: 10)


@pytest.mark.parametrize(("kind", "parameter", "place"), CASES)
def test_damage_in_any_part_is_found_on_the_host(kind: str, parameter: str, place: int) -> None:
    assert heals(kind, parameter, place, torch.device("cpu")) == 1


@pytest.mark.parametrize(("kind", "parameter", "place"), CASES)
def test_damage_in_any_part_is_found_on_a_device(
    kind: str, parameter: str, place: int, device: torch.device
) -> None:
    assert heals(kind, parameter, place, device) == 1


WITHOUT_TRITON = """
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'")


sys.meta_path.insert(0, Refuse())
import torch
from test_layout_damage import heals

print(heals("fused", "both", 1, torch.device("cpu")))
"""


def test_engine_on_a_cpu_needs_no_triton() -> None:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent)])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr
