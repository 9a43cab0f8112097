"""``weightwire inspect``, and what the coding model says about itself."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from sample_runs import make_pair, run, save

import weightwire
from weightwire.bench import generate_pair
from weightwire.codec.class_costs import tokens_of
from weightwire.codec.inspect import exponent_bias, inspect_patch
from weightwire.diff.memory import MemoryState
from weightwire.kernels.steps import token_of
from weightwire.model import dtype_named

RECORD_OVERHEAD_BYTES = 200
"""A record's head and model, which belong to no class."""


def trained_pair(n_elements: int = 1 << 20, density: float = 0.02) -> list[dict[str, np.ndarray]]:
    """A bf16 tensor before and after a step, as raw bits of its own type."""
    pair = generate_pair(n_elements, dtype_named("BF16"), density, seed=3)
    return [{"w": bits.view(ml_dtypes.bfloat16)} for bits in (pair.old, pair.new)]


def test_inspect_json_has_the_index_and_every_changed_tensor(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    found = run("inspect", pair.patch, "--json").json
    patch = weightwire.Patch.load(pair.patch)
    assert (found["n_elements"], found["n_changed"]) == (patch.n_elements, patch.n_changed)
    assert found["n_bytes"] == sum(f.stat().st_size for f in pair.patch.iterdir())
    assert found["format_version"] == 1
    assert found["codec"] == "compact"
    assert found["base_digest"] == patch.base_digest
    assert found["n_unchanged"] == 4
    assert found["removed"] == []
    assert len(found["buckets"]) == 1
    tensors = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert tensors.keys() == {"embed.weight", "layer.weight"}
    embed = tensors["embed.weight"]
    assert (embed["dtype"], embed["shape"], embed["n_changed"]) == ("BF16", [64, 50], 320)
    assert embed["density"] == 0.1
    assert embed["bits_per_change"] == 8 * embed["n_bytes"] / 320
    assert found["classes"] == []


def test_inspect_shows_the_largest_tensors_and_a_total(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    text = run("inspect", pair.patch, "--top", 1).stdout
    assert "embed.weight" in text
    assert "layer.weight" not in text
    assert "1 smaller ones not shown" in text
    assert "590" in text


def test_inspect_says_whether_classes_were_counted(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    assert "not counted" in run("inspect", pair.patch, "--by-class").stdout
    assert "Counted against the base" in run("inspect", pair.patch, "--base", pair.base).stdout


def test_inspect_with_a_wrong_base_is_refused(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    outcome = run("inspect", pair.patch, "--base", pair.target, "--json")
    assert outcome.json["error"]["type"] == "BaseMismatch"


def test_inspect_with_a_base_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    other = save(tmp_path / "other", "file", {"x": np.ones(3, np.float32)})
    outcome = run("inspect", pair.patch, "--base", other, "--json")
    assert outcome.json["error"]["type"] == "MissingTensor"


def test_a_plain_patch_has_no_classes(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, codec="plain")
    assert run("inspect", pair.patch, "--by-class", "--json").json["classes"] == []


def test_counted_classes_add_up_to_the_elements_and_changes() -> None:
    old, new = trained_pair()
    patch = weightwire.diff(old, new)
    summary = inspect_patch(patch, MemoryState(old.items()), by_class=True)
    assert sum(each.n_elements for each in summary.classes) == patch.n_elements
    assert sum(each.n_changed for each in summary.classes) == patch.n_changed


@pytest.mark.parametrize("density", [0.0001, 0.02, 1.0])
def test_counted_classes_are_those_of_the_base_whatever_the_chunk_size(density: float) -> None:
    old, new = trained_pair((1 << 20) + 77, density)
    patch = weightwire.diff(old, new)
    (record,) = patch.records()
    assert (record.piece().chunk_log2 > 18) == (density < 0.001)
    counted = inspect_patch(patch, MemoryState(old.items()), by_class=True).classes
    n_by_key = np.bincount(old["w"].view("<u2") >> 7 & 0xFF, minlength=256)
    first, *inner, last = counted
    assert [each.n_elements for each in inner] == [n_by_key[each.key] for each in inner]
    assert first.n_elements == n_by_key[: first.key + 1].sum()
    assert last.n_elements == n_by_key[last.key :].sum()


@pytest.mark.parametrize("density", [0.002, 0.02, 0.3])
def test_code_lengths_by_class_add_up_to_the_bytes_on_disk(density: float) -> None:
    old, new = trained_pair(density=density)
    patch = weightwire.diff(old, new)
    summary = inspect_patch(patch, MemoryState(old.items()), by_class=True)
    n_bits = sum(each.n_bits for each in summary.classes)
    n_stored = 8 * summary.tensors[0].n_bytes
    n_overhead = 8 * RECORD_OVERHEAD_BYTES
    assert n_stored - n_overhead - 0.03 * n_stored < n_bits < n_stored


def test_the_model_says_about_what_counting_says() -> None:
    old, new = trained_pair()
    patch = weightwire.diff(old, new)
    counted = inspect_patch(patch, MemoryState(old.items()), by_class=True)
    modelled = {each.key: each for each in inspect_patch(patch, by_class=True).classes}
    common = [each for each in counted.classes if each.n_changed > 500]
    assert len(common) > 5
    for each in common:
        assert modelled[each.key].density == pytest.approx(each.density, rel=0.5)
        assert modelled[each.key].bits_per_change == pytest.approx(each.bits_per_change, rel=0.3)


def test_exponents_are_powers_of_two() -> None:
    for name, one in {"BF16": 0x3F80, "F16": 0x3C00, "F32": 0x3F800000, "F8_E4M3": 0x38}.items():
        dtype = dtype_named(name)
        assert (one >> dtype.key_shift) & dtype.key_mask == exponent_bias(dtype)
    assert exponent_bias(dtype_named("F8_E4M3FNUZ")) == 8


def test_tokens_of_many_are_the_tokens_of_each() -> None:
    edges = [(1 << n) + offset for n in range(2, 63) for offset in (-1, 0, 1)]
    magnitudes = [*range(70), *edges, (1 << 63) - 1]
    found = tokens_of(np.array(magnitudes, dtype=np.uint64)).tolist()
    assert found == [token_of(magnitude) for magnitude in magnitudes]


def test_a_dense_patch_is_inspected_too() -> None:
    old, new = trained_pair(1 << 16, 1.0)
    patch = weightwire.diff(old, new)
    summary = inspect_patch(patch, MemoryState(old.items()), by_class=True)
    assert sum(each.n_changed for each in summary.classes) == patch.n_changed
    assert inspect_patch(patch, by_class=True).tensors[0].density == 1.0
