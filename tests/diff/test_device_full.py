"""A device whose memory runs out after a version was committed: the baseline moves all the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sample_device_states import bits_of, drawn, on_host, train

import weightwire as ww
from sample_training import inline
from weightwire.diff import device_advance
from weightwire.diff.baseline import Baseline
from weightwire.diff.compare import diff_states
from weightwire.diff.device_room import DeviceBaseline
from weightwire.diff.held import HeldOnDevice
from weightwire.diff.memory import open_state
from weightwire.diff.page_locked import page_locked
from weightwire.diff.redo import RedoLog
from weightwire.model import dtype_named
from weightwire.store.memory import MemoryStore
from weightwire.store.upload import NoUpload

pytest.importorskip("triton", reason="GPU kernels need triton")

from weightwire.codec import device_pieces
from weightwire.kernels.triton import scatter


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def told(baseline: Baseline, state: dict[str, torch.Tensor], codec: str) -> tuple[RedoLog, Any]:
    redo, live = RedoLog(), open_state(state)
    diff_states(baseline, live, NoUpload(), codec, log=redo, n_threads=1)
    return redo, live


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.parametrize("codec", ["plain", pytest.param("compact", marks=pytest.mark.long)])
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("place", ["decode", "prepare"])
def test_batches_that_find_no_memory_are_decoded_on_the_host(
    place: str,
    on_device: DeviceBaseline,
    codec: str,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(device_advance, "ADVANCE_BYTES", 1)
    state = {f"w{n}": drawn((100,), "bf16", n).to(device) for n in range(3)}
    baseline = Baseline(on_device=on_device)
    baseline.fill(open_state(state))
    frozen, before = baseline.freeze(), bits_of(state)
    train(state, 1, share=0.1)
    redo, live = told(baseline, state, codec)
    if place == "decode":
        monkeypatch.setattr(device_pieces, "decode_pieces", full)
    else:
        monkeypatch.setattr(scatter, "prepare_scatter", full)
        monkeypatch.setattr(scatter, "tabulate_writes", full)
    baseline.advance(redo, live.specs, live.ties)
    assert bits_of(state) == {n: baseline.read(n, 0, 100).tobytes() for n in state}
    assert before == {n: frozen.read(n, 0, 100).tobytes() for n in state}
    assert isinstance(baseline._held["w0"], HeldOnDevice) == on_device
    assert warnings_of(caplog) == [
        "a GPU has no memory left to bring the baseline forward: the host does it"
    ]


def test_only_the_batch_that_finds_no_memory_goes_to_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_advance, "ADVANCE_BYTES", 1)
    state = {f"w{n}": drawn((100,), "bf16", n).to(device) for n in range(3)}
    baseline = Baseline()
    baseline.fill(open_state(state))
    train(state, 1, share=0.1)
    redo, live = told(baseline, state, "plain")
    decode, n_calls = device_pieces.decode_pieces, 0

    def at_times(*arguments: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return full() if n_calls == 2 else decode(*arguments)

    monkeypatch.setattr(device_pieces, "decode_pieces", at_times)
    baseline.advance(redo, live.specs, live.ties)
    assert n_calls == 3
    assert bits_of(state) == {n: baseline.read(n, 0, 100).tobytes() for n in state}


def test_what_a_frozen_view_keeps_is_found_on_the_host_if_need_be(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly everything moves, so that a decoder lists what stays as well."""
    state = {"w": drawn((100,)).to(device)}
    baseline = Baseline()
    baseline.fill(open_state(state))
    frozen, before = baseline.freeze(), bits_of(state)
    train(state, 1, share=0.5)
    redo, live = told(baseline, state, "plain")
    monkeypatch.setattr(scatter, "read", full)
    baseline.advance(redo, live.specs, live.ties)
    assert baseline.read("w", 0, 100).tobytes() == bits_of(state)["w"]
    assert frozen.read("w", 0, 100).tobytes() == before["w"]
    assert baseline.n_undo_bytes == 50 * (4 + 2)


def test_other_failures_of_a_device_are_not_taken_for_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": drawn((100,)).to(device)}
    baseline = Baseline()
    baseline.fill(open_state(state))
    train(state, 1)
    redo, live = told(baseline, state, "plain")

    def lost(*_: Any) -> None:
        raise RuntimeError("the GPU has fallen off the bus")

    with monkeypatch.context() as patch:
        patch.setattr(device_pieces, "decode_pieces", lost)
        with pytest.raises(RuntimeError, match="fallen off"):
            baseline.advance(redo, live.specs, live.ties)
    baseline.advance(redo, live.specs, live.ties)
    assert baseline.read("w", 0, 100).tobytes() == bits_of(state)["w"]


def test_a_version_is_published_although_memory_runs_out_behind_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, state = MemoryStore(), {"w": drawn((200,)).to(device)}
    with ww.Publisher(store, state, codec="plain", n_threads=1) as pub:
        pub.publish().result()
        for seed in range(2):
            train(state, seed)
            with monkeypatch.context() as patch:
                patch.setattr(device_pieces, "decode_pieces", full)
                assert pub.publish().result().version == seed + 1
    live: dict[str, Any] = {}
    ww.Subscriber(store, live, background=inline).update()
    assert bits_of(live) == bits_of(on_host(state))


def test_memory_is_locked_and_unlocked_for_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread on another device would begin that one, which is maybe another rank's."""
    seen: list[str] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self._device = device

        def __enter__(self) -> None:
            seen.append(f"on {self._device}")

        def __exit__(self, *_: object) -> None:
            seen.append("back")

    runtime = SimpleNamespace(
        cudaHostRegister=_seen(seen, "lock"), cudaHostUnregister=_seen(seen, "unlock")
    )
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    array = page_locked(1 << 20, dtype_named("BF16"), torch.device("cuda", 5))
    assert seen == ["on cuda:5", "lock", "back"]
    del array
    assert seen[3:] == ["on cuda:5", "unlock", "back"]


def _seen(seen: list[str], what: str) -> Callable[..., int]:
    def told(*_: object) -> int:
        seen.append(what)
        return 0

    return told
