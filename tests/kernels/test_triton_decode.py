"""The GPU's compact decoder gives what the CPU's gives, or refuses what it refuses."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from weightwire.codec.piece import EncodedPiece, encode_piece
from weightwire.errors import CorruptStream
from weightwire.kernels import use_backend
from weightwire.kernels.contract import N_CLASSES, ClassModel, StepTable, Streams
from weightwire.kernels.model_batch import batch_of
from weightwire.kernels.native import NativeKernels
from weightwire.kernels.reference import EVENT_MASK, EXCEPTIONS
from weightwire.model import Bits, DType, dtype_named

pytest.importorskip("triton", reason="triton is not installed: nothing to compare with")

from weightwire.kernels.triton.decode import Work, decode_compact_all
from weightwire.kernels.triton.uploads import join_parts

if TYPE_CHECKING:
    import torch

    from weightwire.kernels.triton.changes import DeviceChanges

NATIVE = NativeKernels()
SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32}
BF16 = dtype_named("BF16")
ONE_STEP = StepTable((0,), (4096,))
FEW_STEPS = StepTable((0, 1, 2, 3, 4), (2000, 1000, 800, 200, 96))


@dataclasses.dataclass(frozen=True)
class Case:
    """A piece as it was and as it is coded."""

    old: Bits
    piece: EncodedPiece


def case(
    old: Bits, new: Bits, dtype: DType, model: ClassModel | None = None, chunk_log2: int = 12
) -> Case:
    """Coded on the CPU: with the model it chooses, or with this one."""
    if model is None:
        return Case(old, encode_piece(old, new, dtype, n_threads=1))
    streams = NATIVE.encode_compact(old, new, dtype, model, chunk_log2, 1)
    return Case(old, EncodedPiece(len(old), model, chunk_log2, streams))


def model_with(
    log2_weights: dict[int, int], expected: set[int], base_key: int, steps: StepTable = FEW_STEPS
) -> ClassModel:
    """By class; the others weigh 1 and are not expected to change."""
    return ClassModel(
        base_key,
        tuple(log2_weights.get(c, 0) for c in range(N_CLASSES)),
        tuple(c in expected for c in range(N_CLASSES)),
        (steps,) * N_CLASSES,
    )


def keyed(rng: np.random.Generator, keys: npt.NDArray[Any]) -> Bits:
    """bf16 numbers with these exponents, of either sign."""
    noise = rng.integers(0, 128, len(keys)) | rng.integers(0, 2, len(keys)) << 15
    return (noise | keys.astype(np.int64) << 7).astype(np.uint16)


def nudged(old: Bits, at: npt.NDArray[Any], rng: np.random.Generator) -> Bits:
    """A few steps up or down at these places."""
    new = old.copy()
    new[at] += rng.choice(np.array([1, 1, 2, 3, -1, -2]), len(at)).astype(old.dtype)
    return new


def decode(cases: list[Case], dtype: DType, device: torch.device) -> list[DeviceChanges]:
    import torch

    olds = [
        torch.from_numpy(each.old.copy().view(SIGNED[dtype.n_bytes])).to(device) for each in cases
    ]
    models = [each.piece.model for each in cases if each.piece.model is not None]
    batch = batch_of(models, [each.piece.chunk_log2 for each in cases])
    streams = [each.piece.streams for each in cases]
    sizes = [len(each.old) for each in cases]
    return decode_compact_all(Work(olds, sizes, streams, batch, dtype))


def decode_on_cpu(each: Case, dtype: DType) -> tuple[Bits, int]:
    assert each.piece.model is not None
    changes = NATIVE.decode_compact(
        each.old, dtype, each.piece.model, each.piece.chunk_log2, each.piece.streams, 1
    )
    new = each.old.copy()
    new[changes.positions] = changes.bits
    return new, len(changes)


def assert_decoded(cases: list[Case], dtype: DType, device: torch.device) -> None:
    for each, changes in zip(cases, decode(cases, dtype, device), strict=True):
        new, n_changed = decode_on_cpu(each, dtype)
        positions = changes.positions.cpu().numpy().view(np.uint32)
        written = each.old.copy()
        written[positions] = changes.bits.cpu().numpy().view(each.old.dtype)
        assert written.tobytes() == new.tobytes()
        assert changes.n_changed == n_changed
        assert np.all(positions[1:] >= positions[:-1])


@pytest.mark.parametrize(
    "name",
    [
        "BF16",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("F16", "F32", "F8_E4M3", "F8_E5M2", "U8", "I16", "I32")
        ),
    ],
)
def test_pieces_of_every_width_come_back(name: str, device: torch.device) -> None:
    dtype, rng = dtype_named(name), np.random.default_rng(1)
    cases = []
    for n, share in [(1100, 0.02), (0, 0.0), (1, 1.0), (131, 0.1), (700, 0.0), (9, 0.9)]:
        old = rng.integers(0, 1 << 8 * dtype.n_bytes, n, dtype=dtype.bits_dtype)
        if dtype.ordered and dtype.n_bytes > 1:
            scale = np.full(n, 1 << 8 * dtype.n_bytes - 3, dtype=dtype.bits_dtype)
            old = scale + (old & (scale // 8 - 1).astype(dtype.bits_dtype))
        cases.append(case(old, nudged(old, np.flatnonzero(rng.random(n) < share), rng), dtype))
    assert_decoded(cases, dtype, device)


def test_a_slot_may_lie_many_rows_ahead(device: torch.device) -> None:
    rng = np.random.default_rng(2)
    old = keyed(rng, np.full(9000, 120))
    cases = [
        case(old, nudged(old, np.array(at), rng), BF16, model_with({}, set(), 115), 14)
        for at in ([8999], [0, 8999], [1023, 1024, 5119, 5120], [127, 128, 640, 8191, 8192])
    ]
    assert_decoded(cases, BF16, device)


@pytest.mark.parametrize("weights", [pytest.param({}, marks=pytest.mark.long), {0: 3, 1: 8}])
def test_either_half_of_a_row_is_found(weights: dict[int, int], device: torch.device) -> None:
    """Hints are too short to tell the middle of a heavy row, and say nothing of one that is cut."""
    rng = np.random.default_rng(10)
    old = keyed(rng, 115 + rng.integers(0, 2, 256 + 99))
    at = np.array([0, 63, 64, 65, 127, 128, 190, 191, 192, 193, 255, 256, 319, 320, 354])
    assert_decoded(
        [case(old, nudged(old, at, rng), BF16, model_with(weights, set(), 115))], BF16, device
    )


def test_an_event_may_fall_on_every_element(device: torch.device) -> None:
    rng = np.random.default_rng(3)
    old = keyed(rng, 115 + rng.integers(0, 6, 41))
    weights = {c: int(w) for c, w in enumerate(rng.integers(0, 3, 6))}
    piece = case(old, nudged(old, np.arange(41), rng), BF16, model_with(weights, set(), 115), 12)
    assert piece.piece.streams.directory[0, 0] & 0xFFFF == 41
    assert_decoded([piece], BF16, device)


def test_the_heaviest_rows_are_added_up_without_loss(device: torch.device) -> None:
    """Rows of 128 elements that weigh 256 each: their sum has sixteen bits."""
    rng = np.random.default_rng(4)
    old = keyed(rng, np.r_[np.full(4096, 115), np.full(4100, 120)])
    at = np.array([0, 1, 127, 128, 4095, 4096, 4900, 8195])
    assert_decoded(
        [case(old, nudged(old, at, rng), BF16, model_with({0: 8}, set(), 115), 14)], BF16, device
    )


def test_expected_elements_in_some_rows_of_some_pieces(device: torch.device) -> None:
    rng = np.random.default_rng(5)
    keys = np.full(9300, 122)
    keys[[3, 130, 131, 4095, 4096, 9299]] = 115
    keys[6000:6020] = 116
    old = keyed(rng, keys)
    unlikely = np.array([0, 129, 4094, 4097, 9298])
    most = np.setdiff1d(np.flatnonzero(keys < 117), [131, 6004])
    some = model_with({0: 2, 1: 1}, {0, 1}, 115)
    cases = [
        case(old, nudged(old, np.union1d(unlikely, most), rng), BF16, some, 14),
        case(old, nudged(old, unlikely, rng), BF16, model_with({}, set(), 115), 12),
        case(old, nudged(old, most[:3], rng), BF16, some, 13),
        case(old[200:3000], nudged(old[200:3000], unlikely[1:2], rng), BF16, some, 10),
    ]
    assert_decoded(cases, BF16, device)


def test_expected_elements_far_into_a_long_chunk(device: torch.device) -> None:
    """Several programs list them, each from where the one before it ends."""
    rng = np.random.default_rng(13)
    keys = np.full(70_001, 122)
    keys[[5, 300, 301, 32_767, 32_768, 40_000, 65_535, 65_536, 70_000]] = 115
    old = keyed(rng, keys)
    new = nudged(old, np.array([5, 6, 301, 32_767, 32_768, 33_000, 65_536, 70_000]), rng)
    model = model_with({}, {0}, 115)
    assert_decoded([case(old, new, BF16, model, log2) for log2 in (16, 17)], BF16, device)


def test_changes_of_all_kinds_stand_among_each_other_in_many_blocks(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coded ones, single steps, exceptions, and expected elements that change or do not."""
    n = 6000
    if device.type == "cpu":
        # In the interpreter so many would take minutes: fewer, in smaller blocks.
        n = 250
        monkeypatch.setattr("weightwire.kernels.triton.merge._BLOCK", 16)
        monkeypatch.setattr("weightwire.kernels.triton.pop_steps._BLOCK", 16)
    rng = np.random.default_rng(12)
    keys = 115 + rng.choice(4, n, p=[0.2, 0.3, 0.3, 0.2])
    old = keyed(rng, keys)
    is_changed = rng.random(n) < np.where(keys == 115, 0.6, 0.17)
    model = model_with({0: 1, 2: 2}, {0}, 115)
    model = dataclasses.replace(model, steps=(FEW_STEPS, ONE_STEP, *model.steps[2:]))
    each = case(old, nudged(old, np.flatnonzero(is_changed), rng), BF16, model, 13)
    head = int(each.piece.streams.directory[0, 0])
    assert head & EXCEPTIONS
    assert min(head & EVENT_MASK, np.count_nonzero(keys == 115)) > n // 6
    assert_decoded([each], BF16, device)


