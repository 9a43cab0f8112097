"""Coded on a device or on the host: the same files, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sample_device_states import (
    TORCH_TYPES,
    Arrays,
    Tensors,
    bits_of,
    drawn,
    integers,
    moved,
    on_host,
    sample,
    train,
)

import weightwire as ww
from weightwire.codec import CODECS
from weightwire.codec.index import PatchIndex
from weightwire.codec.patch import MemoryBuckets, Patch
from weightwire.codec.writer import MemorySink
from weightwire.diff import device_diff
from weightwire.diff.compare import diff_states
from weightwire.diff.memory import MemoryState, open_state
from weightwire.diff.state import DeviceReader
from weightwire.digest import digest_state
from weightwire.model import Bits

pytest.importorskip("triton", reason="GPU kernels need triton")

from weightwire.codec import device_pieces

every_codec = pytest.mark.parametrize("codec", CODECS)
COMMON_TYPES = ["bf16"]
RARE_TYPES = [
    pytest.param(name, marks=pytest.mark.long) for name in TORCH_TYPES if name not in COMMON_TYPES
]
Files = dict[str, bytes]


class Calls:
    """How many pieces each call of the device's coder was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        encode = device_pieces.encode_pieces

        def counted(olds: Any, *others: Any, **options: Any) -> Any:
            self.sizes.append(len(olds))
            return encode(olds, *others, **options)

        monkeypatch.setattr(device_pieces, "encode_pieces", counted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def diffed(old: Any, new: Any, codec: str) -> tuple[PatchIndex, Files]:
    sink = MemorySink()
    return diff_states(open_state(old), open_state(new), sink, codec, n_threads=1), sink.files


def assert_same_patch(old: Tensors, new: Tensors, codec: str) -> None:
    index, files = diffed(old, new, codec)
    assert (index, files) == diffed(on_host(old), on_host(new), codec)
    applied: Arrays = on_host(old)
    ww.apply(applied, Patch(index, MemoryBuckets(files)))
    assert bits_of(applied) == bits_of(new)


@every_codec
@pytest.mark.parametrize("dtype", [*COMMON_TYPES, *RARE_TYPES])
def test_patches_of_every_type_are_the_hosts(
    dtype: str, codec: str, device: torch.device, calls: Calls
) -> None:
    old = {
        "w": drawn((50, 40), dtype, 1).to(device),
        "one": drawn((1,), dtype, 2).to(device),
        "scalar": drawn((), dtype, 3).to(device),
        "none": drawn((0, 3), dtype).to(device),
        "still": drawn((300,), dtype, 4).to(device),
    }
    new = {name: moved(tensor, 7) if name != "still" else tensor for name, tensor in old.items()}
    assert_same_patch(old, new, codec)
    assert calls.sizes == [5]


@every_codec
def test_several_pieces_of_a_tensor_are_the_hosts(
    codec: str, device: torch.device, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightwire.limits.PIECE_ELEMENTS", 700)
    old = {"a": drawn((2500,)).to(device), "b": drawn((1400,), "fp32").to(device)}
    new = {"a": moved(old["a"], 1), "b": old["b"].clone()}
    integers(new["b"])[1399] += 1
    assert_same_patch(old, new, codec)
    assert calls.sizes == [4, 2]


@every_codec
def test_tensors_of_both_memories_and_all_layouts_come_out_in_order(
    codec: str, device: torch.device, calls: Calls
) -> None:
    wide = drawn((30, 40), "bf16", 5).to(device)
    old = {
        "a": drawn((400,)).to(device),
        "steps": torch.arange(5, device=device),
        "turned": wide.T,
        "host": torch.arange(900, dtype=torch.int16).numpy(),
        "z": drawn((500,)).to(device),
        "gone": drawn((9,)).to(device),
    }
    new = {name: old[name] for name in ("a", "steps", "turned", "host", "z")}
    new["a"], new["turned"], new["z"] = (moved(old[name], 3) for name in ("a", "turned", "z"))
    new["steps"], new["host"] = old["steps"] + 1, old["host"] ^ 1
    new["fresh"] = drawn((80,), "fp16").to(device)
    new["retyped"] = drawn((80,), "fp16").to(device)
    old["retyped"] = drawn((80,), "fp32").to(device)
    host = [
        {n: e if isinstance(e, np.ndarray) else on_host({n: e})[n] for n, e in state.items()}
        for state in (old, new)
    ]
    assert diffed(old, new, codec) == diffed(*host, codec)
    assert calls.sizes == [2]


@every_codec
def test_ties_and_new_shapes_are_the_hosts(codec: str, device: torch.device) -> None:
    old = {"w": drawn((60, 20)).to(device), "s": drawn((40, 2)).to(device)}
    new = {"w": moved(old["w"], 1), "s": moved(old["s"], 2).reshape(2, 40)}
    old["head"], new["head"] = old["w"], new["w"]
    on_device = diffed(old, new, codec)
    host = [on_host(state) for state in (old, new)]
    for state in host:
        state["head"] = state["w"]
    assert on_device == diffed(*host, codec)
    assert on_device[0].tied == {"head": "w"}


@pytest.mark.long
def test_a_model_is_one_call_and_small_windows_give_the_same_bytes(
    device: torch.device, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {f"layer.{n}": drawn((100,), "bf16", n).to(device) for n in range(12)}
    new = {name: moved(tensor, 5) for name, tensor in old.items()}
    whole = diffed(old, new, "compact")
    assert calls.sizes == [12]
    monkeypatch.setattr(device_diff, "WINDOW_BYTES", 1000)
    assert diffed(old, new, "compact") == whole
    assert calls.sizes[1:] == [5, 5, 2]


def test_types_that_alternate_are_coded_with_one_call_each(
    device: torch.device, calls: Calls
) -> None:
    kinds = ["bf16", "fp32"] * 3
    old = {f"t{n}": drawn((50,), kind, n).to(device) for n, kind in enumerate(kinds)}
    assert_same_patch(old, {name: moved(tensor, 5) for name, tensor in old.items()}, "compact")
    assert calls.sizes == [3, 3]


class OnlyTold:
    """A log that takes changes in clear only."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def add(self, head: Any, changes: Any) -> None:
        assert len(changes) == head.n_changed
        self.keys.append(head.key)


def test_a_log_that_takes_no_coded_pieces_is_told_changes_in_clear(
    device: torch.device, calls: Calls
) -> None:
    old = {"w": drawn((200,)).to(device)}
    states = open_state(old), open_state({"w": moved(old["w"], 1)})
    log, sink = OnlyTold(), MemorySink()
    index = diff_states(*states, sink, log=log)
    assert (log.keys, calls.sizes) == (["w"], [])
    assert (index, sink.files) == diffed(old, {"w": moved(old["w"], 1)}, "compact")


class HostOnly(MemoryState):
    """A state on a device that must not be read through the host."""

    def read(self, name: str, start: int, stop: int) -> Bits:
        raise AssertionError(f"{name}, {start} to {stop}, was read on the host")


def test_digests_of_a_state_on_a_device_are_the_hosts(device: torch.device) -> None:
    state = sample(device)
    counters = {"steps": state.pop("steps")}
    assert digest_state(HostOnly(state.items())) == digest_state(open_state(on_host(state)))
    assert ww.digest({**state, **counters}) == ww.digest(on_host({**state, **counters}))


def every_kind_of_float(n: int) -> torch.Tensor:
    bits = np.random.default_rng(0).integers(0, 1 << 32, n, dtype=np.uint32)
    bits[::5] = (bits[::5] & 0xFFFF0000) | 0x8000
    bits[:6] = (0, 1 << 31, 0x7F800000, 0x7F7FFFFF, 0x7F800001, 0xFFC12345)
    return torch.from_numpy(bits.view(np.float32).copy())


@pytest.mark.long
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_what_is_cast_on_a_device_is_what_torch_makes_there(
    name: str, device: torch.device, calls: Calls
) -> None:
    master = every_kind_of_float(3001).to(device)
    state = ww.cast({"w": master, "n": torch.arange(3, device=device)}, name)
    reader = open_state(state)
    narrow = master.to(TORCH_TYPES[name])
    expected = integers(narrow).cpu().numpy().tobytes()
    assert isinstance(reader, DeviceReader)
    assert integers(reader.read_device("w", 0, 3001)).cpu().numpy().tobytes() == expected
    assert reader.read("w", 0, 3001).tobytes() == expected
    old = {"w": moved(narrow, 1), "n": torch.arange(3, device=device)}
    live = {"w": narrow, "n": old["n"]}
    assert diffed(old, state, "compact") == diffed(on_host(old), on_host(live), "compact")
    assert calls.sizes == [1]


def test_a_cast_is_made_a_few_pieces_at_a_time(
    device: torch.device, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_diff, "MADE_BYTES", 900)
    master = {f"w{n}": drawn((200,), "fp32", n).to(device) for n in range(5)}
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in master.items()}
    old = {name: moved(tensor, 1) for name, tensor in narrow.items()}
    assert diffed(old, ww.cast(master, "bf16"), "plain") == diffed(
        on_host(old), on_host(narrow), "plain"
    )
    assert calls.sizes == [2, 2, 1]


def test_a_state_that_moves_on_is_trained_as_meant(device: torch.device) -> None:
    """The samples above compare nothing if training changes nothing."""
    state = sample(device)
    before: Callable[[], dict[str, bytes]] = lambda: bits_of(state)  # noqa: E731
    first = before()
    train(state, 1)
    assert {name for name in first if first[name] != before()[name]} == set(state) - {"nothing"}
