"""What only a GPU shows: streams that run ahead, page-locked memory, copies beside the coding."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
from sample_device_states import Tensors, bits_of, drawn, on_host, train

import weightwire as ww
from sample_training import inline
from weightwire.codec import device_pieces
from weightwire.codec.writer import MemorySink
from weightwire.diff import device_diff, device_room
from weightwire.diff.baseline import Baseline
from weightwire.diff.compare import diff_states
from weightwire.diff.device_room import DeviceBaseline
from weightwire.diff.device_streams import Moment, own_stream, own_streams
from weightwire.diff.held import HeldOnDevice
from weightwire.diff.memory import open_state
from weightwire.diff.page_locked import page_locked
from weightwire.diff.redo import RedoLog
from weightwire.errors import StateMoved
from weightwire.model import TensorSpec, dtype_named
from weightwire.store.memory import MemoryStore

pytest.importorskip("triton", reason="GPU kernels need triton")

A_WHILE = 1 << 31
"""Cycles that a GPU sleeps: about a second, and far longer than what is asked of it meanwhile."""


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return torch.empty(0, device=device).device


def model(gpu: torch.device) -> Tensors:
    """Ten tensors of several megabytes: page-locked where they are on the host."""
    return {f"w{n}": drawn((1000, 1000 + n), "bf16", n).to(gpu) for n in range(10)}


def received(store: Any) -> dict[str, bytes]:
    live: dict[str, Any] = {}
    ww.Subscriber(store, live, background=inline).update()
    return bits_of(live)


def publish_while_training(publisher: ww.Publisher, state: Tensors, store: MemoryStore) -> None:
    """Every version is what the current stream had been given, though that is far behind."""
    for _ in range(3):
        torch.cuda._sleep(A_WHILE // 8)
        for tensor in state.values():
            tensor.mul_(1.001)
        done = publisher.publish()
        publisher.wait_until_read()
        expected = bits_of(state)
        for tensor in state.values():
            tensor.mul_(1.001)
        done.result()
        assert received(store) == expected


def test_what_was_submitted_before_publish_is_published(gpu: torch.device) -> None:
    """The caller's stream is far behind its thread, and not the one that anyone else uses."""
    store, state = MemoryStore(), model(gpu)
    with ww.Publisher(store, state) as publisher, torch.cuda.stream(torch.cuda.Stream(gpu)):
        for seed in range(3):
            torch.cuda._sleep(A_WHILE // 8)
            for tensor in state.values():
                tensor.mul_(1.001)
            publisher.publish().result()
            torch.cuda.synchronize()
            assert received(store) == bits_of(state), seed


@pytest.mark.parametrize("device_baseline", [True, False])
def test_reading_behind_the_callers_back_sees_what_was_submitted(
    device_baseline: DeviceBaseline, gpu: torch.device
) -> None:
    store, state = MemoryStore(), model(gpu)
    with (
        ww.Publisher(store, state, overlap=True, device_baseline=device_baseline) as publisher,
        torch.cuda.stream(torch.cuda.Stream(gpu)),
    ):
        publish_while_training(publisher, state, store)


def test_reading_does_not_wait_for_what_is_submitted_later(gpu: torch.device) -> None:
    store, state = MemoryStore(), model(gpu)
    with ww.Publisher(store, state, overlap=True) as publisher:
        for _ in range(3):  # kernels are compiled and loaded by then
            train(state, 1)
            publisher.publish().result()
        train(state, 2)
        done = publisher.publish()
        torch.cuda._sleep(4 * A_WHILE)
        later = torch.cuda.current_stream().record_event()
        publisher.wait_until_read()
        is_asleep = not later.query()
        done.result()
    assert is_asleep
    assert received(store) == bits_of(state)


def test_tensors_that_are_made_in_the_reading_thread_are_waited_for(gpu: torch.device) -> None:
    store, state = MemoryStore(), model(gpu)

    def made() -> Tensors:
        torch.cuda._sleep(A_WHILE // 8)
        return {name: tensor * 2 for name, tensor in state.items()}

    with ww.Publisher(store, made, overlap=True) as publisher:
        for seed in range(2):
            train(state, seed)
            torch.cuda.synchronize()
            publisher.publish().result()
    assert received(store) == bits_of({name: tensor * 2 for name, tensor in state.items()})


def test_a_callable_gives_what_the_callers_stream_was_given(gpu: torch.device) -> None:
    """It is asked in another thread, on another stream, and says nothing beforehand."""
    store, state = MemoryStore(), model(gpu)
    with (
        ww.Publisher(store, lambda: state, overlap=True) as publisher,
        torch.cuda.stream(torch.cuda.Stream(gpu)),
    ):
        publish_while_training(publisher, state, store)


def test_a_callable_makes_tensors_of_what_the_callers_stream_was_given(gpu: torch.device) -> None:
    store, state = MemoryStore(), model(gpu)
    made = lambda: {name: tensor * 2 for name, tensor in state.items()}  # noqa: E731
    with (
        ww.Publisher(store, made, overlap=True) as publisher,
        torch.cuda.stream(torch.cuda.Stream(gpu)),
    ):
        for _ in range(2):
            torch.cuda._sleep(A_WHILE // 8)
            for tensor in state.values():
                tensor.mul_(1.001)
            publisher.publish().result()
            assert received(store) == bits_of(made())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_publish_that_failed_keeps_no_memory(
    overlap: bool, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    masters = {name: tensor.float() for name, tensor in model(gpu).items()}
    with ww.Publisher(MemoryStore(), ww.cast(masters, "bf16"), overlap=overlap) as publisher:
        for seed in range(2):
            train(masters, seed)
            publisher.publish().result()
        before = torch.cuda.memory_allocated(gpu)

        def failing(*_: Any, **__: Any) -> None:
            assert torch.cuda.memory_allocated(gpu) > before + 10_000_000
            raise StateMoved("it did")

        with monkeypatch.context() as patch:
            patch.setattr(device_pieces, "encode_pieces", failing)
            done = publisher.publish()
            assert isinstance(done.exception(), StateMoved)
        publisher._reads.submit(int).result()
        assert torch.cuda.memory_allocated(gpu) <= before + 1_000_000
        assert publisher.publish().result().version == 2


@pytest.mark.parametrize("on_device", [True, False])
def test_a_baseline_is_brought_forward_where_no_memory_is_left(
    on_device: bool, gpu: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    state, baseline = model(gpu), Baseline(on_device=on_device)
    baseline.fill(open_state(state))
    frozen, before = baseline.freeze(), bits_of(state)
    train(state, 1, share=0.5)
    redo, live = RedoLog(), open_state(state)
    diff_states(baseline, live, MemorySink(), log=redo)
    gc.collect()
    torch.cuda.empty_cache()
    n_reserved, n_total = torch.cuda.memory_reserved(gpu), torch.cuda.mem_get_info(gpu)[1]
    torch.cuda.set_per_process_memory_fraction(n_reserved / n_total, gpu)
    try:
        baseline.advance(redo, live.specs, live.ties)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    assert "no memory left to bring the baseline forward" in caplog.text
    assert ww.digest(baseline) == ww.digest(state)
    found = {n: frozen.read(n, 0, spec.n_elements).tobytes() for n, spec in frozen.specs.items()}
    assert found == before


@pytest.fixture
def second_gpu(gpu: torch.device) -> torch.device:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return torch.device("cuda", 1)


def test_states_on_a_gpu_that_is_not_the_current_one(second_gpu: torch.device) -> None:
    store, state = MemoryStore(), model(second_gpu)
    before = {name: tensor.clone() for name, tensor in state.items()}
    with ww.Publisher(store, state) as publisher:
        for seed in range(3):
            train(state, seed)
            publisher.publish().result()
    assert torch.cuda.current_device() == 0
    assert received(store) == bits_of(state)
    there, here = ww.diff(before, state), ww.diff(on_host(before), on_host(state))
    assert there.index == here.index


_ON_THE_SECOND = """
import torch
torch.cuda.set_device(1)
import weightwire as ww
from weightwire.store.memory import MemoryStore
state = {f"w{n}": torch.randn(1000, 1000, device="cuda") for n in range(4)}
for overlap in (False, True):
    with ww.Publisher(MemoryStore(), state, overlap=overlap, device_baseline=overlap) as publisher:
        for _ in range(3):
            publisher.publish().result()
            for tensor in state.values():
                tensor[::50] *= 1.5
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0)
"""


def test_a_rank_on_the_second_gpu_leaves_the_first_alone(second_gpu: torch.device) -> None:
    subprocess.run([sys.executable, "-c", _ON_THE_SECOND], check=True)


def test_a_moment_is_over_when_its_own_work_is(gpu: torch.device) -> None:
    before = Moment([gpu])
    torch.cuda._sleep(A_WHILE)
    later = torch.cuda.current_stream().record_event()
    before.wait()
    assert not later.query()
    Moment([gpu]).wait()
    assert later.query()


def test_own_streams_are_done_when_they_are_left_and_the_callers_come_back(
    gpu: torch.device,
) -> None:
    before = torch.cuda.current_stream(gpu)
    with own_streams([gpu]):
        assert torch.cuda.current_stream(gpu) == own_stream(gpu, "work") != before
        torch.cuda._sleep(A_WHILE // 8)
        last = torch.cuda.current_stream(gpu).record_event()
    assert last.query()
    assert torch.cuda.current_stream(gpu) == before


@pytest.mark.parametrize("on_device", [None, True, False, 9_000_000])
@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_copies_beside_the_coding_change_no_byte(
    codec: str, on_device: DeviceBaseline, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_diff, "MADE_BYTES", 5_000_000)
    state, host, baseline = model(gpu), Baseline(), Baseline(on_device=on_device)
    baseline.fill(open_state(state))
    host.fill(open_state(on_host(state)))
    for seed in range(4):
        train(state, seed, share=0.02)
        files = []
        for each, live in ((baseline, open_state(state)), (host, open_state(on_host(state)))):
            sink, redo = MemorySink(), RedoLog()
            diff_states(each, live, sink, codec, log=redo)
            each.advance(redo, live.specs, live.ties)
            files.append(sink.files)
        assert files[0] == files[1]
    assert ww.digest(baseline) == ww.digest(host) == ww.digest(state)


def test_masters_are_rounded_beside_the_coding(
    gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_diff, "MADE_BYTES", 5_000_000)
    masters = {name: tensor.float() for name, tensor in model(gpu).items()}
    masters["w3"][7, :5] = torch.tensor([float("nan"), float("inf"), -0.0, 1e39, 1e-41])
    masters["w3"].view(torch.int32)[8, :2] = torch.tensor([0x7F800001, -0x3EDCBB], device=gpu)
    store = MemoryStore()
    with ww.Publisher(store, ww.cast(masters, "bf16"), mode="validate") as publisher:
        publisher.publish().result()
        for tensor in masters.values():
            tensor.mul_(1.003)
        assert publisher.publish().result().is_validated
    assert received(store) == bits_of({n: each.to(torch.bfloat16) for n, each in masters.items()})


def test_a_baseline_leaves_memory_free(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    state, baseline = model(gpu), Baseline()
    baseline.fill(open_state(state))
    assert all(isinstance(held, HeldOnDevice) for held in baseline._held.values())
    n_free, n_total = torch.cuda.mem_get_info(gpu)
    monkeypatch.setattr(device_room, "FREE_SHARE", (n_free - 9_000_000) / n_total)
    baseline.fill(open_state(state))
    n_on_device = sum(isinstance(held, HeldOnDevice) for held in baseline._held.values())
    assert 1 <= n_on_device <= 4
    assert ww.digest(baseline) == ww.digest(state)


def test_page_locked_memory_is_exact_and_given_back(gpu: torch.device) -> None:
    spec = TensorSpec("w", dtype_named("BF16"), (1_000_003,))
    array = page_locked(spec.n_elements, spec.dtype, gpu)
    assert array.nbytes == spec.n_bytes
    part = torch.from_numpy(array.view("<i2"))[10:]
    assert part.is_pinned()
    del array
    gc.collect()
    assert part.is_pinned()
    del part
    gc.collect()
    for _ in range(20):  # pages that were not given back could not be locked again
        again = page_locked(spec.n_elements, spec.dtype, gpu)
        assert torch.from_numpy(again.view("<i2")).is_pinned()


def test_versions_follow_each_other_from_thread_to_thread(gpu: torch.device) -> None:
    """Committing, advancing, skip patches and reading run in threads, on streams of their own."""
    store, state = MemoryStore(), model(gpu)
    with ww.Publisher(store, state, skips=(2, 4)) as publisher:
        for seed in range(9):
            train(state, seed, share=0.01)
            publisher.publish()
        publisher.wait()
        assert publisher.version == 8
    assert received(store) == bits_of(state)
    names = [each.key for each in store.list("log/")]
    assert any("000000000008-skip-000000000004-" in name for name in names)
