"""Digests from GPU kernels are those of the reference, wherever elements lie."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="GPU kernels need torch")
pytest.importorskip("triton", reason="GPU kernels need triton")

from weightwire.errors import StopError, UnsupportedDType  # noqa: E402
from weightwire.kernels.reference import ReferenceKernels  # noqa: E402
from weightwire.kernels.triton.digest import (  # noqa: E402
    BLOCK,
    N_BLOCKS,
    STEP,
    digest_all,
    digest_at,
    digest_at_all,
    digest_moved,
    digest_moved_all,
    lanes_of,
)
from weightwire.kernels.triton.scatter import prepare_scatter, write  # noqa: E402
from weightwire.model import Bits  # noqa: E402

REFERENCE = ReferenceKernels()
FIRST_INDICES = (0, 1, 255, 1 << 33, (1 << 41) + 77)
SPAN = N_BLOCKS * BLOCK.value
STEP_ELEMENTS = STEP * BLOCK.value
every_width = pytest.mark.parametrize("n_bytes", [1, 2, 4])


def noise(n: int, n_bytes: int, seed: int = 0) -> Bits:
    """Any bits, the extremes among them."""
    bits = np.random.default_rng(seed).integers(0, 1 << 8 * n_bytes, n, dtype=np.uint64)
    bits[: n // 8] = 0
    bits[n - n // 8 :] = (1 << 8 * n_bytes) - 1
    return bits.astype(f"u{n_bytes}")


def on(device: torch.device, bits: Bits) -> torch.Tensor:
    """As torch holds bits: signed from two bytes on."""
    kind = "u1" if bits.dtype.itemsize == 1 else f"i{bits.dtype.itemsize}"
    return torch.from_numpy(bits.view(kind).copy()).to(device)


def assert_digests(device: torch.device, memories: list[Bits], firsts: list[int]) -> None:
    wanted = [REFERENCE.digest(b, first, 1) for b, first in zip(memories, firsts, strict=True)]
    assert lanes_of(digest_all([on(device, bits) for bits in memories], firsts)) == wanted


@every_width
def test_one_launch_digests_many_memories_as_the_reference_does(
    n_bytes: int, device: torch.device
) -> None:
    sizes = (0, 1, 300, 256, 513)
    memories = [noise(n, n_bytes, seed) for seed, n in enumerate(sizes)]
    assert_digests(device, memories, list(FIRST_INDICES))
    assert_digests(device, memories, list(FIRST_INDICES[::-1]))


@every_width
def test_spans_without_masks_meet_their_neighbours(n_bytes: int, device: torch.device) -> None:
    assert_digests(device, [noise(SPAN + 1, n_bytes)], [0])
    assert_digests(device, [noise(2 * SPAN, n_bytes)], [(1 << 33) + 255])


def test_no_border_between_steps_is_lost_or_counted_twice(device: torch.device) -> None:
    sizes = [STEP_ELEMENTS - 1, STEP_ELEMENTS, STEP_ELEMENTS + 1, STEP_ELEMENTS]
    memories = [noise(n, 2, n) for n in sizes]
    assert_digests(device, memories, [0, 0, 0, 1])


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_memory_that_starts_between_vectors_is_digested_too(
    offset: int, device: torch.device
) -> None:
    bits = noise(700, 2)
    memory = on(device, bits)[offset:]
    assert lanes_of(digest_all([memory], [512])) == [REFERENCE.digest(bits[offset:], 512, 1)]


def test_widths_may_be_mixed(device: torch.device) -> None:
    assert_digests(device, [noise(100, 4), noise(100, 1), noise(0, 2), noise(90, 2)], [5, 6, 7, 8])


def test_nothing_and_empty_memory_have_the_empty_digest(device: torch.device) -> None:
    assert lanes_of(digest_all([], [])) == []
    assert lanes_of(digest_all([on(device, noise(0, 2))], [77])) == [(0, 0)]


def test_a_block_number_wraps_where_the_definition_wraps(device: torch.device) -> None:
    assert_digests(device, [noise(600, 2), noise(600, 2)], [(1 << 40) - 300, 1 << 40])


def test_elements_outside_a_memory_do_not_count(device: torch.device) -> None:
    around = on(device, noise(900, 2))
    inner = around[200:500]
    wanted = lanes_of(digest_all([inner], [200]))
    around[:200] ^= 1
    around[500:] ^= 1
    assert lanes_of(digest_all([inner], [200])) == wanted


@every_width
@pytest.mark.parametrize("wide", [False, True])
def test_single_elements_add_up_as_in_the_reference(
    n_bytes: int, wide: bool, device: torch.device
) -> None:
    changes, given = [], []
    for seed, n in enumerate((0, 1, 40, 2500)):
        at = np.sort(np.random.default_rng(seed).choice(1 << 20, n, replace=False))
        at = at.astype("u4") + np.uint32(0xFFF00000 if seed % 2 else 0)
        bits = noise(n, n_bytes, seed)
        changes.append((at, bits))
        given.append((on(device, at.astype("u8") if wide else at), on(device, bits)))
    firsts = list(FIRST_INDICES[:4])
    wanted = [REFERENCE.digest_at(*change, f) for change, f in zip(changes, firsts, strict=True)]
    assert lanes_of(digest_at_all(given, firsts)) == wanted
    assert lanes_of(digest_at(*given[2], 255)[None]) == [REFERENCE.digest_at(*changes[2], 255)]


@every_width
def test_a_digest_moves_as_the_memory_does(n_bytes: int, device: torch.device) -> None:
    old = noise(3000, n_bytes, 1)
    at = np.flatnonzero(noise(3000, 1, 2) % 3 == 1).astype("u4")
    new = noise(len(at), n_bytes, 3)
    memory, positions, bits = (on(device, each) for each in (old, at, new))
    moved = digest_moved(memory, positions, bits, 300)
    before = digest_all([memory], [300])[0]
    write(prepare_scatter([(memory, positions, bits)]))
    assert torch.equal(before + moved, digest_all([memory], [300])[0])
    assert digest_moved(memory, positions, bits, 300).tolist() == [0, 0]


def test_many_writes_tell_what_each_of_them_moves(device: torch.device) -> None:
    olds = [noise(50, 2, 1), noise(60, 1, 2), noise(70, 2, 3)]
    positions = [np.array(at, dtype="u4") for at in ([], [0, 59], [1, 2, 69])]
    news = [noise(len(at), old.dtype.itemsize, 9) for at, old in zip(positions, olds, strict=True)]
    writes = [
        tuple(on(device, each) for each in write_)
        for write_ in zip(olds, positions, news, strict=True)
    ]
    firsts, wanted = [0, 255, 1 << 33], []
    for old, at, new, first in zip(olds, positions, news, firsts, strict=True):
        added, taken = REFERENCE.digest_at(at, new, first), REFERENCE.digest_at(at, old[at], first)
        wanted.append(tuple((a - b) % (1 << 64) for a, b in zip(added, taken, strict=True)))
    assert lanes_of(digest_moved_all(prepare_scatter(writes), firsts)) == wanted


def test_a_position_past_the_end_is_not_read(device: torch.device) -> None:
    around = on(device, noise(10, 2))
    at, new = np.array([3, 6, 0xFFFFFFFF], dtype="u4"), noise(3, 2, 1)
    old = np.array([around[3].item() & 0xFFFF, 0, 0], dtype="u2")
    moved = lanes_of(digest_moved(around[:6], on(device, at), on(device, new), 0)[None])
    added, taken = REFERENCE.digest_at(at, new, 0), REFERENCE.digest_at(at, old, 0)
    assert moved == [tuple((a - b) % (1 << 64) for a, b in zip(added, taken, strict=True))]


def test_what_cannot_be_digested_is_refused(device: torch.device) -> None:
    memory = on(device, noise(8, 2))
    with pytest.raises(UnsupportedDType):
        digest_all([torch.zeros(2, dtype=torch.int64, device=device)], [0])
    with pytest.raises(StopError, match="without gaps"):
        digest_all([memory[::2]], [0])
    with pytest.raises(StopError, match="first indices"):
        digest_all([memory], [0, 1])
    with pytest.raises(StopError, match="first indices"):
        digest_moved_all(prepare_scatter([]), [0])
