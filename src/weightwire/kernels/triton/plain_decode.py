"""The plain decoder on a GPU: mirrors ``plain_encode.py``, and trusts nothing it reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from weightwire.errors import CorruptStream
from weightwire.kernels.contract import PLAIN_CHUNK, Streams
from weightwire.kernels.reference import PLAIN_BITMAP, PLAIN_DENSE, PLAIN_SPARSE
from weightwire.kernels.triton.changes import DeviceChanges
from weightwire.kernels.triton.downloads import to_host
from weightwire.kernels.triton.launch import TORCH_BITS, TRITON_BITS, owners_of
from weightwire.kernels.triton.uploads import Sending, send_tables
from weightwire.model import DType

_LANES = 1024
SPARSE, BITMAP = tl.constexpr(PLAIN_SPARSE), tl.constexpr(PLAIN_BITMAP)

_TROUBLES = (
    "",
    "a plain chunk's positions do not match its head",
    "positions are not strictly ascending",
)


_RUN_BYTES = 96 << 20
"""Payload of pieces that are decoded together: with two such runs at a time, little is held at once."""


def decode_plain_all(
    sizes: Sequence[int], streams: Sequence[Streams], dtype: DType, device: torch.device
) -> list[DeviceChanges]:
    """The changes that pieces of so many elements stand for; no old bits are needed.

    Raises:
        CorruptStream: streams that no encoder writes.
    """
    # Each is on its way while the one before it is listed.
    runs = (_Run(sizes[part], streams[part], dtype, device) for part in _parts(streams))
    found: list[DeviceChanges] = []
    run = next(runs, None)
    while run is not None:
        coming = next(runs, None)
        found += run.changes()
        run = coming
    return found


def _parts(streams: Sequence[Streams]) -> list[slice]:
    """Pieces with about as much payload as a run has."""
    ends = np.cumsum([len(each.payload) for each in streams])
    runs = ends // _RUN_BYTES
    borders = [0, *(np.flatnonzero(np.diff(runs)) + 1).tolist(), len(streams)]
    return [slice(first, stop) for first, stop in pairwise(borders) if first < stop]


class _Run:
    """Some pieces whose payload is on its way."""

    def __init__(
        self, sizes: Sequence[int], streams: Sequence[Streams], dtype: DType, device: torch.device
    ) -> None:
        self._counts = np.array([-(-size // PLAIN_CHUNK) for size in sizes], dtype=np.int64)
        self._heads, self._n = _heads(self._counts, sizes, streams)
        self._n_bytes = _chunk_bytes(self._heads, self._n, dtype.n_bytes)
        self._dtype = dtype
        _check_payloads(self._counts, self._n_bytes, streams)
        self._sending = Sending([np.ascontiguousarray(each.payload) for each in streams], device)

    def changes(self) -> list[DeviceChanges]:
        """What they stand for; waits for it."""
        heads, n, counts = self._heads, self._n, self._counts
        padded = -(-self._n_bytes // 4) * 4
        first = np.cumsum(padded) - padded
        _check_padding(self._sending.joined(), first + self._n_bytes, first + padded)
        is_dense = heads >> 24 == PLAIN_DENSE
        n_listed = np.where(is_dense, n, heads & 0xFFFFFF)
        out = _list(self._sending.arrived(), heads, n, first, n_listed, counts, self._dtype)
        sizes, n_changed = _by_piece(n_listed, counts), _by_piece(heads & 0xFFFFFF, counts)
        return list(map(DeviceChanges, out[0].split(sizes), out[1].split(sizes), n_changed))


def _by_piece(by_chunk: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> list[int]:
    """Sums over every piece's chunks."""
    ends = np.append(0, np.cumsum(by_chunk))
    sums: list[int] = np.diff(ends[np.append(0, np.cumsum(counts))]).tolist()
    return sums


