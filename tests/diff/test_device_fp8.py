"""8-bit floats that a device makes: the host's bits and scales, without the host."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from sample_device_states import TORCH_TYPES, Tensors, bits_of, drawn, on_host, train

import weightwire as ww
from hand_clock import HandClock
from sample_training import inline
from weightwire.diff.fp8 import Fp8Reader, Scales, fp8
from weightwire.diff.memory import MemoryState, open_state
from weightwire.store.memory import MemoryStore

pytest.importorskip("triton", reason="GPU kernels need triton")

from weightwire.diff import device_fp8

SHAPES = [(7, 13), (20, 18), (5, 3, 11), (1, 40), (40, 1), (37,), (), (0, 5), (5, 0)]
KINDS: list[Scales] = ["power of two", "exact"]


def every_finite_float(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """Random bits, some of them zeros and weights: subnormals and the largest numbers among them."""
    source = np.random.default_rng(seed)
    wide = torch.from_numpy(source.integers(0, 1 << 32, shape, dtype=np.uint32).astype(np.int32))
    bits = wide.to(torch.int32 if dtype == "fp32" else torch.int16)
    floats = bits.view(TORCH_TYPES[dtype]).reshape(shape)
    kind = torch.from_numpy(np.array(source.integers(0, 4, shape)))
    floats = torch.where(kind == 0, drawn(shape, dtype, seed), floats)
    return torch.where(torch.isfinite(floats) & (kind != 1), floats, torch.zeros_like(floats))


def quantised(state: Any, block: int | None, scales: Scales = "power of two") -> Fp8Reader:
    reader = open_state(fp8(state, block=block, scales=scales, only=lambda _: True))
    assert isinstance(reader, Fp8Reader)
    return reader


def whole(reader: Fp8Reader, *, on_device: bool) -> dict[str, bytes]:
    """Every bit, read where it is asked for."""
    read = reader.read_device if on_device else reader.read
    found = {}
    for name, spec in reader.specs.items():
        bits: Any = read(name, 0, spec.n_elements)
        found[name] = (bits.cpu().numpy() if on_device else bits).tobytes()
    return found


@pytest.mark.parametrize("n_part", [7, 100, 1 << 22])
@pytest.mark.parametrize("block", [None, 1, 3, 16, 1000])
@pytest.mark.parametrize("scales", KINDS)
def test_a_device_makes_the_hosts_bits(
    scales: Scales,
    block: int | None,
    n_part: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_fp8, "PART_ELEMENTS", n_part)
    state = {
        f"{dtype} {shape}": every_finite_float(shape, dtype, seed).to(device)
        for dtype in ("bf16", "fp16", "fp32")
        for seed, shape in enumerate(SHAPES)
    }
    expected = whole(quantised(on_host(state), block, scales), on_device=False)
    assert whole(quantised(state, block, scales), on_device=True) == expected
    assert whole(quantised(state, block, scales), on_device=False) == expected


@pytest.mark.parametrize("block", [None, 4])
def test_any_piece_has_the_bits_of_the_whole(block: int | None, device: torch.device) -> None:
    state = {"w": drawn((9, 13)).to(device)}
    expected = whole(quantised(state, block), on_device=True)["w"]
    reader = quantised(state, block)
    parts = [reader.read_device("w", at, min(at + 5, 117)) for at in range(0, 117, 5)]
    assert b"".join(part.cpu().numpy().tobytes() for part in parts if part is not None) == expected


@pytest.mark.parametrize("block", [None, 2])
def test_infinities_and_nans_have_the_hosts_scales(block: int | None, device: torch.device) -> None:
    weight = drawn((6, 4), "fp32")
    weight[0, 0], weight[3, 1], weight[5, 3] = float("nan"), float("inf"), -float("inf")
    state = {"w": weight.to(device)}
    host = whole(quantised(on_host(state), block), on_device=False)
    there = whole(quantised(state, block), on_device=True)
    assert there[scale_name(block)] == host[scale_name(block)]
    numbers = [np.frombuffer(each["w"], ml_dtypes.float8_e4m3fn) for each in (host, there)]
    assert np.array_equal(*(each.astype("f4") for each in numbers), equal_nan=True)
    assert numbers[1].astype("f4")[[13, 23]].tolist() == [448, -448]


def scale_name(block: int | None) -> str:
    return "w_scale" if block is None else "w_scale_inv"


def test_looking_for_a_device_computes_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = MemoryState.read_device

    def nothing(state: MemoryState, name: str, start: int, stop: int) -> Any:
        assert start == stop
        return show(state, name, start, stop)

    monkeypatch.setattr(MemoryState, "read_device", nothing)
    reader = quantised({"w": drawn((6, 4)).to(device)}, 2)
    probes = {name: reader.read_device(name, 0, 0) for name in reader.specs}
    assert [(each.dtype, each.numel()) for each in probes.values() if each is not None] == [
        (torch.uint8, 0),
        (torch.int32, 0),
    ]
    assert all(reader.makes_device_bits(name) for name in reader.specs)


def test_what_is_not_quantised_is_shown_as_it_is(device: torch.device) -> None:
    state = {"q.weight": drawn((6, 4)).to(device), "norm.weight": drawn((4,)).to(device)}
    reader = open_state(fp8(state, block=2))
    shown = reader.read_device("norm.weight", 0, 4)
    assert shown.data_ptr() == state["norm.weight"].data_ptr()
    assert not reader.makes_device_bits("norm.weight")


def test_elements_without_kernels_are_quantised_on_the_host(device: torch.device) -> None:
    state = {"w": drawn((6, 4), "fp32").double().to(device)}
    reader = quantised(state, 2)
    assert reader.read_device("w", 0, 24) is None
    assert whole(reader, on_device=False) == whole(quantised(on_host(state), 2), on_device=False)


def published(state: Any, trained: Tensors, live: Any) -> dict[str, bytes]:
    """Everything that was published in a few steps; ``live`` follows them."""
    store = MemoryStore()
    with ww.Publisher(
        store, state, codec="plain", background=inline, clock=HandClock(), n_threads=1
    ) as publisher:
        publisher.publish().result()
        for seed in range(2):
            train(trained, seed)
            publisher.publish().result()
    found = {each.key: store.read(each.key) for each in store.list("")}
    ww.Subscriber(store, live, background=inline).update()
    return found


@pytest.mark.parametrize("is_cast", [False, True])
def test_a_publisher_never_asks_the_host(
    is_cast: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def view(state: Any) -> Any:
        return fp8(ww.cast(state, "bf16") if is_cast else state, block=4)

    def sample() -> Tensors:
        return {"q.weight": drawn((9, 13), "fp32"), "norm.weight": drawn((8,), "fp32", 1)}

    host, there = sample(), {name: tensor.to(device) for name, tensor in sample().items()}
    with monkeypatch.context() as patch:
        patch.setattr("weightwire.kernels.devices.TYPES", {"cuda"})
        expected = published(view(host), host, {})
        bits = whole(open_state(view(host)), on_device=False)

    def refused(*_: Any) -> Any:
        raise AssertionError("the host was asked")

    monkeypatch.setattr(Fp8Reader, "read", refused)
    live: dict[str, np.ndarray] = {}
    assert published(view(there), there, live) == expected
    assert bits_of(live) == bits


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return torch.empty(0, device=device).device


@pytest.mark.parametrize("block", [None, 128])
def test_nothing_waits_for_the_host(block: int | None, gpu: torch.device) -> None:
    reader = quantised({"w": drawn((1000, 1000)).to(gpu)}, block)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name, spec in reader.specs.items():
            assert reader.read_device(name, 0, spec.n_elements) is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("block", [None, 128, 1 << 20])
@pytest.mark.parametrize("shape", [(1 << 13, 1 << 13), (1 << 26,)])
def test_a_large_matrix_is_widened_in_parts(
    shape: tuple[int, ...], block: int | None, gpu: torch.device
) -> None:
    reader = quantised({"w": torch.ones(shape, dtype=torch.bfloat16, device=gpu)}, block)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(gpu)
    before = torch.cuda.memory_allocated(gpu)
    for name, spec in reader.specs.items():
        reader.read_device(name, 0, min(spec.n_elements, 1 << 24))
    n_bytes = torch.cuda.max_memory_allocated(gpu) - before
    assert n_bytes < 128 << 20


def test_another_stream_makes_scales_of_its_own(gpu: torch.device) -> None:
    """It could not know when those of the first are there."""
    state = {"w": drawn((1000, 1000)).to(gpu)}
    expected = whole(quantised(on_host(state), 128), on_device=False)
    reader = quantised(state, 128)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(gpu)):
        torch.cuda._sleep(1 << 29)
        reader.read_device("w", 0, 1000)
    with torch.cuda.stream(torch.cuda.Stream(gpu)):
        assert whole(reader, on_device=True) == expected
