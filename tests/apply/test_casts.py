from __future__ import annotations

import numpy as np
import pytest
import torch

from weightwire.apply.layouts.casts import Cast, cast_between
from weightwire.diff.views import view_tensor
from weightwire.errors import UnsupportedLayout
from weightwire.model import dtype_named

EXACT = [
    ("BF16", "F32"),
    ("BF16", "F64"),
    ("F16", "F32"),
    ("F16", "F64"),
    ("F8_E4M3", "F16"),
    ("F8_E4M3", "BF16"),
    ("F8_E4M3", "F32"),
    ("F8_E5M2", "F16"),
    ("F8_E5M2", "BF16"),
    ("F8_E5M2", "F32"),
    ("BF16", "BF16"),
]
TORCH = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def every_pattern(name: str) -> np.ndarray:
    dtype = dtype_named(name)
    return np.arange(1 << 8 * dtype.n_bytes).astype(dtype.bits_dtype)


@pytest.mark.parametrize(("published", "runtime"), EXACT)
def test_every_pattern_comes_back(published: str, runtime: str) -> None:
    cast = cast_between(dtype_named(published), dtype_named(runtime))
    bits = every_pattern(published)
    back = cast.narrow(cast.widen(bits))
    assert back is not None
    assert np.array_equal(back, bits)


@pytest.mark.parametrize(("published", "runtime"), EXACT)
def test_every_number_is_widened_as_torch_does(published: str, runtime: str) -> None:
    bits = every_pattern(published)
    signed = bits if bits.itemsize == 1 else bits.view(np.int16)
    numbers = torch.from_numpy(signed).view(TORCH[published])
    is_number = ~numbers.to(torch.float64).isnan().numpy()
    wanted = view_tensor("", numbers.to(TORCH[runtime])).array
    found = Cast(dtype_named(published), dtype_named(runtime)).widen(bits)
    assert np.array_equal(found[is_number], wanted[is_number])


@pytest.mark.parametrize(("published", "runtime"), EXACT[:-1])
def test_bits_that_nobody_published_are_noticed(published: str, runtime: str) -> None:
    cast = cast_between(dtype_named(published), dtype_named(runtime))
    wide = cast.widen(every_pattern(published))
    wide[5] ^= 1
    assert cast.narrow(wide) is None


def test_float32_widens_to_float64() -> None:
    cast = cast_between(dtype_named("F32"), dtype_named("F64"))
    bits = np.random.default_rng(0).standard_normal(1000).astype(np.float32).view(np.uint32)
    back = cast.narrow(cast.widen(bits))
    assert back is not None
    assert np.array_equal(back, bits)


@pytest.mark.parametrize(
    ("published", "runtime"), [("F32", "BF16"), ("BF16", "F16"), ("F16", "BF16"), ("I32", "F32")]
)
def test_cast_that_rounds_is_refused(published: str, runtime: str) -> None:
    with pytest.raises(UnsupportedLayout, match="not exact"):
        cast_between(dtype_named(published), dtype_named(runtime))
