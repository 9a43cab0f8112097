"""A baseline that follows its state on a device: in any memory, interrupted, and seen as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sample_device_states import Tensors, bits_of, drawn, integers, moved, on_host, sample, train

import weightwire as ww
from weightwire.codec.writer import MemorySink
from weightwire.diff import device_advance
from weightwire.diff import redo as redo_module
from weightwire.diff.baseline import Baseline
from weightwire.diff.compare import diff_states
from weightwire.diff.device_room import DeviceBaseline
from weightwire.diff.held import HeldOnDevice, HeldOnHost
from weightwire.diff.memory import open_state
from weightwire.diff.redo import RedoLog
from weightwire.diff.spill import Spill
from weightwire.diff.state import StateReader
from weightwire.store.upload import NoUpload

pytest.importorskip("triton", reason="GPU kernels need triton")

from weightwire.kernels.triton import scatter

pytestmark = pytest.mark.long
"""Interpreted, they take minutes; the tests of publishing go the same ways."""

ANYWHERE: list[DeviceBaseline] = [None, True, False, 400]
"""With 400 bytes, the first matrix and the norm stay on the device, and the second does not."""
anywhere = pytest.mark.parametrize("on_device", ANYWHERE)


def read_all(state: StateReader) -> dict[str, bytes]:
    return {n: state.read(n, 0, spec.n_elements).tobytes() for n, spec in state.specs.items()}


def told(baseline: Baseline, state: Tensors, codec: str = "plain") -> tuple[RedoLog, Any]:
    redo, live = RedoLog(), open_state(state)
    diff_states(baseline, live, NoUpload(), codec, log=redo, n_threads=1)
    return redo, live


def follow(baseline: Baseline, state: Tensors, codec: str = "plain") -> None:
    redo, live = told(baseline, state, codec)
    baseline.advance(redo, live.specs, live.ties)


def filled(state: Tensors, on_device: DeviceBaseline = None) -> Baseline:
    baseline = Baseline(on_device=on_device)
    baseline.fill(open_state(state))
    return baseline


def on_devices(baseline: Baseline) -> list[str]:
    return [name for name, held in baseline._held.items() if isinstance(held, HeldOnDevice)]


@anywhere
@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_baseline_becomes_the_state_it_follows(
    codec: str, on_device: DeviceBaseline, device: torch.device
) -> None:
    state = sample(device)
    baseline = filled(state, on_device)
    assert read_all(baseline) == bits_of(state)
    for seed in range(2):
        train(state, seed)
        follow(baseline, state, codec)
        assert read_all(baseline) == bits_of(state)
    assert ww.digest(baseline) == ww.digest(on_host(state))


def test_memory_is_chosen_in_state_order_until_it_is_used_up(device: torch.device) -> None:
    state = sample(device)
    matrices = ["embed", "norm", "mlp", "scale", "nothing"]
    assert on_devices(filled(state)) == matrices
    assert on_devices(filled(state, True)) == matrices
    assert on_devices(filled(state, False)) == []
    assert on_devices(filled(state, 400)) == ["embed", "norm", "scale", "nothing"]
    assert on_devices(filled(state, 0)) == ["nothing"]


def test_where_the_baseline_lies_changes_no_byte_of_a_patch(device: torch.device) -> None:
    old = sample(device)
    new = {name: moved(each, 1) if each.numel() else each for name, each in old.items()}
    expected = MemorySink()
    diff_states(open_state(on_host(old)), open_state(on_host(new)), expected)
    for on_device in ANYWHERE:
        sink = MemorySink()
        diff_states(filled(old, on_device), open_state(new), sink, log=RedoLog())
        assert sink.files == expected.files


def test_a_redo_log_keeps_the_size_of_the_patch_and_no_changes(device: torch.device) -> None:
    state = {"w": drawn((600,)).to(device)}
    baseline = filled(state)
    train(state, 1, share=0.2)
    redo, _ = told(baseline, state)
    assert list(redo) == []
    [step] = redo.coded.values()
    assert redo._spill.n_bytes == len(step.piece.streams.payload) < 120 * (4 + 2) // 2


def test_coded_pieces_beyond_the_cap_come_back_from_a_file(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redo_module, "Spill", lambda: Spill(max_bytes=100))
    state = {f"w{n}": drawn((200,), "bf16", n).to(device) for n in range(4)}
    baseline = filled(state)
    train(state, 1, share=0.2)
    redo, live = told(baseline, state)
    assert redo._spill.n_bytes <= 100 < redo._spill.n_file_bytes
    baseline.advance(redo, live.specs, live.ties)
    assert read_all(baseline) == bits_of(state)


@pytest.mark.parametrize("on_device", [True, False])
def test_advancing_twice_is_advancing_once(on_device: bool, device: torch.device) -> None:
    state = sample(device)
    baseline = filled(state, on_device)
    train(state, 1)
    redo, live = told(baseline, state, "compact")
    baseline.advance(redo, live.specs, live.ties)
    assert not redo.coded
    baseline.advance(redo, live.specs, live.ties)
    assert read_all(baseline) == bits_of(state)


class Crash(Exception):
    """Something that interrupts an advance; compact pieces cannot be decoded again after it."""


@pytest.mark.parametrize("is_written", [True, False], ids=["after writing", "before writing"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_advance_that_is_interrupted_goes_on_where_it_was(
    number: int, is_written: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_advance, "ADVANCE_BYTES", 1)
    state = {f"w{n}": drawn((100,), "bf16", n).to(device) for n in range(3)}
    baseline = filled(state)
    frozen, before = baseline.freeze(), bits_of(state)
    train(state, 1, share=0.1)
    redo, live = told(baseline, state, "compact")
    write, n_writes = scatter.write, 0

    def crashing(prepared: Any) -> None:
        nonlocal n_writes
        n_writes += 1
        if n_writes == number + 1 and not is_written:
            raise Crash
        write(prepared)
        if n_writes == number + 1:
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(scatter, "write", crashing)
        with pytest.raises(Crash):
            baseline.advance(redo, live.specs, live.ties)
    assert len(redo.coded) == 3 - number
    assert read_all(frozen) == before
    baseline.advance(redo, live.specs, live.ties)
    assert read_all(baseline) == bits_of(state)
    assert read_all(frozen) == before


@pytest.mark.parametrize("on_device", [True, False])
def test_an_advance_on_the_host_that_is_interrupted_goes_on_too(
    on_device: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_advance, "ADVANCE_BYTES", 1)
    state = {f"w{n}": drawn((100,), "bf16", n).to(device) for n in range(3)}
    baseline = filled(state, on_device)
    train(state, 1, share=0.1)
    redo, live = told(baseline, state, "compact")
    with monkeypatch.context() as patch:
        patch.setattr(RedoLog, "written", lambda _: (_ for _ in ()).throw(Crash()))
        with pytest.raises(Crash):
            baseline.advance(redo, live.specs, live.ties)
    assert redo.staged is not None
    baseline.advance(redo, live.specs, live.ties)
    assert read_all(baseline) == bits_of(state)


@pytest.mark.parametrize("on_device", [True, False, 400])
def test_frozen_views_keep_what_they_saw(on_device: DeviceBaseline, device: torch.device) -> None:
    state = sample(device)
    baseline = filled(state, on_device)
    views = []
    for seed in range(2):
        views.append((baseline.freeze(), bits_of(state)))
        train(state, seed)
        follow(baseline, state)
        for frozen, before in views:
            assert read_all(frozen) == before
    for frozen, _ in views:
        frozen.close()
    assert baseline.n_undo_bytes == 0


def test_a_frozen_view_keeps_only_what_changed(device: torch.device) -> None:
    """Nearly everything moves, so that a decoder lists what stays as well."""
    state = {"w": drawn((100,)).to(device)}
    baseline = filled(state)
    baseline.freeze()
    train(state, 1, share=0.9)
    follow(baseline, state, "compact")
    assert baseline.n_undo_bytes == 90 * (4 + 2)


def test_baseline_follows_tensors_that_come_go_and_change_shape(device: torch.device) -> None:
    state = sample(device)
    baseline = filled(state)
    frozen, before = baseline.freeze(), bits_of(state)
    del state["norm"]
    state["embed"] = moved(state["embed"], 3).reshape(-1)
    state["mlp"] = state["mlp"].float()
    state["new"] = drawn((90,)).to(device)
    follow(baseline, state)
    assert read_all(baseline) == bits_of(state)
    assert on_devices(baseline) == ["embed", "scale", "nothing"]
    baseline.join(open_state(state))
    assert on_devices(baseline) == ["embed", "mlp", "scale", "nothing", "new"]
    train(state, 5)
    follow(baseline, state)
    assert read_all(baseline) == bits_of(state)
    assert read_all(frozen) == before


@anywhere
def test_a_baseline_that_was_restored_on_the_host_joins_its_state(
    on_device: DeviceBaseline, device: torch.device
) -> None:
    state = sample(device)
    baseline = Baseline(on_device=on_device)
    baseline.fill(open_state(on_host(state)))
    assert on_devices(baseline) == []
    frozen, before = baseline.freeze(), bits_of(state)
    train(state, 1)
    live = open_state(state)
    baseline.join(live)
    held = {name: baseline._held[name] for name in ("embed", "mlp")}
    assert {each.device for each in held.values()} == {integers(state["embed"]).device}
    follow(baseline, state)
    assert baseline._held["embed"] is held["embed"]
    assert read_all(baseline) == bits_of(state)
    assert read_all(frozen) == before


def test_changes_found_on_the_host_reach_a_baseline_on_the_device(device: torch.device) -> None:
    state = {"w": drawn((20, 10)).to(device)}
    baseline = filled(state)
    frozen, before = baseline.freeze(), bits_of(state)
    turned = {"w": moved(state["w"], 1).T.contiguous().T}
    redo, live = told(baseline, turned)
    assert not redo.coded
    assert list(redo)
    baseline.advance(redo, live.specs, live.ties)
    assert read_all(baseline) == bits_of(turned)
    assert read_all(frozen) == before
    frozen.close()
    again = {"w": moved(turned["w"], 2)}
    follow(baseline, again)
    assert read_all(baseline) == bits_of(again)


def test_a_file_stays_a_file(device: torch.device, tmp_path: Any) -> None:
    state = {"w": drawn((400,)).to(device), "v": drawn((30,), "fp32").to(device)}
    baseline = Baseline(tmp_path)
    baseline.fill(open_state(state))
    train(state, 1)
    baseline.join(open_state(state))
    follow(baseline, state)
    assert all(isinstance(held, HeldOnHost) for held in baseline._held.values())
    assert all(isinstance(held.array, np.memmap) for held in baseline._held.values())  # type: ignore[union-attr]
    assert read_all(Baseline(tmp_path)) == bits_of(state)
