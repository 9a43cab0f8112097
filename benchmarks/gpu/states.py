"""Language-model-like bf16 weights and their next version, made where they are measured.

fp32 masters take a step of about the learning rate and are rounded on both sides, as in training;
the learning rate is the one at which the wanted share of elements changes bits. Everything is drawn
in slices, so that making a model takes little more memory than its two versions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weightwire.codec.piece import piece_elements
from weightwire.model import dtype_named

BF16 = dtype_named("BF16")
N_BYTES = BF16.n_bytes
SLICE = 1 << 26
"""Elements drawn at once: a few fp32 arrays of 256 MiB."""
SAMPLE = 1 << 22
"""Elements the learning rate is sought on."""
SAMPLE_SEED = 1 << 30
"""Beyond the seeds of all slices: the sample is not a part of the model."""
N_BISECTIONS = 40
STD = 0.02
STEP_SPREAD = 0.3
MEAN_NORMAL = math.sqrt(2 / math.pi)
SECTOR = 32 // N_BYTES
"""Elements in a memory sector: the least a GPU reads or writes."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model: where it lies in the flat memory, and what its weights are like."""

    name: str
    start: int
    n_elements: int
    mean: float
    std: float


@dataclass(frozen=True)
class Piece:
    """A stretch of one tensor: its place in the flat memory, and its first index in the tensor."""

    start: int
    stop: int
    first_index: int


@dataclass(frozen=True)
class Model:
    """Tensors end to end in one flat memory, and the pieces they are coded in."""

    name: str
    tensors: tuple[Tensor, ...]
    pieces: tuple[Piece, ...]

    @property
    def n_elements(self) -> int:
        """All of them."""
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def n_bytes(self) -> int:
        """Of one version."""
        return N_BYTES * self.n_elements


@dataclass(frozen=True)
class Pair:
    """Two versions of a model as bits (int16), and what differs."""

    model: Model
    old: torch.Tensor
    new: torch.Tensor
    n_changed: int
    n_sectors: int
    """Memory sectors that hold a change: what activation must at least touch."""

    def pieces_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the pieces; nothing is copied."""
        return [flat[piece.start : piece.stop] for piece in self.model.pieces]

    @property
    def first_indices(self) -> list[int]:
        """Where each piece starts in its tensor."""
        return [piece.first_index for piece in self.model.pieces]


@dataclass(frozen=True)
class Sizes:
    """What a Llama's shapes follow from."""

    vocabulary: int
    hidden: int
    inner: int
    key_value: int
    n_layers: int


SIZES = {
    "llama-3.1-8b": Sizes(128256, 4096, 14336, 1024, 32),
    "tiny": Sizes(96, 64, 224, 16, 2),
}


def flat_model(n_elements: int) -> Model:
    """One tensor."""
    return _placed("flat", [("weight", (n_elements,))])


def llama_model(name: str) -> Model:
    """All tensors of a Llama, in the order of its checkpoint."""
    return _placed(name, _llama_shapes(SIZES[name]))


def _llama_shapes(sizes: Sizes) -> list[tuple[str, tuple[int, ...]]]:
    hidden, inner, key_value = sizes.hidden, sizes.inner, sizes.key_value
    layer: list[tuple[str, tuple[int, ...]]] = [
        ("input_layernorm", (hidden,)),
        ("mlp.down_proj", (hidden, inner)),
        ("mlp.gate_proj", (inner, hidden)),
        ("mlp.up_proj", (inner, hidden)),
        ("post_attention_layernorm", (hidden,)),
        ("self_attn.k_proj", (key_value, hidden)),
        ("self_attn.o_proj", (hidden, hidden)),
        ("self_attn.q_proj", (hidden, hidden)),
        ("self_attn.v_proj", (key_value, hidden)),
    ]
    layers = [(f"layers.{n}.{name}", shape) for n in range(sizes.n_layers) for name, shape in layer]
    embedding = (sizes.vocabulary, hidden)
    return [("embed_tokens", embedding), *layers, ("norm", (hidden,)), ("lm_head", embedding)]


def _placed(name: str, shapes: list[tuple[str, tuple[int, ...]]]) -> Model:
    spreads, tensors, start = random.Random(0), [], 0
    for tensor_name, shape in shapes:
        is_norm = tensor_name.endswith("norm")
        std = STD * 2 ** spreads.uniform(-1, 1)
        tensors.append(Tensor(tensor_name, start, math.prod(shape), float(is_norm), std))
        start += math.prod(shape)
    return Model(name, tuple(tensors), tuple(piece for t in tensors for piece in _pieces(t)))


def _pieces(tensor: Tensor) -> Iterator[Piece]:
    size, end = piece_elements(BF16), tensor.start + tensor.n_elements
    for start in range(tensor.start, end, size):
        yield Piece(start, min(start + size, end), start - tensor.start)


def make_pair(model: Model, old: torch.Tensor, new: torch.Tensor, density: float) -> Pair:
    """Fill two flat memories with versions in which about so many elements differ.

    The same model and density give the same bits on the same kind of device.
    """
    rate = learning_rate(model, density, old.device)
    n_changed = n_sectors = 0
    for seed, (tensor, start, stop) in enumerate(_slices(model)):
        before, after = old[start:stop], new[start:stop]
        _draw(tensor, seed, rate, before, after)
        changed = before != after
        n_changed += int(changed.sum())
        whole = changed[: len(changed) // SECTOR * SECTOR].view(-1, SECTOR)
        n_sectors += int(whole.any(1).sum())
    return Pair(model, old, new, n_changed, n_sectors)


def learning_rate(model: Model, density: float, device: torch.device) -> float:
    """The rate at which a sample of all tensors, each by its share, changes so densely."""
    low, high = math.log(1e-10), math.log(1.0)
    shares = [(t, max(1, t.n_elements * SAMPLE // model.n_elements)) for t in model.tensors]
    shares = [(t, min(n, t.n_elements)) for t, n in shares]
    masters, steps = (torch.cat(part) for part in zip(*_samples(shares, device), strict=True))
    for _ in range(N_BISECTIONS):
        middle = (low + high) / 2
        moved = (masters + math.exp(middle) * steps).bfloat16() != masters.bfloat16()
        low, high = (low, middle) if float(moved.float().mean()) > density else (middle, high)
    return math.exp(low)


def _samples(
    shares: list[tuple[Tensor, int]], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for seed, (tensor, n_elements) in enumerate(shares):
        yield _masters(tensor, SAMPLE_SEED + seed, n_elements, device)


def _slices(model: Model) -> Iterator[tuple[Tensor, int, int]]:
    for tensor in model.tensors:
        end = tensor.start + tensor.n_elements
        for start in range(tensor.start, end, SLICE):
            yield tensor, start, min(start + SLICE, end)


def _draw(
    tensor: Tensor, seed: int, rate: float, before: torch.Tensor, after: torch.Tensor
) -> None:
    masters, steps = _masters(tensor, seed, len(before), before.device)
    before.copy_(masters.bfloat16().view(torch.int16))
    after.copy_(masters.add_(steps, alpha=rate).bfloat16().view(torch.int16))


def _masters(
    tensor: Tensor, seed: int, n_elements: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and for each a step of about one up or down."""
    source = torch.Generator(device).manual_seed(seed)
    masters = torch.randn(n_elements, generator=source, device=device)
    masters.mul_(tensor.std).add_(tensor.mean)
    noise = torch.randn(n_elements, generator=source, device=device)
    sizes = noise.abs().sub_(MEAN_NORMAL).mul_(STEP_SPREAD).add_(1.0)
    return masters, sizes.copysign_(noise)
