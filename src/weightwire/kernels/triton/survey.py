"""Counting samples of many pieces at once: what their models are made from.

Three launches serve all pieces. A sample of a piece is at most 64 *runs* of 4096 elements, and a
program takes one run. The counts of all pieces lie in one memory, so that they are cleared by one
operation and reach the host by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weightwire.errors import StopError
from weightwire.kernels.contract import N_CLASSES, N_TOKENS, OUTLIERS, WHOLE_SAMPLE
from weightwire.kernels.triton.downloads import to_host
from weightwire.kernels.triton.launch import memory_at
from weightwire.kernels.triton.memories import Memories
from weightwire.kernels.triton.uploads import send_tables
from weightwire.model import DType

_N_RUNS = 64
_RUN = WHOLE_SAMPLE // _N_RUNS
_MIN_BINS = 64
"""A histogram narrower than the widest warp gains nothing."""

_RUN_LENGTH = tl.constexpr(_RUN)
_LAST_RUN = tl.constexpr(_N_RUNS - 1)
_WHOLE = tl.constexpr(WHOLE_SAMPLE)
_CLASSES = tl.constexpr(N_CLASSES)
_TOKENS = tl.constexpr(N_TOKENS)
_OUTLIER = tl.constexpr(OUTLIERS)

_SIGNED = {1: tl.int8, 2: tl.int16, 4: tl.int32}
"""Elements are loaded with their sign, which then fills 32 bits: one arithmetic for all widths."""


@dataclass(frozen=True)
class SurveyBatch:
    """What samples of many pieces of one element type look like; all counts are int32."""

    counts: torch.Tensor
    """All of them, in one memory."""
    n_pieces: int
    n_keys: int

    @property
    def n_changed(self) -> torch.Tensor:
        """[pieces, classes, tokens]: elements that changed."""
        return self._part(0, N_CLASSES * N_TOKENS).view(-1, N_CLASSES, N_TOKENS)

    @property
    def n_by_class(self) -> torch.Tensor:
        """[pieces, classes]: elements."""
        return self._part(N_CLASSES * N_TOKENS, N_CLASSES)

    @property
    def n_by_key(self) -> torch.Tensor:
        """[pieces, keys]: elements."""
        return self._part(N_CLASSES * (N_TOKENS + 1), self.n_keys)

    @property
    def base_key(self) -> torch.Tensor:
        """[pieces]: the lowest key of the window of classes."""
        return self._part(N_CLASSES * (N_TOKENS + 1) + self.n_keys, 1).view(-1)

    def to_host(self) -> SurveyBatch:
        """The same in the host's memory: one transfer, which this waits for."""
        return self.on_host(to_host(self.counts))

    def on_host(self, counts: npt.NDArray[np.int32]) -> SurveyBatch:
        """The same over counts that have arrived there."""
        return SurveyBatch(torch.from_numpy(counts), self.n_pieces, self.n_keys)

    def _part(self, n_before: int, width: int) -> torch.Tensor:
        """The counts that follow so many others of each piece."""
        first = self.n_pieces * n_before
        return self.counts[first : first + self.n_pieces * width].view(-1, width)


def survey_all(
    olds: Sequence[torch.Tensor], news: Sequence[torch.Tensor], dtype: DType
) -> SurveyBatch:
    """Count the samples of all pieces, given as flat memory before and after.

    Raises:
        StopError: as ``survey_memories``, or memories that do not match.
    """
    return survey_memories(Memories(olds, news), dtype)


