"""The container header: agreement with the safetensors library, and every lie a file can tell."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from weightwire import limits
from weightwire.container import Header, build_header, read_header
from weightwire.errors import (
    DuplicateTensor,
    LimitExceeded,
    MalformedHeader,
    StopError,
    TruncatedFile,
    UnsupportedDType,
    WeightwireError,
)
from weightwire.model import TensorSpec, dtype_named


def read(path: Path) -> Header:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_header(descriptor, os.fstat(descriptor).st_size, str(path))
    finally:
        os.close(descriptor)


def write(path: Path, header: object, n_bytes_data: int = 0) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(n_bytes_data))
    return path


def tensor(
    dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def spec(name: str, dtype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, dtype_named(dtype), shape)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "empty": np.zeros((0, 5), np.int64),
        "scalar": np.array(7, np.uint8),
        "größe.0": np.ones(3, np.float16),
    }
    save_file(arrays, tmp_path / "a.safetensors", metadata={"format": "np"})
    header = read(tmp_path / "a.safetensors")
    assert {name: entry.spec.shape for name, entry in header.entries.items()} == {
        name: array.shape for name, array in arrays.items()
    }
    assert header.metadata == {"format": "np"}
    data = (tmp_path / "a.safetensors").read_bytes()[header.data_start :]
    for name, entry in header.entries.items():
        assert data[entry.start : entry.stop] == arrays[name].tobytes()


def test_the_library_reads_what_is_built(tmp_path: Path) -> None:
    specs = [spec("b", "F32", 2, 3), spec("é", "U16"), spec("none", "I64", 0), spec("a", "U8", 2)]
    data = os.urandom(28)
    built = build_header(specs, {"format": "pt"})
    (tmp_path / "a.safetensors").write_bytes(built + data)
    arrays = load_file(tmp_path / "a.safetensors")
    assert len(built) % 8 == 0
    assert b"".join(arrays[each.name].tobytes() for each in specs) == data
    with safe_open(tmp_path / "a.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_builds_the_very_bytes_the_library_writes(tmp_path: Path) -> None:
    save_file({"w": np.ones((2, 3), np.float32), "v": np.ones(3, np.uint8)}, tmp_path / "a")
    header = read(tmp_path / "a")
    built = build_header([entry.spec for entry in header.entries.values()], header.metadata)
    assert (tmp_path / "a").read_bytes()[: header.data_start] == built


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.text(max_size=8),
            st.sampled_from(["BOOL", "F8_E4M3", "BF16", "F32", "F64", "C64"]),
            st.lists(st.integers(0, 4), max_size=4),
        ),
        max_size=6,
        unique_by=lambda each: each[0],
    )
)
def test_what_is_built_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[tuple[str, str, list[int]]]
) -> None:
    specs = [spec(name, dtype, *shape) for name, dtype, shape in drawn]
    path = tmp_path_factory.mktemp("built") / "a"
    path.write_bytes(build_header(specs, {}) + bytes(sum(each.n_bytes for each in specs)))
    assert {name: entry.spec for name, entry in read(path).entries.items()} == {
        each.name: each for each in specs
    }


def test_a_file_without_tensors_is_sound(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(build_header([], {}))
    assert read(tmp_path / "a").entries == {}


@pytest.mark.parametrize(
    ("header", "n_bytes_data", "error", "message"),
    [
        (b"", 0, MalformedHeader, "starts with"),
        (b"[]", 0, MalformedHeader, "starts with"),
        (b" {}", 0, MalformedHeader, "starts with"),
        (b"{]", 0, MalformedHeader, "not JSON"),
        (b'{"a":\xff}', 0, MalformedHeader, "UTF-8"),
        (b'{"a":' * 999, 0, LimitExceeded, "nested deeper"),
        (b'{"a":1,"a":2}', 0, MalformedHeader, "'a' occurs twice"),
        ({"__metadata__": []}, 0, MalformedHeader, "not a map"),
        ({"__metadata__": {"k": 1}}, 0, MalformedHeader, r"'k'.*1, not a string"),
        ({"w": 3}, 0, MalformedHeader, "'w'.*described by 3"),
        ({"w": {**tensor(), "extra": 1}}, 8, MalformedHeader, "exactly"),
        ({"w": {"dtype": "F32", "shape": [2]}}, 8, MalformedHeader, "exactly"),
        ({"w": tensor(dtype=["F32"])}, 8, MalformedHeader, "dtype"),
        ({"w": tensor(dtype="F4")}, 8, UnsupportedDType, "'w'.*'F4'"),
        ({"w": tensor(dtype="F6_E2M3")}, 8, UnsupportedDType, "F6_E2M3"),
        ({"w": tensor(dtype="x" * 10**6)}, 8, UnsupportedDType, "xxx"),
        ({"w": tensor(shape=2)}, 8, MalformedHeader, "shape"),
        ({"w": tensor(shape=[2.0])}, 8, MalformedHeader, "shape"),
        ({"w": tensor(shape=[True, 2])}, 8, MalformedHeader, "shape"),
        ({"w": tensor(shape=[-2, -1])}, 8, MalformedHeader, "shape"),
        ({"w": tensor(shape=["2"])}, 8, MalformedHeader, "shape"),
        ({"w": tensor(shape=[1] * 17 + [2])}, 8, LimitExceeded, "'w'"),
        ({"w": tensor(shape=[2**62, 4])}, 8, LimitExceeded, "'w'"),
        ({"w" * 5000: tensor()}, 8, LimitExceeded, "longer than"),
        ({"w": tensor(shape=[3])}, 8, MalformedHeader, "needs 12 bytes.*span 8"),
        ({"w": tensor(offsets=[0])}, 8, MalformedHeader, "data_offsets"),
        ({"w": tensor(offsets=[8, 0])}, 8, MalformedHeader, "data_offsets"),
        ({"w": tensor(offsets=[0, False])}, 8, MalformedHeader, "data_offsets"),
        ({"w": tensor(offsets=[0, 8.0])}, 8, MalformedHeader, "data_offsets"),
        (
            b'{"w":{"dtype":"U8","shape":[],"data_offsets":[0,1' + b"0" * 99 + b"]}}",
            1,
            MalformedHeader,
            "integer of",
        ),
        (b'{"w":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', 1, MalformedHeader, "NaN"),
        ({"w": tensor(offsets=[4, 12])}, 12, MalformedHeader, "'w' leaves a gap"),
        ({"w": tensor(), "v": tensor(offsets=[4, 12])}, 12, MalformedHeader, "'v' overlaps"),
        ({"w": tensor(), "v": tensor()}, 8, MalformedHeader, "overlaps"),
        ({"w": tensor(), "v": tensor(offsets=[9, 17])}, 17, MalformedHeader, "'v' leaves a gap"),
        ({"w": tensor()}, 9, MalformedHeader, "accounts for"),
        ({}, 1, MalformedHeader, "accounts for"),
        ({"w": tensor()}, 7, TruncatedFile, "promises"),
    ],
)
def test_a_lying_header_is_refused_by_name(
    tmp_path: Path, header: object, n_bytes_data: int, error: type[Exception], message: str
) -> None:
    path = write(tmp_path / "bad.safetensors", header, n_bytes_data)
    with pytest.raises(error, match=rf"(?s)bad\.safetensors.*{message}"):
        read(path)


def test_a_length_beyond_the_cap_is_not_allocated(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(LimitExceeded, match=str(2**63)):
        read(tmp_path / "a")


def test_a_length_beyond_the_file_is_truncation(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(struct.pack("<Q", 99) + b"{}")
    with pytest.raises(TruncatedFile, match="99"):
        read(tmp_path / "a")


@pytest.mark.parametrize("n_bytes", [0, 7])
def test_a_file_without_a_whole_length_is_truncation(tmp_path: Path, n_bytes: int) -> None:
    (tmp_path / "a").write_bytes(bytes(n_bytes))
    with pytest.raises(TruncatedFile, match="fetch"):
        read(tmp_path / "a")


def test_more_tensors_than_the_cap_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_TENSORS", 1)
    with pytest.raises(LimitExceeded, match="2 tensors"):
        read(write(tmp_path / "a", {"a": tensor(), "b": tensor(offsets=[8, 16])}, 16))
    with pytest.raises(LimitExceeded, match="2 tensors"):
        build_header([spec("a", "U8"), spec("b", "U8")], {})


@pytest.mark.parametrize(
    ("build", "error"),
    [
        (lambda: build_header([spec("a", "U8"), spec("a", "U8")], {}), DuplicateTensor),
        (lambda: build_header([spec("__metadata__", "U8")], {}), MalformedHeader),
        (lambda: build_header([spec("\ud800", "U8")], {}), StopError),
    ],
)
def test_a_header_no_reader_would_take_is_not_built(
    build: Callable[[], bytes], error: type[Exception]
) -> None:
    with pytest.raises(error):
        build()


def test_a_header_over_the_cap_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HEADER_BYTES", 16)
    with pytest.raises(LimitExceeded, match="cap is 16"):
        build_header([spec("a", "U8")], {})


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=64), st.integers(0, 200))
def test_a_damaged_header_never_fails_untyped(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, place: int
) -> None:
    sound = build_header([spec("w", "F32", 2), spec("v", "BF16", 3)], {"k": "v"}) + bytes(14)
    path = tmp_path_factory.mktemp("noise") / "a"
    path.write_bytes(sound[:place] + noise + sound[place + len(noise) :])
    with contextlib.suppress(WeightwireError):
        read(path)
