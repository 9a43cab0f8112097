"""What every kernel needs to know of an element: its class, its weight, and steps between values.

The Triton twin of ``kernels/steps.py``. Bits are widened to uint32 before anything is done to them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weightwire.kernels.contract import N_TOKENS
from weightwire.kernels.triton import models

TABLE_ROW = tl.constexpr(N_TOKENS)
"""Entries kept for the step table of one class."""

WEIGHT_MASK = tl.constexpr(models.WEIGHT_MASK)
MARK_SHIFT = tl.constexpr(models.MARK_SHIFT)
EXPECTED_SHIFT = tl.constexpr(models.EXPECTED_SHIFT)
SUMMED_MASK = tl.constexpr(models.WEIGHT_MASK | 1 << models.EXPECTED_SHIFT)
"""The weight, and whether a change is expected: what is summed up over a tile."""
WEIGHT_SUM_MASK = tl.constexpr((1 << models.EXPECTED_SHIFT) - 1)
CLASS_SHIFT = tl.constexpr(models.CLASS_SHIFT)
LOG2_SHIFT = tl.constexpr(models.LOG2_SHIFT)
COUNT_SHIFT = tl.constexpr(models.COUNT_SHIFT)
ONE_STEP_SHIFT = tl.constexpr(models.ONE_STEP_SHIFT)
FREQUENCY_SHIFT = tl.constexpr(models.FREQUENCY_SHIFT)
ENTRY_MASK = tl.constexpr((1 << models.FREQUENCY_SHIFT) - 1)


@triton.jit
def told_by_key(bits, table, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """What a piece's model says of elements with these old bits; one look into a small table."""
    return tl.load(table + ((bits >> SHIFT) & MASK).to(tl.int32))


@triton.jit
def to_ordered(bits, WIDTH: tl.constexpr, ORDERED: tl.constexpr):
    """Bits such that the next larger float is one more, in the low bits of a uint32."""
    if not ORDERED:
        return bits
    sign = tl.full((), 1, tl.uint32) << (WIDTH - 1)
    all_bits = tl.full((), 0xFFFFFFFF, tl.uint32) >> (32 - WIDTH)
    return tl.where((bits & sign) != 0, bits ^ all_bits, bits | sign)


@triton.jit
def from_ordered(ordered, WIDTH: tl.constexpr, ORDERED: tl.constexpr):
    """The inverse of ``to_ordered``."""
    if not ORDERED:
        return ordered
    sign = tl.full((), 1, tl.uint32) << (WIDTH - 1)
    all_bits = tl.full((), 0xFFFFFFFF, tl.uint32) >> (32 - WIDTH)
    return tl.where((ordered & sign) != 0, ordered ^ sign, ordered ^ all_bits)


@triton.jit
def step_between(old, new, WIDTH: tl.constexpr, ORDERED: tl.constexpr):
    """Steps from old to new bits, modulo 2^WIDTH, as int32 between -2^(WIDTH-1) and 2^(WIDTH-1)."""
    step = to_ordered(new, WIDTH, ORDERED) - to_ordered(old, WIDTH, ORDERED)
    return (step << (32 - WIDTH)).to(tl.int32, bitcast=True) >> (32 - WIDTH)


@triton.jit
def magnitude_of_step(step):
    """A changed element's step without its sign, less one, as uint32."""
    unsigned = step.to(tl.uint32, bitcast=True)
    return tl.where(step < 0, ~unsigned, unsigned - 1)


@triton.jit
def floor_log2(value):
    """The place of the highest bit of a uint32 that is not 0."""
    high = value >> 16
    half = tl.where(high != 0, high, value)
    # Sixteen bits fit a float's fraction, so its exponent is exact.
    exponent = (half.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return exponent + tl.where(high != 0, 16, 0)


@triton.jit
def token_of(magnitude):
    """Small magnitudes are their own token; larger ones share one per half octave."""
    exponent = floor_log2(tl.maximum(magnitude, 4))
    below = (magnitude >> (exponent - 1).to(tl.uint32)) & 1
    return tl.where(magnitude < 4, magnitude.to(tl.int32), 2 * exponent + below.to(tl.int32))


@triton.jit
def raw_bits_of(token):
    """How many raw bits follow a token."""
    return tl.where(token < 4, 0, (token >> 1) - 1)


@triton.jit
def magnitude_of_token(token, raw):
    """The magnitude that a token and its raw bits (uint32) stand for."""
    leading = (2 | (token & 1)).to(tl.uint32) << tl.maximum((token >> 1) - 1, 0).to(tl.uint32)
    return tl.where(token < 4, token.to(tl.uint32), leading | raw)
