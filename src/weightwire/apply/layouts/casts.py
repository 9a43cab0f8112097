"""Casts that lose nothing: every published bit pattern has a pattern of its own at runtime."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weightwire.errors import UnsupportedLayout
from weightwire.model import Bits, DType

_WIDER = {
    "F16": ("F32", "F64"),
    "BF16": ("F32", "F64"),
    "F32": ("F64",),
    "F8_E4M3": ("F16", "BF16", "F32"),
    "F8_E5M2": ("F16", "BF16", "F32"),
}
_NUMPY = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}


def is_exact(published: DType, runtime: DType) -> bool:
    """Whether every value of one type is a value of the other."""
    return published == runtime or runtime.name in _WIDER.get(published.name, ())


@dataclass(frozen=True)
class Cast:
    """From published bits to the engine's, and back."""

    published: DType
    runtime: DType

    @property
    def is_identity(self) -> bool:
        """Whether both sides are of the same type."""
        return self.published == self.runtime

    def widen(self, bits: Bits) -> Bits:
        """The engine's bits."""
        if self.is_identity:
            return bits
        if (self.published.name, self.runtime.name) == ("BF16", "F32"):
            wide: Bits = bits.astype(np.uint32)
            wide <<= 16
            return wide
        if self.published.n_bytes <= 2:
            widened: Bits = _patterns(self)[bits]
            return widened
        numbers = bits.view(_NUMPY[self.published.name])
        longer: Bits = numbers.astype(np.float64).view(np.uint64)
        return longer

    def narrow(self, bits: Bits) -> Bits | None:
        """Published bits; None if some are not ones that ``widen`` gives: nobody published them."""
        if self.is_identity:
            return bits
        if (self.published.name, self.runtime.name) == ("BF16", "F32"):
            return None if (bits & np.uint32(0xFFFF)).any() else (bits >> 16).astype(np.uint16)
        with np.errstate(all="ignore"):
            values = bits.view(_NUMPY[self.runtime.name]).astype(_NUMPY[self.published.name])
        narrow = values.view(self.published.bits_dtype)
        wrong = np.flatnonzero(self.widen(narrow) != bits)
        return narrow if len(wrong) == 0 else self._mend(narrow, wrong, bits)

    def _mend(self, narrow: Bits, wrong: npt.NDArray[np.intp], bits: Bits) -> Bits | None:
        """NaNs lose their payload in a conversion: look them up."""
        if self.published.n_bytes > 2:
            return None
        table = _patterns(self)
        order = np.argsort(table, kind="stable")
        at = np.minimum(np.searchsorted(table, bits[wrong], sorter=order), len(table) - 1)
        if not np.array_equal(table[order[at]], bits[wrong]):
            return None
        narrow[wrong] = order[at].astype(narrow.dtype)
        return narrow


def cast_between(published: DType, runtime: DType) -> Cast:
    """The cast from one type to the other.

    Raises:
        UnsupportedLayout: it would round.
    """
    if not is_exact(published, runtime):
        raise UnsupportedLayout(
            f"published as {published.name}, held as {runtime.name}: that cast is not exact"
        )
    return Cast(published, runtime)


@lru_cache(maxsize=16)
def _patterns(cast: Cast) -> Bits:
    """The engine's bits of every published pattern; NaNs keep their payload."""
    published, runtime = cast.published, cast.runtime
    every = np.arange(1 << 8 * published.n_bytes).astype(published.bits_dtype)
    values = every.view(_NUMPY[published.name])
    with np.errstate(all="ignore"):
        table: Bits = values.astype(_NUMPY[runtime.name]).view(runtime.bits_dtype).copy()
    if published.name in ("F16", "F8_E5M2", "BF16"):
        _keep_payloads(table, every, published, runtime)
    return table


def _keep_payloads(table: Bits, every: Bits, published: DType, runtime: DType) -> None:
    mantissa = (1 << published.key_shift) - 1
    is_special = (every >> published.key_shift) & published.key_mask == published.key_mask
    one = every[is_special].astype(np.uint64)
    sign = one >> np.uint64(8 * published.n_bytes - 1)
    payload = (one & np.uint64(mantissa)) << np.uint64(runtime.key_shift - published.key_shift)
    exponent = np.uint64(runtime.key_mask << runtime.key_shift)
    bits = sign << np.uint64(8 * runtime.n_bytes - 1) | exponent | payload
    table[is_special] = bits.astype(table.dtype)
