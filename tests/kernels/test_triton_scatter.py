"""A prepared scatter writes what the reference writes, finds what is there, and refuses lies."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="GPU kernels need torch")
pytest.importorskip("triton", reason="GPU kernels need triton")

from weightwire.errors import StopError, UnsupportedDType  # noqa: E402
from weightwire.kernels.reference import ReferenceKernels  # noqa: E402
from weightwire.kernels.triton.scatter import (  # noqa: E402
    SPAN,
    matches,
    prepare_scatter,
    read,
    write,
)
from weightwire.model import Bits  # noqa: E402

REFERENCE = ReferenceKernels()
WIDTHS = (1, 2, 4)
NumpyWrite = tuple[Bits, Bits, Bits]


def noise(n: int, n_bytes: int, seed: int = 0) -> Bits:
    bits = np.random.default_rng(seed).integers(0, 1 << 8 * n_bytes, n, dtype=np.uint64)
    return bits.astype(f"u{n_bytes}")


def on(device: torch.device, bits: Bits) -> torch.Tensor:
    """As torch holds bits: signed from two bytes on."""
    kind = "u1" if bits.dtype.itemsize == 1 else f"i{bits.dtype.itemsize}"
    return torch.from_numpy(bits.view(kind).copy()).to(device)


def some_write(n: int, n_changed: int, n_bytes: int, seed: int, wide: bool = False) -> NumpyWrite:
    at = np.sort(np.random.default_rng(seed).choice(n, n_changed, replace=False))
    positions = at.astype("u8" if wide else "u4")
    return noise(n, n_bytes, seed), positions, noise(n_changed, n_bytes, seed + 1)


def some_writes() -> list[NumpyWrite]:
    """Every width, both kinds of positions; nothing, one element, tails, everything."""
    cases = [(9, 0), (1, 1), (SPAN + 5, SPAN + 1), (700, 700), (5000, SPAN), (6000, 50)]
    return [
        some_write(n, n_changed, WIDTHS[seed % 3], seed, wide=seed % 4 == 3)
        for seed, (n, n_changed) in enumerate(cases * 2)
    ]


def as_bytes(memory: torch.Tensor) -> bytes:
    return bytes(memory.cpu().numpy().tobytes())


def test_all_writes_at_once_leave_what_the_reference_leaves(device: torch.device) -> None:
    writes = some_writes()
    given = [tuple(on(device, each) for each in one) for one in writes]
    scatter = prepare_scatter(given)
    assert [as_bytes(memory) for memory, _, _ in given] == [old.tobytes() for old, _, _ in writes]
    write(scatter)
    write(scatter)
    REFERENCE.scatter_all(writes, 1)
    assert [as_bytes(memory) for memory, _, _ in given] == [new.tobytes() for new, _, _ in writes]


def test_mismatches_are_counted_for_each_write(device: torch.device) -> None:
    writes = some_writes()
    given = [tuple(on(device, each) for each in one) for one in writes]
    scatter = prepare_scatter(given)
    wanted = [int(np.count_nonzero(old[at] != new)) for old, at, new in writes]
    assert matches(scatter).tolist() == wanted
    write(scatter)
    assert matches(scatter).tolist() == [0] * len(writes)
    memory, positions, _ = given[-1]
    memory[positions[-1].item()] ^= 1
    assert matches(scatter).tolist() == [0] * (len(writes) - 1) + [1]


def test_bits_that_were_read_undo_the_write(device: torch.device) -> None:
    writes = some_writes()
    given = [tuple(on(device, each) for each in one) for one in writes]
    scatter = prepare_scatter(given)
    before = read(scatter)
    assert [as_bytes(bits) for bits in before] == [old[at].tobytes() for old, at, _ in writes]
    write(scatter)
    assert [as_bytes(bits) for bits in read(scatter)] == [new.tobytes() for _, _, new in writes]
    write(prepare_scatter([(m, p, b) for (m, p, _), b in zip(given, before, strict=True)]))
    assert [as_bytes(memory) for memory, _, _ in given] == [old.tobytes() for old, _, _ in writes]


def test_elements_beside_a_memory_stay(device: torch.device) -> None:
    around = on(device, noise(300, 2))
    before = around.clone()
    at, new = on(device, np.array([0, 99], dtype="u4")), on(device, noise(2, 2, 5))
    write(prepare_scatter([(around[100:200], at, new)]))
    before[[100, 199]] = new
    assert torch.equal(around, before)


@pytest.mark.parametrize(
    "position", [np.uint32(10), np.uint32(0xFFFFFFFF), np.uint64(10), np.uint64((1 << 64) - 1)]
)
def test_a_position_outside_is_refused_by_the_write_that_has_it(
    position: np.unsignedinteger, device: torch.device
) -> None:
    good = tuple(on(device, each) for each in some_write(10, 3, 2, 0))
    bad_positions = on(device, np.array([0, position], dtype=position.dtype))
    bad = (on(device, noise(10, 2)), bad_positions, on(device, noise(2, 2, 1)))
    before = bad[0].clone()
    with pytest.raises(StopError, match="write 1: a position lies past the end"):
        prepare_scatter([good, bad, good])
    assert torch.equal(bad[0], before)


def test_the_last_position_of_a_memory_is_inside(device: torch.device) -> None:
    memory, new = on(device, noise(10, 1)), on(device, noise(1, 1, 7))
    write(prepare_scatter([(memory, on(device, np.array([9], dtype="u4")), new)]))
    assert memory[9] == new[0]


def test_no_writes_are_a_scatter_too(device: torch.device) -> None:
    scatter = prepare_scatter([])
    write(scatter)
    assert matches(scatter).tolist() == []
    assert read(scatter) == []


def test_writes_that_contradict_themselves_are_refused(device: torch.device) -> None:
    memory, positions, bits = (on(device, each) for each in some_write(40, 6, 2, 0))
    with pytest.raises(StopError, match="do not fit together"):
        prepare_scatter([(memory, positions, bits[:5])])
    with pytest.raises(StopError, match="do not fit together"):
        prepare_scatter([(memory, positions, bits.to(torch.int32))])
    with pytest.raises(StopError, match="without gaps"):
        prepare_scatter([(memory[::2], positions, bits)])
    with pytest.raises(UnsupportedDType):
        prepare_scatter([(memory, positions.to(torch.int16), bits)])
    with pytest.raises(UnsupportedDType):
        prepare_scatter([(memory.long(), positions, bits.long())])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on a GPU only")
def test_a_write_can_be_captured_in_a_graph(device: torch.device) -> None:
    old, at, new = some_write(5000, 900, 2, 0)
    memory, positions, bits = (on(device, each) for each in (old, at, new))
    scatter = prepare_scatter([(memory, positions, bits)])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write(scatter)
    assert as_bytes(memory) == old.tobytes()
    graph.replay()
    REFERENCE.scatter(old, at, new, 1)
    assert as_bytes(memory) == old.tobytes()
