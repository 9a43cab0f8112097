"""What only a GPU can show: staging beside the engine's work, the pause's order, and CUDA graphs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="devices are reached through torch")
if not torch.cuda.is_available():
    pytest.skip("streams and CUDA graphs need a GPU", allow_module_level=True)

from sample_devices import bits_of, on, versions  # noqa: E402

import weightwire as ww  # noqa: E402
from weightwire.apply import memory  # noqa: E402
from weightwire.apply.device_stream import SideStreams, settle  # noqa: E402

CYCLES = 6_000_000_000
"""Some seconds of a GPU: far longer than staging tiny tensors takes."""


@pytest.fixture
def engine_stream(device: torch.device) -> torch.cuda.Stream:
    """Staging is compiled and has its memory before a test begins: allocating waits for the device."""
    old, new = versions(2)
    live = on(device, old)
    memory.activate(live, memory.stage(live, ww.diff(old, new)))
    return torch.cuda.Stream(device)


def test_staging_does_not_wait_for_the_engine(
    device: torch.device, engine_stream: torch.cuda.Stream
) -> None:
    old, new = versions(2)
    live, patch = on(device, old), ww.diff(old, new)
    with torch.cuda.stream(engine_stream):
        torch.cuda._sleep(CYCLES)
        busy = engine_stream.record_event()
    staged = memory.stage(live, patch)
    assert not busy.query()
    memory.activate(live, staged)
    assert busy.query()
    assert bits_of(live) == bits_of(new)


def test_activation_comes_after_what_the_engine_was_told_and_before_what_it_is_told_then(
    device: torch.device, engine_stream: torch.cuda.Stream
) -> None:
    old, new = versions(2)
    live = on(device, old)
    staged = memory.stage(live, ww.diff(old, new))
    with torch.cuda.stream(engine_stream):
        torch.cuda._sleep(CYCLES // 10)
        before = {name: tensor.clone() for name, tensor in live.items()}
    memory.activate(live, staged)
    with torch.cuda.stream(engine_stream):
        after = {name: tensor.clone() for name, tensor in live.items()}
    settle([device])
    assert bits_of(before) == bits_of(old)
    assert bits_of(after) == bits_of(new)


def test_side_stream_begins_after_what_the_current_stream_was_told(device: torch.device) -> None:
    number = torch.zeros(1, device=device)
    torch.cuda._sleep(CYCLES // 10)
    number += 1
    streams = SideStreams()
    with streams.on(device):
        assert torch.cuda.current_stream(device) != torch.cuda.default_stream(device)
        found = number.clone()
    streams.wait()
    assert found.item() == 1


def test_prepared_writes_can_be_captured_in_a_graph_and_replayed(device: torch.device) -> None:
    old, new = versions(2)
    live = on(device, old)
    staged = memory.stage(live, ww.diff(old, new))
    settle([device])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        staged.launches.prepared.write()
    assert bits_of(live) == bits_of(old)
    for _ in range(2):
        graph.replay()
        settle([device])
        assert bits_of(live) == bits_of(new)


def test_update_takes_little_memory_beside_the_model(device: torch.device) -> None:
    """Per change a 32-bit position and the element; small tables, and what the allocator rounds up."""
    drawn = (torch.randn(1 << 24) * 0.02).to(torch.bfloat16)
    old = {"w": drawn.view(torch.int16).numpy().view("u2")}
    new = {"w": old["w"].copy()}
    new["w"][::10] += 1
    live = on(device, old)
    patch = ww.diff(old, new)
    memory.stage(live, patch)
    settle([device])
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    staged = memory.stage(live, patch)
    n_changes = len(new["w"][::10])
    assert torch.cuda.memory_allocated(device) - before < n_changes * 6 + (4 << 20)
    memory.activate(live, staged)
    assert bits_of(live) == bits_of(new)
