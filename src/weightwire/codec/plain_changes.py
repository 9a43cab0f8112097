"""Plain streams straight from positions and bits, for when no base is at hand."""

from __future__ import annotations

import numpy as np

from weightwire.kernels.contract import PLAIN_CHUNK, Streams
from weightwire.kernels.reference import (
    PLAIN_BITMAP,
    PLAIN_DENSE,
    PLAIN_SPARSE,
    plain_chunk_bytes,
)
from weightwire.model import Bits, Changes


def encode_changes(n_elements: int, changes: Changes) -> Streams:
    """Code changes whose positions ascend. A chunk is dense only if all of it is given."""
    n_chunks = -(-n_elements // PLAIN_CHUNK)
    borders = np.searchsorted(changes.positions, np.arange(n_chunks + 1) * PLAIN_CHUNK)
    heads, bodies = [], []
    for number in range(n_chunks):
        part = slice(borders[number], borders[number + 1])
        places = (
            changes.positions[part] - changes.positions.dtype.type(number * PLAIN_CHUNK)
        ).astype("<u2")
        n = min(PLAIN_CHUNK, n_elements - number * PLAIN_CHUNK)
        head, body = _encode_chunk(n, places, changes.bits[part])
        heads.append([head])
        bodies.append(body)
    payload = np.frombuffer(b"".join(bodies), dtype=np.uint8)
    directory = np.array(heads, dtype=np.uint32).reshape(n_chunks, 1)
    return Streams(directory, payload, len(changes))


def _encode_chunk(n: int, places: Bits, bits: Bits) -> tuple[int, bytes]:
    if len(places) == 0:
        return 0, b""
    modes = [PLAIN_SPARSE, PLAIN_BITMAP] + ([PLAIN_DENSE] if len(places) == n else [])
    width = bits.dtype.itemsize
    head = min(
        (len(places) | mode << 24 for mode in modes),
        key=lambda candidate: plain_chunk_bytes(candidate, n, width),
    )
    body = _where_bytes(head >> 24, n, places) + bits.tobytes()
    return head, body + bytes(-len(body) % 4)


def _where_bytes(mode: int, n: int, places: Bits) -> bytes:
    if mode == PLAIN_SPARSE:
        return places.tobytes()
    if mode == PLAIN_DENSE:
        return b""
    mask = np.zeros(n, dtype=bool)
    mask[places] = True
    return np.packbits(mask, bitorder="little").tobytes()
