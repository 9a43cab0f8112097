"""What counts as a tensor: NumPy, scalars, DLPack, torch; and what is refused, by which name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import weightwire as ww
from weightwire.diff.views import _NUMPY_NAMES, view_tensor
from weightwire.errors import DuplicateTensor, LimitExceeded, UnsupportedDType, UnsupportedLayout


class OnlyDLPack:
    """A tensor of a library nobody knows: it can be exchanged, and nothing else."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("dtype", list(_NUMPY_NAMES), ids=str)
def test_every_numpy_type_is_patched_bit_for_bit(dtype: np.dtype[Any]) -> None:
    raw = np.arange(16 * dtype.itemsize, dtype=np.uint8) % (2 if dtype == np.bool_ else 251)
    base, target = {"x": raw.view(dtype).copy()}, {"x": raw[::-1].copy().view(dtype)}
    ww.apply(base, ww.diff(dict(base), target))
    assert base["x"].tobytes() == target["x"].tobytes()
    assert ww.digest(base) == ww.digest(target)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.uint8, np.complex64])
def test_dlpack_objects_are_read_and_written_in_place(dtype: type) -> None:
    array = np.arange(24).astype(dtype).reshape(4, 6)
    target = array + np.ones((), dtype)
    patch = ww.diff({"x": array.copy()}, {"x": target})
    assert ww.diff({"x": OnlyDLPack(array)}, {"x": OnlyDLPack(target)}).index == patch.index
    ww.apply({"x": OnlyDLPack(array)}, patch)
    assert array.tobytes() == target.tobytes()


def test_dlpack_objects_of_any_strides_are_read_and_written() -> None:
    array = np.arange(24.0).reshape(4, 6)
    target = array * 2
    patch = ww.diff({"x": array.T.copy()}, {"x": target.T.copy()})
    ww.apply({"x": OnlyDLPack(array.T)}, patch)
    assert array.tobytes() == target.tobytes()


def test_dlpack_object_that_cannot_be_exchanged_is_refused() -> None:
    class Broken(OnlyDLPack):
        def __dlpack__(self, **options: Any) -> Any:
            raise RuntimeError("on another device")

    with pytest.raises(UnsupportedLayout, match="'x'"):
        ww.digest({"x": Broken(np.zeros(3))})


@pytest.mark.parametrize("tensor", [[1, 2], None, "text", b"bytes", {"a": 1}, object()])
def test_things_that_are_no_tensors_are_refused(tensor: object) -> None:
    with pytest.raises((UnsupportedLayout, UnsupportedDType), match="'x'"):
        ww.digest({"x": tensor})


@pytest.mark.parametrize("dtype", ["O", "U3", "M8[s]", "c16", "V4", "f4,i4", ml_dtypes.int4])
def test_types_without_a_code_are_refused(dtype: Any) -> None:
    with pytest.raises(UnsupportedDType, match="'x'"):
        ww.digest({"x": np.zeros(3, dtype)})


def test_big_endian_memory_is_refused() -> None:
    with pytest.raises(UnsupportedLayout, match="big-endian"):
        ww.digest({"x": np.zeros(3, ">f4")})


def test_name_twice_in_a_stream_is_refused() -> None:
    with pytest.raises(DuplicateTensor, match="'x' occurs twice"):
        ww.digest([("x", np.zeros(3)), ("y", np.ones(3)), ("x", np.zeros(3))])
    tied = np.zeros(3)
    with pytest.raises(DuplicateTensor, match="'y' occurs twice"):
        ww.digest([("x", tied), ("y", tied), ("y", tied)])


def test_name_longer_than_any_reader_accepts_is_refused() -> None:
    assert ww.digest({"é" * 2048: np.zeros(1)})
    with pytest.raises(LimitExceeded, match="name longer"):
        ww.digest({"é" * 2049: np.zeros(1)})


def test_more_dimensions_than_any_reader_accepts_are_refused() -> None:
    with pytest.raises(LimitExceeded, match="dimensions"):
        ww.digest({"x": np.zeros((1,) * 17)})


def test_broadcast_memory_can_be_compared() -> None:
    wide = np.broadcast_to(np.arange(5, dtype=np.int16), (1000, 5))
    assert ww.digest({"x": wide}) == ww.digest({"x": wide.copy()})
    patch = ww.diff({"x": wide}, {"x": wide + np.int16(1)})
    assert patch.n_changed == 5000


def test_view_shares_the_memory_it_shows() -> None:
    array = np.zeros((3, 4), np.float32)
    view = view_tensor("x", array)
    array[2, 3] = 1.5
    assert view.read(11, 12).tolist() == [0x3FC00000]


def torch_or_skip() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def test_torch_tensors_are_patched_like_numpy_arrays() -> None:
    torch = torch_or_skip()
    for name in (
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "int8",
        "bool",
        "uint16",
        "float8_e4m3fn",
    ):
        kind = getattr(torch, name)
        base = {"x": torch.arange(24).to(torch.float32).reshape(4, 6).to(kind)}
        target = {"x": (torch.arange(24) % 5).to(torch.float32).reshape(4, 6).to(kind)}
        live = {"x": base["x"].clone()}
        memory = live["x"].data_ptr()
        ww.apply(live, ww.diff(base, target))
        assert live["x"].data_ptr() == memory
        assert torch.equal(live["x"].view(torch.uint8), target["x"].view(torch.uint8))


def test_torch_modules_are_patched_in_place_with_ties_and_strides() -> None:
    torch = torch_or_skip()

    def module(scale: float) -> Any:
        made = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
        made["b"].weight = made["a"].weight
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) * scale)
        return made

    live, target = module(1.0), module(1.5)
    patch = ww.diff(module(1.0), target)
    assert patch.index.tied == {"b.weight": "a.weight"}
    ww.apply(live, patch)
    assert ww.digest(live) == ww.digest(target)
    assert live["b"].weight is live["a"].weight


def test_torch_tensors_with_strides_and_new_torch_tensors() -> None:
    torch = torch_or_skip()
    base = {"x": torch.arange(24.0).reshape(4, 6).t(), "g": torch.zeros(2)}
    target = {
        "x": (torch.arange(24.0) * 2).reshape(4, 6).t(),
        "n": torch.ones(3, dtype=torch.bfloat16),
    }
    live = {"x": torch.arange(24.0).reshape(4, 6).t(), "g": torch.zeros(2)}
    ww.apply(live, ww.diff(base, target))
    assert torch.equal(live["x"], target["x"])
    assert torch.equal(live["n"], target["n"])
    assert live["n"].dtype == torch.bfloat16
    assert "g" not in live


def test_torch_tensors_that_cannot_be_viewed_are_refused() -> None:
    torch = torch_or_skip()
    for tensor in (torch.zeros(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(UnsupportedLayout, match="'x'"):
            ww.digest({"x": tensor})
    with pytest.raises(UnsupportedLayout, match="conj"):
        ww.digest({"x": torch.ones(3, dtype=torch.complex64).conj()})
    with pytest.raises(UnsupportedDType, match="'x'"):
        ww.digest({"x": torch.zeros(3, dtype=torch.complex128)})


def test_torch_tensor_behind_dlpack_is_read_and_written() -> None:
    torch = torch_or_skip()
    base, target = torch.arange(8.0).bfloat16(), (torch.arange(8.0) * 2).bfloat16()
    live = base.clone()
    ww.apply({"x": OnlyDLPack(live)}, ww.diff({"x": base}, {"x": target}))
    assert torch.equal(live, target)
