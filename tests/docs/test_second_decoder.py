"""Is the document right? A decoder written from it alone must give what the library gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import second_decoder as second

import weightwire as ww
from weightwire import limits
from weightwire.bench.generate import (
    draw_masters,
    draw_steps,
    format_of,
    random_source,
    round_masters,
)
from weightwire.codec.record import Kind
from weightwire.diff.memory import open_state
from weightwire.diff.views import _NUMPY_TYPES
from weightwire.kernels.contract import DENSE
from weightwire.kernels.reference import EXCEPTIONS
from weightwire.model import dtype_named

Arrays = Mapping[str, npt.NDArray]
CODES = {name: dtype_named(name).code for name in _NUMPY_TYPES}
CODECS = ("compact", "plain")


def as_lists(state: Arrays) -> second.State:
    """A state as the second decoder sees it."""
    reader = open_state(state)
    found = {
        name: second.Tensor(
            spec.dtype.code, spec.shape, reader.read(name, 0, spec.n_elements).tolist()
        )
        for name, spec in reader.specs.items()
    }
    return found | {alias: found[name] for alias, name in reader.ties.items()}


def assert_second_decoder_agrees(base: Arrays, target: Arrays, patch: ww.Patch, at: Path) -> None:
    """Save the patch, decode it with the second decoder, compare every bit with the target."""
    patch.save(at)
    assert second.apply_folder(at, as_lists(base)) == as_lists(target)


def view(bits: npt.NDArray, name: str) -> npt.NDArray:
    """Bits as an array of a named type."""
    return np.ascontiguousarray(bits).view(_NUMPY_TYPES[name])


def trained_pair(name: str, n: int, rate: float) -> tuple[npt.NDArray, npt.NDArray]:
    """Two versions of a tensor as a step of this learning rate makes them.

    Every fp32 element takes part in any step, so there only some elements take one.
    """
    form, source = format_of(dtype_named(name)), random_source(7, n)
    masters = draw_masters(source, n, form)
    steps = draw_steps(source, n, rate * form.scale)
    if name == "F32":
        steps *= source.random(n) < min(2e3 * rate, 0.5)
    return view(round_masters(masters, form), name), view(
        round_masters(masters + steps, form), name
    )


def random_pair(name: str, n: int, density: float) -> tuple[npt.NDArray, npt.NDArray]:
    """Any bits at all, and some of them replaced by any other bits."""
    rng = np.random.default_rng(n)
    dtype = dtype_named(name)
    top = 2 if name == "BOOL" else 1 << 8 * dtype.n_bytes
    old = rng.integers(0, top, n, dtype=dtype.bits_dtype, endpoint=False)
    new = np.where(rng.random(n) < density, rng.integers(0, top, n, dtype=old.dtype), old)
    return view(old, name), view(new.astype(old.dtype), name)


def chunk_heads(patch: ww.Patch) -> list[int]:
    """The first directory word of every chunk of every coded record."""
    pieces = [record.piece() for record in patch.records() if record.head.kind is not Kind.FULL]
    return [int(head) for piece in pieces for head in piece.streams.directory[:, 0]]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("rate", [3e-7, 1e-5, 3e-4])
def test_trained_changes_decode_to_the_same_bits(
    name: str, rate: float, codec: str, tmp_path: Path
) -> None:
    old, new = trained_pair(name, 20_000, rate)
    patch = ww.diff({"w": old}, {"w": new}, codec=codec)
    assert_second_decoder_agrees({"w": old}, {"w": new}, patch, tmp_path / "patch")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", sorted(CODES))
def test_every_type_decodes_to_the_same_bits(name: str, codec: str, tmp_path: Path) -> None:
    old, new = random_pair(name, 3_001, 0.05)
    patch = ww.diff({"w": old}, {"w": new}, codec=codec)
    assert_second_decoder_agrees({"w": old}, {"w": new}, patch, tmp_path / "patch")


def test_many_chunks_decode_to_the_same_bits(tmp_path: Path) -> None:
    old, new = trained_pair("BF16", 100_000, 4e-5)
    patch = ww.diff({"w": old}, {"w": new})
    assert len(chunk_heads(patch)) > 8
    assert_second_decoder_agrees({"w": old}, {"w": new}, patch, tmp_path / "patch")


def test_expected_classes_decode_to_the_same_bits(tmp_path: Path) -> None:
    old, new = trained_pair("BF16", 30_000, 1e-4)
    patch = ww.diff({"w": old}, {"w": new})
    model = next(patch.records()).piece().model
    assert model is not None
    assert any(model.expected)
    assert_second_decoder_agrees({"w": old}, {"w": new}, patch, tmp_path / "patch")


def test_dense_chunks_decode_to_the_same_bits(tmp_path: Path) -> None:
    old, new = random_pair("I16", 9_001, 1.0)
    patch = ww.diff({"w": old}, {"w": new})
    assert any(head & DENSE for head in chunk_heads(patch))
    assert_second_decoder_agrees({"w": old}, {"w": new}, patch, tmp_path / "patch")


@pytest.mark.parametrize("name", ["BF16", "F8_E4M3", "F32", "F64"])
def test_exceptions_decode_to_the_same_bits(name: str, tmp_path: Path) -> None:
    """One class, nearly always one step, and two changes that its table cannot say."""
    dtype = dtype_named(name)
    old = np.full(12_000, 5 << dtype.key_shift, dtype=dtype.bits_dtype)
    old[::3] += 1
    new = old.copy()
    new[::4] ^= 1
    new[[7, 9_001]] ^= old.dtype.type(1 << (8 * dtype.n_bytes - 1))
    base, target = {"w": view(old, name)}, {"w": view(new, name)}
    patch = ww.diff(base, target)
    assert any(head & EXCEPTIONS for head in chunk_heads(patch))
    assert_second_decoder_agrees(base, target, patch, tmp_path / "patch")


def test_long_gaps_decode_to_the_same_bits(tmp_path: Path) -> None:
    """A burst of changes, then none for so long that the continue symbol is needed."""
    old, _ = trained_pair("BF16", 60_000, 1e-6)
    new = old.copy()
    bits = new.view("<u2")
    bits[:200] ^= 1
    bits[-3:] ^= 1
    patch = ww.diff({"w": old}, {"w": new})
    assert_second_decoder_agrees({"w": old}, {"w": new}, patch, tmp_path / "patch")


@pytest.mark.parametrize("codec", CODECS)
def test_pieces_and_buckets_decode_to_the_same_bits(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PIECE_ELEMENTS", 7_000)
    old, new = trained_pair("BF16", 30_000, 1e-6)
    state = {"a": old, "ä": old[:5].copy()}
    target = {"a": new, "ä": old[:5].copy()}
    patch = ww.diff(state, target, codec=codec)
    assert len(patch.heads["a"]) == 5
    assert_second_decoder_agrees(state, target, patch, tmp_path / "patch")


@pytest.mark.parametrize("codec", CODECS)
def test_new_removed_retyped_reshaped_tied_and_empty_tensors_decode_to_the_same_bits(
    codec: str, tmp_path: Path
) -> None:
    old, new = trained_pair("BF16", 6_000, 1e-6)
    shared = np.arange(12, dtype=np.float32).reshape(3, 4)
    base = {
        "kept": np.arange(5, dtype=np.int64),
        "removed": np.ones(3, dtype=np.float16),
        "retyped": np.ones(4, dtype=np.float32),
        "reshaped": old.reshape(60, 100),
        "scalar": np.array(1.5, dtype=np.float64),
        "empty": np.empty((0, 3), dtype=ml_dtypes.bfloat16),
    }
    target = {
        "kept": np.arange(5, dtype=np.int64),
        "retyped": np.ones(4, dtype=np.uint8),
        "reshaped": new.reshape(100, 60),
        "scalar": np.array(-1.5, dtype=np.float64),
        "empty": np.empty((0, 3), dtype=ml_dtypes.bfloat16),
        "new": shared,
        "new.alias": shared,
        "new.bytes": np.arange(7, dtype=np.uint8),
    }
    patch = ww.diff(base, target, codec=codec)
    assert_second_decoder_agrees(base, target, patch, tmp_path / "patch")


@pytest.mark.parametrize("are_copies", [True, False])
def test_a_tensor_that_becomes_tied_decodes_to_the_same_bits(
    are_copies: bool, tmp_path: Path
) -> None:
    old, new = trained_pair("BF16", 2_000, 1e-6)
    base = {"a": old, "b": old.copy() if are_copies else new.copy()}
    target = {"a": new, "b": new}
    patch = ww.diff(base, target)
    assert patch.index.tied == {"b": "a"}
    assert_second_decoder_agrees(base, target, patch, tmp_path / "patch")


def test_a_merged_patch_decodes_to_the_same_bits(tmp_path: Path) -> None:
    first, second_version = trained_pair("BF16", 8_000, 1e-6)
    third = second_version.copy()
    third.view("<u2")[::97] ^= 1
    states = [{"w": first}, {"w": second_version}, {"w": third}]
    patches = [ww.diff(a, b, codec="plain") for a, b in pairwise(states)]
    merged = ww.merge(None, *patches)
    assert_second_decoder_agrees(states[0], states[2], merged, tmp_path / "patch")


def test_a_patch_without_changes_decodes_to_its_base(tmp_path: Path) -> None:
    old, _ = trained_pair("BF16", 1_000, 1e-6)
    patch = ww.diff({"w": old}, {"w": old.copy()})
    assert_second_decoder_agrees({"w": old}, {"w": old}, patch, tmp_path / "patch")


def test_the_second_decoder_refuses_a_wrong_base(tmp_path: Path) -> None:
    old, new = trained_pair("BF16", 1_000, 1e-6)
    ww.diff({"w": old}, {"w": new}).save(tmp_path / "patch")
    with pytest.raises(second.Refused, match="base digest"):
        second.apply_folder(tmp_path / "patch", as_lists({"w": new}))


def test_the_second_decoder_refuses_a_damaged_bucket(tmp_path: Path) -> None:
    old, new = trained_pair("BF16", 1_000, 1e-6)
    ww.diff({"w": old}, {"w": new}).save(tmp_path / "patch")
    bucket = tmp_path / "patch" / "bucket-00000.safetensors"
    raw = bytearray(bucket.read_bytes())
    raw[-1] ^= 1
    bucket.write_bytes(raw)
    with pytest.raises(second.Refused, match="hash"):
        second.apply_folder(tmp_path / "patch", as_lists({"w": old}))


def test_digests_agree_far_into_a_tensor() -> None:
    from weightwire.digest import digest_bits

    bits = np.random.default_rng(1).integers(0, 1 << 16, 700, dtype=np.uint16)
    for first in (0, 255, (1 << 32) - 3, (1 << 38) - 700):
        found = digest_bits(bits, first)
        assert second.digest(bits.tolist(), 19, first) == (found.low, found.high)
    wide = np.random.default_rng(2).integers(0, 1 << 63, 700, dtype=np.uint64)
    for first in (0, 127, (1 << 37) - 100):
        found = digest_bits(wide, first)
        assert second.digest(wide.tolist(), 66, first) == (found.low, found.high)


def test_the_index_fields_are_those_of_the_document(tmp_path: Path) -> None:
    old, new = trained_pair("BF16", 1_000, 1e-6)
    ww.diff({"w": old}, {"w": new}).save(tmp_path / "patch")
    index = json.loads((tmp_path / "patch" / "patch.json").read_text())
    document = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    section = document.split("## 3. patch.json")[1].split("## 4.")[0]
    for field in index:
        assert f"| `{field}` |" in section
