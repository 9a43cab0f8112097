"""The C++ backend: checks shapes and types at the border, then calls the compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np

from weightwire import _native
from weightwire.errors import CorruptStream
from weightwire.kernels.contract import N_TOKENS, ClassModel, Streams, Survey, sample_runs
from weightwire.model import Bits, Changes, DType

_FLOAT_KINDS = {
    (1, 3): "e4m3",
    (1, 2): "e5m2",
    (2, 10): "f16",
    (2, 7): "bf16",
    (4, 23): "f32",
    (8, 52): "f64",
}


class NativeKernels:
    """Implements ``Kernels`` with the compiled module; every call releases the GIL."""

    name = "native"

    def survey(self, old: Bits, new: Bits, dtype: DType) -> Survey:
        runs = np.array(sample_runs(len(old)), dtype=np.uint64)
        by_key, by_token = _call(
            f"survey_{_kind(dtype)}", _flat(old), _flat(new), _flat(runs[:, 0]), _flat(runs[:, 1])
        )
        return Survey(by_key, by_token.reshape(-1, N_TOKENS))

    def encode_compact(
        self,
        old: Bits,
        new: Bits,
        dtype: DType,
        model: ClassModel,
        chunk_log2: int,
        n_threads: int,
        keep_changes: bool = False,
    ) -> Streams:
        directory, words, n_changed, *kept = _call(
            f"encode_compact_{_kind(dtype)}",
            _flat(old),
            _flat(new),
            *_model_arrays(model),
            chunk_log2,
            n_threads,
            keep_changes,
        )
        changes = Changes(*kept) if keep_changes else None
        return Streams(directory.reshape(-1, 2), words.view(np.uint8), n_changed, changes)

    def decode_compact(
        self,
        old: Bits,
        dtype: DType,
        model: ClassModel,
        chunk_log2: int,
        streams: Streams,
        n_threads: int,
    ) -> Changes:
        positions, bits = _call(
            f"decode_compact_{_kind(dtype)}",
            _flat(old),
            *_model_arrays(model),
            chunk_log2,
            _flat(streams.directory.ravel()),
            _aligned(streams.payload),
            n_threads,
        )
        return Changes(positions, bits)

    def encode_plain(
        self, old: Bits, new: Bits, n_threads: int, keep_changes: bool = False
    ) -> Streams:
        directory, payload, n_changed, *kept = _call(
            f"encode_plain_{_width(old)}", _flat(old), _flat(new), n_threads, keep_changes
        )
        changes = Changes(*kept) if keep_changes else None
        return Streams(directory.reshape(-1, 1), payload, n_changed, changes)

    def decode_plain(
        self, n_elements: int, dtype: DType, streams: Streams, n_threads: int
    ) -> Changes:
        positions, bits = _call(
            f"decode_plain_u{8 * dtype.n_bytes}",
            n_elements,
            _flat(streams.directory.ravel()),
            _flat(streams.payload),
            n_threads,
        )
        return Changes(positions, bits)

    def scatter(self, bits: Bits, positions: Bits, new_bits: Bits, n_threads: int) -> None:
        _call(f"scatter_{_width(bits)}", bits, _flat(positions), _flat(new_bits), n_threads)

    def scatter_all(self, writes: Sequence[tuple[Bits, Bits, Bits]], n_threads: int) -> None:
        items = [(bits, _flat(positions), _flat(now)) for bits, positions, now in writes]
        _call("scatter_all", items, n_threads)

    def exchange(self, bits: Bits, positions: Bits, new_bits: Bits, n_threads: int) -> Bits:
        before = _call(
            f"exchange_{_width(bits)}", bits, _flat(positions), _flat(new_bits), n_threads
        )
        return cast(Bits, before)

    def matches(self, bits: Bits, positions: Bits, wanted: Bits, n_threads: int) -> bool:
        return bool(
            _call(f"matches_{_width(bits)}", bits, _flat(positions), _flat(wanted), n_threads)
        )

    def digest(self, bits: Bits, first_index: int, n_threads: int) -> tuple[int, int]:
        lanes = _call(f"digest_{_width(bits)}", _flat(bits), first_index, n_threads)
        return cast("tuple[int, int]", lanes)

    def digest_at(self, positions: Bits, bits: Bits, first_index: int) -> tuple[int, int]:
        lanes = _call(f"digest_at_{_width(bits)}", _flat(positions), _flat(bits), first_index)
        return cast("tuple[int, int]", lanes)


def _call(function: str, *arguments: Any) -> Any:
    try:
        return getattr(_native, function)(*arguments)
    except _native.CorruptStream as error:
        raise CorruptStream(str(error)) from None


def _kind(dtype: DType) -> str:
    if not dtype.ordered:
        return f"u{8 * dtype.n_bytes}"
    return _FLOAT_KINDS[dtype.n_bytes, dtype.key_shift]


def _width(bits: Bits) -> str:
    return f"u{8 * bits.dtype.itemsize}"


def _flat(array: Any) -> Any:
    """Contiguous and at an address that is a multiple of the element size, copied if it must be."""
    return np.require(array, requirements=("C_CONTIGUOUS", "ALIGNED"))


def _aligned(payload: Any) -> Any:
    """Payloads cut out of a file may start at any byte; words are read four at a time."""
    payload = np.ascontiguousarray(payload)
    return payload if payload.ctypes.data % 4 == 0 else payload.copy()


@lru_cache(maxsize=64)
def _model_arrays(model: ClassModel) -> tuple[Any, ...]:
    return (
        model.base_key,
        np.array(model.log2_weights, dtype=np.uint8),
        np.array(model.expected, dtype=np.uint8),
        np.array([len(table.tokens) for table in model.steps], dtype=np.uint8),
        np.array([t for table in model.steps for t in table.tokens], dtype=np.uint8),
        np.array([f for table in model.steps for f in table.frequencies], dtype=np.uint16),
    )