@pytest.mark.parametrize("chunk_log2", [10, pytest.param(20, marks=pytest.mark.long)])
def test_chunks_of_the_smallest_and_the_largest_size(chunk_log2: int, device: torch.device) -> None:
    rng = np.random.default_rng(6)
    # In the interpreter the largest chunk would take minutes.
    n = 3 * 1024 + 77 if chunk_log2 == 10 or device.type == "cpu" else (1 << 20) + 300
    old = keyed(rng, 115 + rng.integers(0, 4, n))
    at = np.sort(rng.choice(n, 12, replace=False))
    at[-1] = n - 1
    model = model_with({0: 1, 2: 3}, set(), 115)
    assert_decoded([case(old, nudged(old, at, rng), BF16, model, chunk_log2)], BF16, device)


def test_memory_that_is_not_aligned_is_read_all_the_same(device: torch.device) -> None:
    import torch

    rng = np.random.default_rng(7)
    old = keyed(rng, 115 + rng.integers(0, 6, 4400))
    each = case(old, nudged(old, np.arange(5, 4400, 190), rng), BF16)
    memory = torch.zeros(len(old) + 1, dtype=torch.int16, device=device)
    memory[1:] = torch.from_numpy(old.view(np.int16)).to(device)
    assert each.piece.model is not None
    models = batch_of([each.piece.model], [each.piece.chunk_log2])
    work = Work([memory[1:]], [len(old)], [each.piece.streams], models, BF16)
    (found,) = decode_compact_all(work)
    written = old.copy()
    written[found.positions.cpu().numpy()] = found.bits.cpu().numpy().view(np.uint16)
    assert written.tobytes() == decode_on_cpu(each, BF16)[0].tobytes()


