"""The digest's mixing function: constants and the vectorised definition.

An element is one limb of up to 32 bits, or two limbs for 64-bit types (low half first). Limb L
lies in block L >> 8 at place L & 255. Each of two lanes adds

    ((m + (K[r][place] ^ h(r, block))) mod 2^32) · ((m + (K[r+1][place] ^ h(r+1, block))) mod 2^32)

modulo 2^64, where r is twice the lane. Products are not linear in m, and the keys of two places
differ by another amount in every block, so swaps, shifts and paired errors do not cancel.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightwire.model import Bits

_U32 = np.uint32
_Words = npt.NDArray[np.uint32]


def _mix32(value: _Words) -> _Words:
    """A bijection of 32-bit words in which every input bit reaches every output bit."""
    value = (value ^ (value >> _U32(16))) * _U32(0x7FEB352D)
    value = (value ^ (value >> _U32(15))) * _U32(0x846CA68B)
    mixed: _Words = value ^ (value >> _U32(16))
    return mixed


def place_keys() -> _Words:
    """K: four rows of 256 keys, one per place in a block."""
    number = np.arange(1, 4 * 256 + 1, dtype=np.uint32)
    return _mix32(number * _U32(0x9E3779B9)).reshape(4, 256)


def block_keys(row: int, blocks: _Words) -> _Words:
    """h(row, block): what a block's keys are crossed with."""
    offset = _U32((row * 0xC2B2AE35 + 0x27D4EB2F) & 0xFFFFFFFF)
    return _mix32(blocks * _U32(0x85EBCA6B) + offset)


_PLACE_KEYS = place_keys()


def digest_limbs(limbs: _Words, indices: npt.NDArray[np.uint64]) -> tuple[int, int]:
    """Both lanes of the sum over limbs at the given limb indices."""
    blocks = (indices >> np.uint64(8)).astype(np.uint32)
    places = (indices & np.uint64(255)).astype(np.intp)
    keyed = [
        (limbs + (_PLACE_KEYS[row][places] ^ block_keys(row, blocks))).astype(np.uint64)
        for row in range(4)
    ]
    return int(np.sum(keyed[0] * keyed[1])), int(np.sum(keyed[2] * keyed[3]))


def to_limbs(bits: Bits, indices: npt.NDArray[np.uint64]) -> tuple[_Words, npt.NDArray[np.uint64]]:
    """Elements as 32-bit limbs, with the limbs' indices."""
    if bits.dtype.itemsize < 8:
        return bits.astype(np.uint32), indices
    halves = np.stack([bits & np.uint64(0xFFFFFFFF), bits >> np.uint64(32)], axis=-1)
    places = np.stack([indices * np.uint64(2), indices * np.uint64(2) + np.uint64(1)], axis=-1)
    return halves.astype(np.uint32).ravel(), places.ravel()
