"""The GPU's plain codec gives the bytes of the reference, and reads them back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from weightwire.errors import CorruptStream
from weightwire.kernels.contract import PLAIN_CHUNK, Streams
from weightwire.kernels.native import NativeKernels
from weightwire.model import Bits, dtype_named

pytest.importorskip("triton", reason="triton is not installed: nothing to compare with")

from weightwire.kernels.triton import plain_decode
from weightwire.kernels.triton.cuts import MAX_SEGMENT_LOG2
from weightwire.kernels.triton.memories import Memories
from weightwire.kernels.triton.plain_decode import decode_plain_all
from weightwire.kernels.triton.plain_encode import encode_plain_all

if TYPE_CHECKING:
    import torch

NATIVE = NativeKernels()
SIGNED = {1: np.uint8, 2: np.int16, 4: np.int32}


def on(device: torch.device, bits: Bits) -> torch.Tensor:
    import torch

    return torch.from_numpy(bits.copy().view(SIGNED[bits.itemsize])).to(device)


def pair(n: int, density: float, width: int, seed: int) -> tuple[Bits, Bits]:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 200, n).astype(f"u{width}")
    new = old.copy()
    new[rng.random(n) < density] += 1
    return old, new


@pytest.mark.parametrize(("name", "width"), [("F8_E4M3", 1), ("BF16", 2), ("F32", 4)])
def test_bytes_and_changes_are_those_of_the_reference(
    name: str, width: int, device: torch.device
) -> None:
    # Sparse, bitmap and dense, empty, one element, tails, and a chunk's border.
    cases = [(1, 1.0), (0, 0.0), (3001, 0.2), (1999, 0.97), (700, 0.0), (1030, 0.001)]
    if width == 2:
        cases.append((PLAIN_CHUNK + 1030, 0.001))
    pairs = [pair(n, density, width, seed) for seed, (n, density) in enumerate(cases)]
    rates = np.array([density for _, density in cases])
    dtype = dtype_named(name)
    olds, news = ([on(device, bits) for bits in side] for side in zip(*pairs, strict=True))
    coded = list(encode_plain_all(Memories(olds, news), dtype, rates, budget_bytes=1 << 26))
    for (old, new), each in zip(pairs, coded, strict=True):
        wanted = NATIVE.encode_plain(old, new, 1)
        assert each.directory.tolist() == wanted.directory.tolist()
        assert each.payload.tobytes() == wanted.payload.tobytes()
        assert each.n_changed == wanted.n_changed
    decoded = decode_plain_all([len(old) for old, _ in pairs], coded, dtype, device)
    for (old, new), each, changes in zip(pairs, coded, decoded, strict=True):
        wanted_changes = NATIVE.decode_plain(len(old), dtype, each, 1)
        positions = changes.positions.cpu().numpy().view(np.uint32)
        assert positions.tolist() == wanted_changes.positions.tolist()
        assert changes.bits.cpu().numpy().tobytes() == wanted_changes.bits.tobytes()
        old[positions] = wanted_changes.bits
        assert old.tobytes() == new.tobytes()


def test_runs_of_pieces_give_the_changes_of_all_at_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [pair(n, 0.1, 2, n) for n in (500, 0, 900, 1, 700)]
    streams = [NATIVE.encode_plain(old, new, 1) for old, new in pairs]
    dtype, sizes = dtype_named("BF16"), [len(old) for old, _ in pairs]
    monkeypatch.setattr(plain_decode, "_RUN_BYTES", 300)
    assert len(plain_decode._parts(streams)) > 2
    decoded = decode_plain_all(sizes, streams, dtype, device)
    for (old, new), changes in zip(pairs, decoded, strict=True):
        old[changes.positions.cpu().numpy()] = changes.bits.cpu().numpy().view(np.uint16)
        assert old.tobytes() == new.tobytes()


def test_a_plain_chunk_is_a_segment() -> None:
    assert 1 << MAX_SEGMENT_LOG2 == PLAIN_CHUNK


def test_a_piece_with_more_changes_than_its_sample_foretold_is_coded_again(
    device: torch.device,
) -> None:
    old, new = pair(9000, 0.6, 2, 1)
    dtype = dtype_named("BF16")
    (coded,) = encode_plain_all(
        Memories([on(device, old)], [on(device, new)]), dtype, np.zeros(1), budget_bytes=0
    )
    assert coded.payload.tobytes() == NATIVE.encode_plain(old, new, 1).payload.tobytes()


@pytest.mark.parametrize("density", [0.001, 0.2, 0.97])
@pytest.mark.parametrize("harm", ["head", "position", "padding", "rows", "payload", "bits"])
def test_streams_that_no_encoder_writes_are_refused_as_on_the_cpu(
    density: float, harm: str, device: torch.device
) -> None:
    dtype = dtype_named("BF16")
    old, new = pair(3001, density, 2, 9)
    streams = harmed(NATIVE.encode_plain(old, new, 1), harm)
    try:
        wanted = NATIVE.decode_plain(len(old), dtype, streams, 1)
    except (CorruptStream, ValueError):
        with pytest.raises(CorruptStream):
            decode_plain_all([len(old)], [streams], dtype, device)
        return
    (found,) = decode_plain_all([len(old)], [streams], dtype, device)
    assert found.positions.cpu().numpy().view(np.uint32).tolist() == wanted.positions.tolist()
    assert found.bits.cpu().numpy().tobytes() == wanted.bits.tobytes()


def harmed(streams: Streams, harm: str) -> Streams:
    payload, directory = streams.payload.copy(), streams.directory.copy()
    parts: dict[str, Any] = {}
    if harm == "head":
        directory[0, 0] += 1
    elif harm == "rows":
        directory = np.concatenate([directory, directory])
    elif harm == "position":
        payload[:4] = 255
    elif harm == "padding":
        payload[-1] ^= 128
    elif harm == "bits":
        payload[len(payload) // 2] ^= 1
    else:
        parts["payload"] = payload[:-4]
    return streams._replace(**{"payload": payload, "directory": directory, **parts})