@pytest.mark.parametrize("has_expected", [False, True])
def test_dense_chunks_stand_beside_coded_ones(has_expected: bool, device: torch.device) -> None:
    rng = np.random.default_rng(8)
    keys = 116 + rng.integers(0, 5, 3 * 1024 + 5)
    keys[[5, 6, 1030, 2100]] = 115
    old = keyed(rng, keys)
    new = nudged(old, np.array([2, 5, 900, 2048, 2100, 3076]), rng)
    new[1024:2048] = rng.integers(0, 1 << 16, 1024)
    model = model_with({1: 1}, {0} if has_expected else set(), 115, ONE_STEP)
    each = case(old, new, BF16, model, 10)
    assert each.piece.streams.directory[1, 0] == 1 << 21
    assert_decoded([each, case(old[:50], old[:50], BF16, model, 10)], BF16, device)


@pytest.fixture(scope="module")
def frail() -> Case:
    """With exceptions, expected elements, several chunks, and a short last row."""
    rng = np.random.default_rng(9)
    keys = 115 + rng.integers(0, 6, 2200)
    old = keyed(rng, keys)
    expected = np.flatnonzero(keys == 115)[::30]
    old[np.setdiff1d(np.flatnonzero(keys == 115), expected)] = 120 << 7
    new = nudged(old, np.union1d(expected[3:], np.arange(9, 2200, 220)), rng)
    new[[500, 1500]] ^= 0x7000
    return case(old, new, BF16, model_with({0: 1, 1: 2, 3: 1}, {0}, 115), 11)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 12))]
)
def test_a_stream_that_was_tampered_with_is_refused_or_decodes_as_on_the_cpu(
    seed: int, frail: Case, device: torch.device
) -> None:
    rng = np.random.default_rng(100 + seed)
    streams = frail.piece.streams
    words, directory = streams.payload.copy().view("<u4"), streams.directory.copy()
    if seed % 3 == 0:
        directory[rng.integers(len(directory)), 0] ^= np.uint32(1 << rng.integers(32))
    elif seed % 3 == 1:
        words[rng.integers(len(words))] = rng.integers(1 << 32, dtype=np.uint32)
    else:
        first = int(rng.integers(len(words)))
        words[first : first + 4] = rng.choice(np.array([0, 0xFFFFFFFF], dtype=np.uint32))
    tampered = Streams(directory, words.view(np.uint8), streams.n_changed)
    assert_like_the_cpu(Case(frail.old, dataclasses.replace(frail.piece, streams=tampered)), device)


