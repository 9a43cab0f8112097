"""The digest's mixing function: constants and the vectorised definition.

An element is one limb of up to 32 bits, or two limbs for 64-bit types (low half first). Limb L
lies in block L >> 8 at place L & 255. A limb m at place p adds to its block's two sums

    lane 0: ((m + K[0][p]) mod 2^32) · ((m + K[1][p]) mod 2^32)
    lane 1: ((m + K[0][p]) mod 2^32) · ((m + K[2][p]) mod 2^32)

modulo 2^64, and each block's sum adds to the digest times an odd 64-bit number of its own. Products
are not linear in m, and no two places or blocks weigh alike, so swaps, shifts and paired errors do
not cancel; yet a change of one element moves the digest by a term that needs no other element.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightwire.model import Bits

_U32 = np.uint32
_U64 = np.uint64
_Words = npt.NDArray[np.uint32]
_Longs = npt.NDArray[np.uint64]


def _mix32(value: _Words) -> _Words:
    """A bijection of 32-bit words in which every input bit reaches every output bit."""
    value = (value ^ (value >> _U32(16))) * _U32(0x7FEB352D)
    value = (value ^ (value >> _U32(15))) * _U32(0x846CA68B)
    mixed: _Words = value ^ (value >> _U32(16))
    return mixed


def place_keys() -> _Words:
    """K: three rows of 256 keys, one per place in a block."""
    number = np.arange(1, 3 * 256 + 1, dtype=np.uint32)
    return _mix32(number * _U32(0x9E3779B9)).reshape(3, 256)


def block_multipliers(lane: int, blocks: _Words) -> _Longs:
    """The odd number by which a block's sum counts in a lane."""
    high, low = (_block_word(2 * lane + half, blocks).astype(np.uint64) for half in (0, 1))
    multipliers: _Longs = high << _U64(32) | low | _U64(1)
    return multipliers


def _block_word(row: int, blocks: _Words) -> _Words:
    offset = _U32((row * 0xC2B2AE35 + 0x27D4EB2F) & 0xFFFFFFFF)
    return _mix32(blocks * _U32(0x85EBCA6B) + offset)


_PLACE_KEYS = place_keys()


def digest_limbs(limbs: _Words, indices: _Longs) -> tuple[int, int]:
    """Both lanes of the sum over limbs at the given limb indices."""
    blocks = (indices >> _U64(8)).astype(np.uint32)
    places = (indices & _U64(255)).astype(np.intp)
    keyed = [(limbs + _PLACE_KEYS[row][places]).astype(np.uint64) for row in range(3)]
    lanes = (
        np.sum(block_multipliers(lane, blocks) * (keyed[0] * keyed[1 + lane])) for lane in range(2)
    )
    low, high = (int(lane) for lane in lanes)
    return low, high


def to_limbs(bits: Bits, indices: _Longs) -> tuple[_Words, _Longs]:
    """Elements as 32-bit limbs, with the limbs' indices."""
    if bits.dtype.itemsize < 8:
        return bits.astype(np.uint32), indices
    halves = np.stack([bits & _U64(0xFFFFFFFF), bits >> _U64(32)], axis=-1)
    places = np.stack([indices * _U64(2), indices * _U64(2) + _U64(1)], axis=-1)
    return halves.astype(np.uint32).ravel(), places.ravel()
