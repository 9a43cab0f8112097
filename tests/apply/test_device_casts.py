"""Casts on a device are the host's, for every pattern there is."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="devices are reached through torch")

from weightwire.apply.layouts.casts import Cast  # noqa: E402
from weightwire.apply.layouts.device_casts import is_on_device, narrow, widen  # noqa: E402
from weightwire.diff.views import as_torch  # noqa: E402
from weightwire.model import Bits, DType, dtype_named  # noqa: E402

PAIRS = [
    ("BF16", "F32"),
    ("F16", "F32"),
    ("F8_E4M3", "F16"),
    ("F8_E4M3", "BF16"),
    ("F8_E5M2", "BF16"),
    ("F8_E5M2", "F32"),
    ("BF16", "BF16"),
]
INTEGERS = {1: "U8", 2: "I16", 4: "I32"}


def cast_of(published: str, runtime: str) -> Cast:
    return Cast(dtype_named(published), dtype_named(runtime))


def every(dtype: DType) -> Bits:
    return np.arange(1 << 8 * dtype.n_bytes).astype(dtype.bits_dtype)


def on(device: torch.device, bits: Bits) -> torch.Tensor:
    return as_torch(bits.copy(), dtype_named(INTEGERS[bits.itemsize])).to(device)


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().numpy().tobytes())


@pytest.mark.parametrize(("published", "runtime"), PAIRS)
def test_every_pattern_goes_there_as_on_the_host_and_comes_back(
    published: str, runtime: str, device: torch.device
) -> None:
    cast = cast_of(published, runtime)
    bits = every(cast.published)
    wide = widen(cast, on(device, bits))
    assert as_bytes(wide) == cast.widen(bits).tobytes()
    back = narrow(cast, wide)
    assert back is not None
    assert as_bytes(back) == bits.tobytes()


@pytest.mark.parametrize(("published", "runtime"), PAIRS[:-1])
def test_bits_that_nobody_published_are_found(
    published: str, runtime: str, device: torch.device
) -> None:
    cast = cast_of(published, runtime)
    wide = widen(cast, on(device, every(cast.published)[:200])).reshape(10, 20).t()
    assert narrow(cast, wide) is not None
    wide[3, 7] ^= 1
    assert narrow(cast, wide) is None


def test_elements_wider_than_kernels_know_are_left_to_the_host() -> None:
    assert is_on_device(cast_of("F64", "F64"))
    assert is_on_device(cast_of("F16", "F32"))
    assert not is_on_device(cast_of("F16", "F64"))
    assert not is_on_device(cast_of("F32", "F64"))
