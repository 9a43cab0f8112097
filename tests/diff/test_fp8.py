"""8-bit views: the bits and scales that quantising the whole tensor at once would give."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import weightwire as ww
from weightwire.diff.fp8 import Scales, fp8, power_of_two_bits
from weightwire.diff.memory import open_state
from weightwire.errors import DuplicateTensor, StopError


def matrix(n_rows: int, n_columns: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n_rows, n_columns)) * 0.02).astype("f4")


def dequantised(state: object, name: str, block: int | None) -> np.ndarray:
    """What a receiver computes with: bits times scales."""
    view = open_state(state)
    spec = view.specs[name]
    bits = view.read(name, 0, spec.n_elements).view(ml_dtypes.float8_e4m3fn).reshape(spec.shape)
    scale_name = f"{name}_scale" if block is None else f"{name}_scale_inv"
    scale_spec = view.specs[scale_name]
    scales = view.read(scale_name, 0, scale_spec.n_elements).view("f4").reshape(scale_spec.shape)
    if block is not None:
        scales = np.repeat(np.repeat(scales, block, 0), block, 1)[: spec.shape[0], : spec.shape[1]]
    return bits.astype("f4") * scales


@pytest.mark.parametrize("scales", ["power of two", "exact"])
@pytest.mark.parametrize("block", [None, 4, 128])
def test_bits_times_scales_are_the_weights_to_three_bits(block: int | None, scales: Scales) -> None:
    weight = matrix(11, 7)
    view = fp8({"a.weight": weight}, block=block, scales=scales)
    error = np.abs(dequantised(view, "a.weight", block) - weight)
    assert (error <= np.abs(weight) / 16 + 1e-5).all()


@pytest.mark.parametrize("block", [None, 4])
def test_any_piece_has_the_bits_of_the_whole(block: int | None) -> None:
    view = open_state(fp8({"a.weight": matrix(9, 13)}, block=block))
    whole = view.read("a.weight", 0, 117).tobytes()
    parts = [view.read("a.weight", at, min(at + 5, 117)).tobytes() for at in range(0, 117, 5)]
    assert b"".join(parts) == whole


def test_torch_and_numpy_states_have_the_same_view() -> None:
    weight = torch.from_numpy(matrix(8, 8)).to(torch.bfloat16)
    array = weight.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    assert ww.digest(fp8({"a.weight": weight})) == ww.digest(fp8({"a.weight": array}))


def test_only_matrices_of_linear_layers_are_quantised_by_default() -> None:
    state = {
        name: matrix(4, 4) for name in ("embed.weight", "norm.weight", "q.weight", "lm_head.weight")
    }
    state["q.bias"] = np.ones(4, "f4")
    specs = open_state(fp8(state)).specs
    assert {name for name, spec in specs.items() if spec.dtype.name == "F8_E4M3"} == {"q.weight"}
    assert specs["q.weight_scale_inv"].shape == (1, 1)
    assert len(specs) == 6


def test_zeros_infinities_and_nothing_at_all_are_quantised() -> None:
    state = {"a.weight": np.zeros((3, 3), "f4"), "b.weight": np.full((2, 2), np.inf, "f4")}
    state["c.weight"] = np.zeros((0, 5), "f4")
    view = open_state(fp8(state, block=2))
    assert view.read("a.weight", 0, 9).tobytes() == bytes(9)
    assert view.read("b.weight", 0, 4).view(ml_dtypes.float8_e4m3fn).astype("f4").max() == 448
    assert view.specs["c.weight_scale_inv"].shape == (0, 3)
    assert ww.digest(view) == ww.digest(open_state(fp8(state, block=2)))


def test_scales_of_two_stay_while_the_weights_drift() -> None:
    weight = matrix(64, 64)
    before, after = ({"a.weight": each} for each in (weight, weight * np.float32(1.0001)))
    sparse, dense = (
        ww.diff(fp8(before, block=16, scales=kind), fp8(after, block=16, scales=kind)).n_changed
        for kind in ("power of two", "exact")
    )
    assert 0 < sparse < 64 * 64 / 100
    assert dense >= 16  # every scale at least


def test_what_cannot_be_quantised_is_refused() -> None:
    with pytest.raises(StopError, match="blocks of 0"):
        fp8({}, block=0)
    with pytest.raises(StopError, match="'wild'"):
        fp8({}, scales="wild")  # type: ignore[arg-type]
    with pytest.raises(DuplicateTensor, match="scale_inv"):
        ww.digest(fp8({"a.weight": matrix(2, 2), "a.weight_scale_inv": matrix(1, 1)}))


def test_a_scale_is_the_next_power_of_two() -> None:
    powers = np.ldexp(np.float32(1), np.arange(-126, 120)).astype("f4")
    up, down = (np.nextafter(powers, np.float32(to)) for to in (np.inf, 0))
    for numbers, expected in ((powers, powers), (up, powers * 2), (down[1:], powers[1:])):
        rounded = power_of_two_bits(numbers.view(np.int32)).view(np.float32)
        assert rounded.tobytes() == expected.tobytes()


@pytest.mark.parametrize("scales", ["power of two", "exact"])
def test_the_largest_weight_of_a_block_always_fits(scales: Scales) -> None:
    peaks = np.ldexp(np.linspace(1, 2, 50, dtype="f4"), np.arange(-100, 100, 4)).astype("f4")
    view = open_state(fp8({"a.weight": peaks[:, None]}, block=1, scales=scales))
    bits = view.read("a.weight", 0, 50).view(ml_dtypes.float8_e4m3fn).astype("f4")
    assert bits.max() <= 448
    assert bits.min() >= (224 if scales == "power of two" else 448)
