"""Values as signed steps: how a change of bits becomes a sign, a token and a few raw bits."""

from __future__ import annotations

import numpy as np

from weightwire.model import Bits, DType


def keys_of(bits: Bits, dtype: DType) -> Bits:
    """The key of every element: a float's exponent, 0 for all else."""
    keys: Bits = (bits >> bits.dtype.type(dtype.key_shift)) & bits.dtype.type(dtype.key_mask)
    return keys


def to_ordered(bits: Bits, dtype: DType) -> Bits:
    """Bits such that the next larger float is one more; -0 and +0 stay apart."""
    if not dtype.ordered:
        return bits
    sign = bits.dtype.type(1 << (8 * dtype.n_bytes - 1))
    return np.where(bits & sign, ~bits, bits | sign)


def from_ordered(ordered: Bits, dtype: DType) -> Bits:
    """The inverse of ``to_ordered``."""
    if not dtype.ordered:
        return ordered
    sign = ordered.dtype.type(1 << (8 * dtype.n_bytes - 1))
    return np.where(ordered & sign, ordered ^ sign, ~ordered)


def split_steps(old: Bits, new: Bits, dtype: DType) -> tuple[list[bool], list[int]]:
    """For changed elements: is the step negative, and its magnitude less one."""
    step = to_ordered(new, dtype) - to_ordered(old, dtype)
    half = step.dtype.type(1 << (8 * dtype.n_bytes - 1))
    negative = step >= half
    one = step.dtype.type(1)
    return negative.tolist(), (np.where(negative, ~step + one, step) - one).tolist()


def add_steps(old: Bits, negative: list[bool], magnitudes: list[int], dtype: DType) -> Bits:
    """The inverse of ``split_steps``: the new bits."""
    size = np.array(magnitudes, dtype=old.dtype) + old.dtype.type(1)
    step = np.where(np.array(negative, dtype=bool), ~size + old.dtype.type(1), size)
    return from_ordered(to_ordered(old, dtype) + step, dtype)


def token_of(magnitude: int) -> int:
    """Small magnitudes are their own token; larger ones share one per half octave."""
    if magnitude < 4:
        return magnitude
    exponent = magnitude.bit_length() - 1
    return 2 * exponent + (magnitude >> (exponent - 1) & 1)


def raw_bits_of(token: int) -> int:
    """How many raw bits follow a token."""
    return 0 if token < 4 else token // 2 - 1


def magnitude_of(token: int, raw: int) -> int:
    """The magnitude that a token and its raw bits stand for."""
    if token < 4:
        return token
    return (2 | token & 1) << (token // 2 - 1) | raw


def max_token(dtype: DType) -> int:
    """The largest token an element type can need: magnitudes stay below half its range."""
    return token_of((1 << (8 * dtype.n_bytes - 1)) - 1)