def assert_like_the_cpu(each: Case, device: torch.device) -> None:
    try:
        decode_on_cpu(each, BF16)
    except CorruptStream:
        with pytest.raises(CorruptStream):
            decode([each], BF16, device)
        return
    assert_decoded([each], BF16, device)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_parts_are_joined_in_their_order(backend: str) -> None:
    rng = np.random.default_rng(11)
    parts = [rng.integers(0, 256, n, dtype=np.uint8) for n in (3, 0, (2 << 20) + 5, 1)]
    wanted = np.concatenate(parts)
    out = np.zeros_like(wanted)
    use_backend(backend)
    try:
        join_parts(parts, out)
        with pytest.raises(ValueError, match=r"parts|shape"):
            join_parts(parts, out[:-1])
        with pytest.raises(ValueError, match=r"parts|shape"):
            join_parts(parts[1:], out)
    finally:
        use_backend(None)
    assert out.tobytes() == wanted.tobytes()


def test_a_payload_of_another_size_than_its_directory_says_is_refused(
    frail: Case, device: torch.device
) -> None:
    short = frail.piece.streams._replace(payload=frail.piece.streams.payload[:-4])
    with pytest.raises(CorruptStream, match="payload does not match"):
        decode([Case(frail.old, dataclasses.replace(frail.piece, streams=short))], BF16, device)
