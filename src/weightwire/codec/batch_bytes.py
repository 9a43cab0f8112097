"""The models of many pieces as bytes, at once: what ``model_bytes`` gives for each of them.

One by one they cost Python objects for every token of every class, some tenths of a millisecond for
each piece: for a large model as long as the GPU takes to code it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weightwire.codec.classes import UNUSED_MODEL
from weightwire.codec.model_bytes import EXPECTED, SAME_TABLE, TWO_BYTES, model_bytes
from weightwire.kernels.contract import DENSE, N_TOKENS
from weightwire.kernels.model_batch import ModelBatch

if TYPE_CHECKING:
    from weightwire.codec.device_pieces import DevicePiece

_Bytes = npt.NDArray[np.uint8]
_Mask = npt.NDArray[np.bool_]

_AT_ONCE = 256
"""Models laid out together: some 4 kB each, of which a few hundred bytes are used."""


def model_bytes_of(pieces: Sequence[DevicePiece]) -> list[bytes]:
    """The model of each of some pieces of one codec; empty for the plain one."""
    from weightwire.codec.device_pieces import runs_of

    if not pieces or pieces[0].models is None:
        return [b""] * len(pieces)
    made = [
        each
        for models, at in runs_of(pieces)
        for numbers in _few(np.arange(len(models))[at])
        for each in batch_bytes(models, numbers)
    ]
    return [
        model if _is_used(piece) else model_bytes(UNUSED_MODEL, piece.chunk_log2)
        for piece, model in zip(pieces, made, strict=True)
    ]


def _few(numbers: npt.NDArray[np.intp]) -> Iterator[npt.NDArray[np.intp]]:
    for first in range(0, len(numbers), _AT_ONCE):
        yield numbers[first : first + _AT_ONCE]


def batch_bytes(models: ModelBatch, at: npt.NDArray[np.intp]) -> list[bytes]:
    """Some models of a batch, each padded to whole words."""
    heads, (tables, is_told) = _heads(models, at), _tables(models, at)
    found = []
    for head, table, told in zip(heads, tables, is_told, strict=True):
        raw = head.tobytes() + table[told].tobytes()
        found.append(raw + bytes(-len(raw) % 4))
    return found


def _is_used(piece: DevicePiece) -> bool:
    """Whether any chunk was coded with its model: others are empty, or stand there as they are."""
    return bool((piece.streams.directory[:, 0] & ~np.uint32(DENSE)).any())


def _heads(models: ModelBatch, at: npt.NDArray[np.intp]) -> _Bytes:
    """[models, 20]: chunk size, zero, the base key in two bytes, and a byte for each class."""
    keys = models.base_keys[at]
    fixed = np.stack([models.chunk_log2[at], 0 * keys, keys & 0xFF, keys >> 8], axis=1)
    classes = models.log2_weights[at] | np.where(models.expected[at] != 0, EXPECTED, 0)
    heads: _Bytes = np.concatenate([fixed, classes], axis=1).astype(np.uint8)
    return heads


def _tables(models: ModelBatch, at: npt.NDArray[np.intp]) -> tuple[_Bytes, _Mask]:
    """[models, classes, bytes] with room for two bytes for each token, and which of them are told."""
    first, n_tokens, often = models.first_token[at], models.n_tokens[at], models.frequencies[at]
    room = (*first.shape, 2 + 2 * N_TOKENS)
    tables, is_told = np.zeros(room, dtype=np.uint8), np.zeros(room, dtype=np.bool_)
    is_same = np.zeros(first.shape, dtype=np.bool_)
    is_same[:, 1:] = (first[:, 1:] == first[:, :-1]) & (n_tokens[:, 1:] == n_tokens[:, :-1])
    is_same[:, 1:] &= (often[:, 1:] == often[:, :-1]).all(axis=2)
    tables[:, :, 0], is_told[:, :, 0] = np.where(is_same, SAME_TABLE, first), True
    tables[:, :, 1], is_told[:, :, 1] = n_tokens, ~is_same
    is_wide = often >= TWO_BYTES
    tables[:, :, 2::2] = np.where(is_wide, TWO_BYTES | often & (TWO_BYTES - 1), often)
    tables[:, :, 3::2] = often >> 7
    has_tokens = (~is_same & (n_tokens > 1))[:, :, None]
    is_told[:, :, 2::2] = has_tokens & (np.arange(N_TOKENS) < n_tokens[:, :, None])
    is_told[:, :, 3::2] = is_told[:, :, 2::2] & is_wide
    return tables, is_told