def survey_memories(memories: Memories, dtype: DType) -> SurveyBatch:
    """Count the samples of all pieces; waits for nothing.

    Raises:
        StopError: memories of another element width, or of one that has no kernels.
    """
    if dtype.n_bytes not in _SIGNED:
        raise StopError(f"no GPU kernels for {dtype.n_bytes}-byte elements")
    if memories.n_bytes != dtype.n_bytes:
        raise StopError(f"elements of {dtype.name} have {dtype.n_bytes} bytes")
    n_pieces, n_keys = len(memories.olds), dtype.key_mask + 1
    n_counts = n_pieces * (N_CLASSES * (N_TOKENS + 1) + n_keys + 1)
    olds, news, sizes = send_tables([*memories.addresses, memories.sizes], memories.device)
    counts = torch.zeros(n_counts, dtype=torch.int32, device=memories.device)
    batch = SurveyBatch(counts, n_pieces, n_keys)
    # A batch of short pieces needs few programs.
    n_runs = max(1, min(_N_RUNS, -(-int(memories.sizes.max()) // _RUN)))
    kind, runs = _SIGNED[dtype.n_bytes], (n_pieces, n_runs)
    if n_keys > 1:
        _count_keys_kernel[runs](
            olds,
            sizes,
            batch.n_by_key,
            KIND=kind,
            SHIFT=dtype.key_shift,
            N_KEYS=n_keys,
            N_BINS=max(n_keys, _MIN_BINS),
        )
    _find_classes_kernel[(n_pieces,)](
        sizes, batch.n_by_key, batch.base_key, batch.n_by_class, N_KEYS=n_keys
    )
    _count_changes_kernel[runs](
        olds,
        news,
        sizes,
        batch.base_key,
        batch.n_changed,
        KIND=kind,
        WIDTH=8 * dtype.n_bytes,
        SHIFT=dtype.key_shift,
        MASK=dtype.key_mask,
        ORDERED=dtype.ordered,
        num_warps=8,
    )
    return batch


@triton.jit
def _run_start(size, run):
    """Where a run starts: even ones through a long piece, else one after the other.

    A run that starts at or past the end is not there.
    """
    wide = run.to(tl.int64)
    spread = wide * (size - _RUN_LENGTH) // _LAST_RUN
    return tl.where(size > _WHOLE, spread, wide * _RUN_LENGTH)


@triton.jit
def _count_keys_kernel(
    addresses,
    sizes,
    n_by_key,
    KIND: tl.constexpr,
    SHIFT: tl.constexpr,
    N_KEYS: tl.constexpr,
    N_BINS: tl.constexpr,
):
    """Adds a run's keys to its piece's. Lanes past the end count as key 0 and are taken off it."""
    piece = tl.program_id(0)
    size = tl.load(sizes + piece)
    start = _run_start(size, tl.program_id(1))
    if start < size:
        count = tl.minimum(size - start, _RUN_LENGTH).to(tl.int32)
        lanes = tl.arange(0, _RUN_LENGTH)
        old = memory_at(addresses, piece, KIND) + start
        bits = tl.load(old + lanes, mask=lanes < count, other=0).to(tl.int32)
        n_of_bin = tl.histogram((bits >> SHIFT) & (N_KEYS - 1), N_BINS)
        bins = tl.arange(0, N_BINS)
        n_of_bin = n_of_bin - tl.where(bins == 0, _RUN_LENGTH - count, 0)
        into = n_by_key + piece.to(tl.int64) * N_KEYS
        present = (n_of_bin > 0) & (bins < N_KEYS)
        tl.atomic_add(into + bins, n_of_bin, mask=present, sem="relaxed")


@triton.jit
def _find_classes_kernel(sizes, n_by_key, base_key, n_by_class, N_KEYS: tl.constexpr):
    """From a piece's keys to its classes: the window's lowest key, and the elements in each.

    A sample has at most 2^18 elements, so the product with 2^10 fits 32 bits.
    """
    piece = tl.program_id(0)
    classes = tl.arange(0, _CLASSES)
    into = n_by_class + piece.to(tl.int64) * _CLASSES
    if N_KEYS == 1:
        count = tl.minimum(tl.load(sizes + piece), _WHOLE).to(tl.int32)
        tl.store(n_by_key + piece, count)
        tl.store(into + classes, tl.where(classes == 0, count, 0))
    else:
        keys = tl.arange(0, N_KEYS)
        n_of_key = tl.load(n_by_key + piece.to(tl.int64) * N_KEYS + keys)
        total = tl.sum(n_of_key, axis=0)
        above = total - tl.cumsum(n_of_key, axis=0)
        top = tl.min(tl.where(above * _OUTLIER <= total, keys, N_KEYS - 1), axis=0)
        base = tl.maximum(top - (_CLASSES - 1), 0)
        class_of_key = tl.minimum(tl.maximum(keys - base, 0), _CLASSES - 1)
        is_own = classes[:, None] == class_of_key[None, :]
        tl.store(base_key + piece, base)
        tl.store(into + classes, tl.sum(tl.where(is_own, n_of_key[None, :], 0), axis=1))


@triton.jit
def _ordered(bits, WIDTH: tl.constexpr, ORDERED: tl.constexpr):
    """Sign-extended bits such that the next larger float is one more, but for a constant."""
    if ORDERED:
        bits = bits ^ ((bits >> 31) & ((1 << (WIDTH - 1)) - 1))
    return bits


@triton.jit
def _magnitude(old, new, WIDTH: tl.constexpr, ORDERED: tl.constexpr):
    """A change's magnitude less one, for sign-extended bits that differ; always below 2^31."""
    step = _ordered(new, WIDTH, ORDERED) - _ordered(old, WIDTH, ORDERED)
    # A step is a difference modulo 2^WIDTH, read as a signed number of that width.
    step = (step << (32 - WIDTH)) >> (32 - WIDTH)
    return tl.where(step < 0, ~step, step - 1)


@triton.jit
def _token_of(magnitude, WIDTH: tl.constexpr):
    """Small magnitudes are their own token; larger ones share one per half octave.

    The exponent and first fraction bit of a float are just that. Every integer below 2^24 is one
    exactly; larger ones are so after eight of their low bits are cut.
    """
    if WIDTH == 32:
        is_large = magnitude >= (1 << 24)
        exact = tl.where(is_large, magnitude >> 8, magnitude)
        halves = (exact.to(tl.float32).to(tl.int32, bitcast=True) >> 22) - 2 * 127
        halves = tl.where(is_large, halves + 2 * 8, halves)
    else:
        halves = (magnitude.to(tl.float32).to(tl.int32, bitcast=True) >> 22) - 2 * 127
    return tl.where(magnitude < 2, magnitude, halves)


@triton.jit
def _count_changes_kernel(
    old_addresses,
    new_addresses,
    sizes,
    base_key,
    n_changed,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Adds a run's changes to its piece's. Lanes past the end are unchanged zeros.

    The piece varies fastest between programs: neighbours then add to different memory.
    """
    piece = tl.program_id(0)
    size = tl.load(sizes + piece)
    start = _run_start(size, tl.program_id(1))
    if start < size:
        count = tl.minimum(size - start, _RUN_LENGTH).to(tl.int32)
        lanes = tl.arange(0, _RUN_LENGTH)
        old_at = memory_at(old_addresses, piece, KIND) + start
        new_at = memory_at(new_addresses, piece, KIND) + start
        old = tl.load(old_at + lanes, mask=lanes < count, other=0).to(tl.int32)
        new = tl.load(new_at + lanes, mask=lanes < count, other=0).to(tl.int32)
        changed = old != new
        key = (old >> SHIFT) & MASK
        of_class = tl.minimum(tl.maximum(key - tl.load(base_key + piece), 0), _CLASSES - 1)
        # Unchanged lanes are given a magnitude too, so that every address lies in the table.
        magnitude = tl.where(changed, _magnitude(old, new, WIDTH, ORDERED), 0)
        place = of_class * _TOKENS + _token_of(magnitude, WIDTH)
        into = n_changed + piece.to(tl.int64) * (_CLASSES * _TOKENS)
        ones = tl.full((_RUN_LENGTH,), 1, tl.int32)
        tl.atomic_add(into + place, ones, mask=changed, sem="relaxed")