def _heads(
    counts: npt.NDArray[np.int64], sizes: Sequence[int], streams: Sequence[Streams]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Every chunk's head, and how many elements it has."""
    if any(len(each.directory) != count for each, count in zip(streams, counts, strict=True)):
        raise CorruptStream("a directory has rows for more or fewer chunks than there are")
    heads = np.concatenate([np.zeros(0, np.uint32), *(each.directory.ravel() for each in streams)])
    left = np.repeat(np.array(sizes, dtype=np.int64), counts) - _starts(counts)
    return heads.astype(np.int64), np.minimum(left, PLAIN_CHUNK)


def _starts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Every chunk's first element in its piece."""
    return owners_of(counts)[1].astype(np.int64) * PLAIN_CHUNK


def _chunk_bytes(
    heads: npt.NDArray[np.int64], n: npt.NDArray[np.int64], n_bytes: int
) -> npt.NDArray[np.int64]:
    """How long every chunk is before it is padded, as its head says."""
    n_changed, mode = heads & 0xFFFFFF, heads >> 24
    is_wrong = (n_changed > n) | (mode > PLAIN_DENSE) | ((mode != 0) & (n_changed == 0))
    if is_wrong.any():
        raise CorruptStream("a plain chunk's head is out of range")
    ways = [n_changed * (2 + n_bytes), -(-n // 8) + n_changed * n_bytes, n * n_bytes]
    return np.choose(mode, ways)


def _check_payloads(
    counts: npt.NDArray[np.int64], n_bytes: npt.NDArray[np.int64], streams: Sequence[Streams]
) -> None:
    promised = _by_piece(-(-n_bytes // 4) * 4, counts)
    if any(len(each.payload) != size for each, size in zip(streams, promised, strict=True)):
        raise CorruptStream("payload does not match its directory")


def _check_padding(raw: Any, ends: Any, padded_ends: Any) -> None:
    for ahead in range(3):
        at = (ends + ahead)[ends + ahead < padded_ends]
        if raw[at].any():
            raise CorruptStream("a plain chunk's padding is not zero")


def _list(
    payload: torch.Tensor,
    heads: npt.NDArray[np.int64],
    n: npt.NDArray[np.int64],
    first: npt.NDArray[np.int64],
    n_listed: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    dtype: DType,
) -> tuple[torch.Tensor, torch.Tensor]:
    device, total = payload.device, int(n_listed.sum())
    positions = torch.empty(total, dtype=torch.int32, device=device)
    bits = torch.empty(total, dtype=TORCH_BITS[dtype.n_bytes], device=device)
    if not total:
        return positions, bits
    trouble = torch.zeros(len(heads), dtype=torch.int32, device=device)
    tables: list[npt.NDArray[Any]] = [
        heads.astype(np.int32), n.astype(np.int32), first, np.cumsum(n_listed) - n_listed,
        _starts(counts).astype(np.int32),
    ]  # fmt: skip
    _list_kernel[(len(heads),)](
        payload, *send_tables(tables, device), positions, bits, trouble,
        KIND=TRITON_BITS[dtype.n_bytes], N_BYTES=dtype.n_bytes, LANES=_LANES, num_warps=4,
    )  # fmt: skip
    found = int(to_host(trouble).max())
    if found:
        raise CorruptStream(_TROUBLES[found])
    return positions, bits


@triton.jit
def _load_bytes(at, N_BYTES: tl.constexpr, mask):
    """Values that begin at any byte."""
    value = tl.load(at, mask=mask, other=0).to(tl.uint32)
    for part in tl.static_range(1, N_BYTES):
        value |= tl.load(at + part, mask=mask, other=0).to(tl.uint32) << (8 * part)
    return value


@triton.jit
def _list_kernel(
    payload, heads, sizes, first_byte, first_out, starts, positions, bits, trouble,
    KIND: tl.constexpr, N_BYTES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One chunk; its head was checked, so all it is said to hold lies in the payload."""
    chunk = tl.program_id(0)
    head = tl.load(heads + chunk)
    n = tl.load(sizes + chunk)
    raw = payload.to(tl.pointer_type(tl.uint8)) + tl.load(first_byte + chunk)
    out = tl.load(first_out + chunk)
    start = tl.load(starts + chunk)
    mode = head >> 24
    n_changed = head & 0xFFFFFF
    lane = tl.arange(0, LANES)
    bad = tl.full((), 0, tl.int32)
    if mode == BITMAP:
        values_at = raw + (n + 7) // 8
        done = tl.full((), 0, tl.int32)
        n_bits = ((n + 7) // 8) * 8
        for begin in range(0, n_bits, LANES):
            place = begin + lane
            byte = tl.load(raw + (place >> 3), mask=place < n_bits, other=0).to(tl.int32)
            is_set = ((byte >> (place & 7)) & 1) != 0
            bad = tl.maximum(bad, tl.max((is_set & (place >= n)).to(tl.int32), 0))
            ranks = tl.cumsum(is_set.to(tl.int32), 0)
            rank = done + ranks - 1
            is_on = is_set & (rank < n_changed)
            value = _load_bytes(values_at + rank * N_BYTES, N_BYTES, is_on)
            tl.store(positions + out + rank, start + place, mask=is_on)
            same = value.to(KIND).to(bits.dtype.element_ty, bitcast=True)
            tl.store(bits + out + rank, same, mask=is_on)
            done += tl.max(ranks, 0)
        bad = tl.where(done != n_changed, 1, bad)
    else:
        is_sparse = (tl.zeros((LANES,), tl.int32) + mode) == SPARSE
        count = tl.where(mode == SPARSE, n_changed, n)
        values_at = raw + tl.where(mode == SPARSE, 2 * n_changed, 0)
        for begin in range(0, count, LANES):
            rank = begin + lane
            is_on = rank < count
            told = _load_bytes(raw + 2 * rank, 2, is_on & is_sparse).to(tl.int32)
            before = _load_bytes(raw + 2 * rank - 2, 2, is_on & is_sparse & (rank > 0)).to(tl.int32)
            place = tl.where(is_sparse, told, rank)
            bad = tl.maximum(bad, tl.max((is_on & (place >= n)).to(tl.int32), 0))
            is_unordered = is_on & is_sparse & (rank > 0) & (told <= before)
            bad = tl.maximum(bad, 2 * tl.max(is_unordered.to(tl.int32), 0))
            value = _load_bytes(values_at + rank * N_BYTES, N_BYTES, is_on)
            tl.store(positions + out + rank, start + place, mask=is_on)
            same = value.to(KIND).to(bits.dtype.element_ty, bitcast=True)
            tl.store(bits + out + rank, same, mask=is_on)
    tl.store(trouble + chunk, bad)
