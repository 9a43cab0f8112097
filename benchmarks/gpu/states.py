"""Language-model-like weights and their next version, made where they are measured.

fp32 masters take a step of about the learning rate and are rounded on both sides, as in training;
the learning rate is the one at which the wanted share of elements changes bits. fp32 versions are the
masters themselves, which change at any rate: of them only a share takes a step. Everything is drawn
in slices, so that making a model takes little more memory than its two versions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from elements import BF16, ElementType

from weightwire.codec.piece import piece_elements

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
MASTER_RATE = 1e-6
"""The learning rate where versions are the masters: a usual one of RL."""


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
    element: ElementType

    @property
    def n_elements(self) -> int:
        """All of them."""
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def n_bytes(self) -> int:
        """Of one version."""
        return self.element.n_bytes * self.n_elements


@dataclass(frozen=True)
class Pair:
    """Two versions of a model as bits, and what differs."""

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
class Step:
    """What makes the next version: how far an element goes, and how many go at all."""

    rate: float
    share: float


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


def flat_model(n_elements: int, element: ElementType = BF16) -> Model:
    """One tensor."""
    return _placed("flat", [("weight", (n_elements,))], element)


def llama_model(name: str, element: ElementType = BF16) -> Model:
    """All tensors of a Llama, in the order of its checkpoint."""
    return _placed(name, _llama_shapes(SIZES[name]), element)


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


def _placed(name: str, shapes: list[tuple[str, tuple[int, ...]]], element: ElementType) -> Model:
    spreads, tensors, start = random.Random(0), [], 0
    for tensor_name, shape in shapes:
        is_norm = tensor_name.endswith("norm")
        std = STD * 2 ** spreads.uniform(-1, 1)
        tensors.append(Tensor(tensor_name, start, math.prod(shape), float(is_norm), std))
        start += math.prod(shape)
    pieces = tuple(piece for tensor in tensors for piece in _pieces(tensor, element))
    return Model(name, tuple(tensors), pieces, element)


def _pieces(tensor: Tensor, element: ElementType) -> Iterator[Piece]:
    size, end = piece_elements(element.dtype), tensor.start + tensor.n_elements
    for start in range(tensor.start, end, size):
        yield Piece(start, min(start + size, end), start - tensor.start)


def make_pair(model: Model, old: torch.Tensor, new: torch.Tensor, density: float) -> Pair:
    """Fill two flat memories with versions in which about so many elements differ.

    The same model and density give the same bits on the same kind of device.
    """
    step, element = _step(model, density, old.device), model.element
    n_changed = n_sectors = 0
    for seed, (tensor, start, stop) in enumerate(_slices(model)):
        before, after = old[start:stop], new[start:stop]
        masters, steps = _masters(tensor, seed, len(before), old.device, step.share)
        before.copy_(element.rounded(masters))
        after.copy_(element.rounded(masters.add_(steps, alpha=step.rate)))
        changed = before != after
        n_changed += int(changed.sum())
        n_sectors += _count_sectors(changed, element.n_sector_elements)
    return Pair(model, old, new, n_changed, n_sectors)


def _count_sectors(changed: torch.Tensor, size: int) -> int:
    """How many whole sectors of so many elements hold a change."""
    whole = changed[: len(changed) // size * size].view(-1, size)
    return int(whole.any(1).sum())


def _step(model: Model, density: float, device: torch.device) -> Step:
    """The step after which about so many elements have other bits."""
    if model.element.holds_masters:
        return Step(MASTER_RATE, share=density)
    return Step(learning_rate(model, density, device), share=1.0)


def learning_rate(model: Model, density: float, device: torch.device) -> float:
    """The rate at which a sample of all tensors, each by its share, changes so densely."""
    low, high = math.log(1e-10), math.log(1.0)
    shares = [(t, max(1, t.n_elements * SAMPLE // model.n_elements)) for t in model.tensors]
    shares = [(t, min(n, t.n_elements)) for t, n in shares]
    masters, steps = (torch.cat(part) for part in zip(*_samples(shares, device), strict=True))
    rounded, before = model.element.rounded, model.element.rounded(masters)
    for _ in range(N_BISECTIONS):
        middle = (low + high) / 2
        moved = rounded(masters + math.exp(middle) * steps) != before
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


def _masters(
    tensor: Tensor, seed: int, n_elements: int, device: torch.device, share: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and for a share of them a step of about one up or down."""
    source = torch.Generator(device).manual_seed(seed)
    masters = torch.randn(n_elements, generator=source, device=device)
    masters.mul_(tensor.std).add_(tensor.mean)
    noise = torch.randn(n_elements, generator=source, device=device)
    sizes = noise.abs().sub_(MEAN_NORMAL).mul_(STEP_SPREAD).add_(1.0)
    steps = sizes.copysign_(noise)
    if share < 1.0:
        steps.mul_(torch.rand(n_elements, generator=source, device=device) < share)
    return masters, steps
