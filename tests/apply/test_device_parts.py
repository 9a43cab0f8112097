"""Ranks that hold a part of each tensor on a device: chunks are decoded, proven and written there."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="devices are reached through torch")

import numpy as np  # noqa: E402
from sample_devices import Watched  # noqa: E402
from torch import nn  # noqa: E402

from sample_training import inline  # noqa: E402
from weightwire.apply import device_staging, needs  # noqa: E402
from weightwire.apply.layouts.engine_memory import DeviceMemory  # noqa: E402
from weightwire.apply.layouts.shares import prove_shares  # noqa: E402
from weightwire.apply.staging import Staging  # noqa: E402
from weightwire.diff.memory import open_state  # noqa: E402
from weightwire.digest import digest_state  # noqa: E402
from weightwire.kernels.contract import PLAIN_CHUNK  # noqa: E402
from weightwire.publisher import Publisher  # noqa: E402
from weightwire.store.memory import MemoryStore  # noqa: E402
from weightwire.subscriber import Subscriber  # noqa: E402

CHUNK = {"compact": 1 << 10, "plain": PLAIN_CHUNK}
N_ROWS = 6
WITH_FRINGES = 100
"""Elements by which a row is longer than half a chunk: shards then end inside of chunks."""


@pytest.fixture(params=["compact", pytest.param("plain", marks=pytest.mark.long)])
def codec(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A codec whose chunks are short, whatever the density: in the interpreter elements cost time."""
    codec = str(request.param)
    log2 = CHUNK[codec].bit_length() - 1
    monkeypatch.setattr("weightwire.codec.piece.choose_chunk_log2", lambda _: log2)
    monkeypatch.setattr(needs, "GRAIN", CHUNK[codec])
    return codec


class Shard(nn.Module):
    """Half of the rows of two matrices, or half of their columns; and all of a norm, twice."""

    def __init__(self, kind: str, rank: int, n_columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.rank = kind, rank
        shape = (N_ROWS // 2, n_columns) if kind == "rows" else (N_ROWS, n_columns // 2)
        for name, room in {"a": shape, "b": shape, "norm": (9,), "copy": (9,)}.items():
            zeros = torch.zeros(room, dtype=dtype)
            self.register_parameter(name, nn.Parameter(zeros, requires_grad=False))

    def load_weights(self, pairs: object) -> None:
        for name, tensor in pairs:  # type: ignore[attr-defined]
            if name == "norm":
                self.norm.data.copy_(tensor)
                self.copy.data.copy_(tensor)
            else:
                room, dim = getattr(self, name).data, 0 if self.kind == "rows" else 1
                n = room.shape[dim]
                room.copy_(tensor.narrow(dim, self.rank * n, n))


class Training:
    """Publishes two matrices and a norm from the host."""

    def __init__(self, codec: str, n_columns: int, **options: object) -> None:
        source = np.random.default_rng(7)
        shapes = {"a": (N_ROWS, n_columns), "b": (N_ROWS, n_columns), "norm": (9,)}
        self.tensors = {
            name: torch.from_numpy(source.standard_normal(shape) * 0.02).to(torch.bfloat16)
            for name, shape in shapes.items()
        }
        self.store, self.n_steps = MemoryStore(), 0
        options = {"background": inline, "codec": codec, **options}
        arrays = {name: _array(tensor) for name, tensor in self.tensors.items()}
        self.publisher = Publisher(self.store, arrays, **options)  # type: ignore[arg-type]
        self.publisher.publish().result()

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.n_steps += 1
            source = np.random.default_rng(self.n_steps)
            for tensor in self.tensors.values():
                bits = tensor.view(-1).view(torch.int16).numpy()
                bits[source.integers(0, len(bits), max(3, len(bits) // 200))] += 1
            self.publisher.publish().result()

    def follow(self, shard: Shard, **options: object) -> tuple[Subscriber, Watched]:
        target = Watched(shard.load_weights, shard.named_parameters)
        return Subscriber(self.store, target, background=inline, **options), target  # type: ignore[arg-type]


def _array(tensor: torch.Tensor) -> np.ndarray:
    import ml_dtypes

    return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def bits_in(shard: Shard) -> dict[str, bytes]:
    flat = {name: each.detach().cpu().reshape(-1) for name, each in shard.named_parameters()}
    return {name: bytes(each.view(torch.uint8).numpy().tobytes()) for name, each in flat.items()}


def loaded(training: Training, like: Shard, n_columns: int) -> dict[str, bytes]:
    fresh = Shard(like.kind, like.rank, n_columns, like.norm.dtype)
    fresh.load_weights(training.tensors.items())
    return bits_in(fresh)


def columns(codec: str) -> int:
    return CHUNK[codec] // 2 + WITH_FRINGES


KINDS = pytest.mark.parametrize("kind", ["rows", "columns"])


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rank_is_decoded_and_written_on_its_device(
    kind: str, dtype: torch.dtype, codec: str, device: torch.device
) -> None:
    training, n = Training(codec, columns(codec)), columns(codec)
    shard = Shard(kind, 1, n, dtype).to(device)
    subscriber, target = training.follow(shard, scrub_versions=1)
    subscriber.update()
    for _ in range(2):
        training.step()
        done = subscriber.update()
        assert done is not None
        assert not done.was_whole
        assert bits_in(shard) == loaded(training, shard, n)
        assert target.names_beside == {"a", "b", "norm"}
        assert not target.ready.writes
    assert subscriber.n_heals == 0


@KINDS
def test_device_keeps_on_the_host_only_what_it_does_not_hold(
    kind: str, codec: str, device: torch.device
) -> None:
    n, chunk = columns(codec), CHUNK[codec]
    training = Training(codec, n)
    subscriber, target = training.follow(Shard(kind, 1, n, torch.float32).to(device))
    subscriber.update()
    first = N_ROWS // 2 * n
    fringe = first - first // chunk * chunk
    assert target.n_mirror_bytes == 2 * 2 * (fringe if kind == "rows" else N_ROWS * n)


@pytest.mark.long
@KINDS
def test_chain_of_patches_is_staged_at_once(kind: str, codec: str, device: torch.device) -> None:
    n = columns(codec)
    training = Training(codec, n, skips=())
    shard = Shard(kind, 0, n, torch.bfloat16).to(device)
    subscriber, target = training.follow(shard, scrub_versions=1)
    subscriber.update()
    for _ in range(2):
        training.step(3)
        done = subscriber.update()
        assert done is not None
        assert (done.was_whole, done.n_steps) == (False, 3)
        assert target.names_beside == {"a", "b", "norm"}
        assert bits_in(shard) == loaded(training, shard, n)
    assert subscriber.n_heals == 0


def test_ranks_prove_together_what_they_hold(codec: str, device: torch.device) -> None:
    n = columns(codec)
    training = Training(codec, n)
    followed = [
        training.follow(Shard("rows", rank, n, torch.bfloat16).to(device)) for rank in (0, 1)
    ]
    for _ in range(2):
        for subscriber, _ in followed:
            subscriber.update()
        digests = digest_state(open_state(dict(training.tensors)))[1]
        proven = prove_shares([target.shares() for _, target in followed], digests)
        assert {*proven} == {"a", "b", "norm"}
        training.step()


@pytest.mark.long
@KINDS
@pytest.mark.parametrize("parameter", ["a", "copy"])
def test_damage_is_found_by_a_scrub_and_healed(
    kind: str, parameter: str, codec: str, device: torch.device
) -> None:
    n = columns(codec)
    training = Training(codec, n)
    shard = Shard(kind, 1, n, torch.bfloat16).to(device)
    subscriber, _ = training.follow(shard, scrub_versions=1)
    subscriber.update()
    getattr(shard, parameter).data.view(torch.int16).view(-1)[5] ^= 1
    training.step()
    done = subscriber.update()
    assert done is not None
    assert done.was_whole
    assert subscriber.n_heals == 1
    assert bits_in(shard) == loaded(training, shard, n)


def test_damage_that_no_scrub_saw_is_found_before_chunks_are_decoded(
    codec: str, device: torch.device
) -> None:
    n = columns(codec)
    training = Training(codec, n)
    shard = Shard("rows", 1, n, torch.float32).to(device)
    subscriber, _ = training.follow(shard, scrub_versions=1000)
    subscriber.update()
    shard.b.data.view(torch.int32).view(-1)[5] ^= 1 << 20
    training.step()
    done = subscriber.update()
    assert done is not None
    assert done.was_whole
    assert subscriber.n_heals == 1
    assert bits_in(shard) == loaded(training, shard, n)


def test_bits_that_nobody_published_are_found_too(codec: str, device: torch.device) -> None:
    n = columns(codec)
    training = Training(codec, n)
    shard = Shard("rows", 1, n, torch.float32).to(device)
    subscriber, _ = training.follow(shard, scrub_versions=1000)
    subscriber.update()
    shard.a.data.view(torch.int32).view(-1)[5] ^= 1
    training.step()
    subscriber.update()
    assert subscriber.n_heals == 1
    assert bits_in(shard) == loaded(training, shard, n)


@pytest.mark.long
@KINDS
def test_device_without_room_leaves_the_rest_to_the_host(
    kind: str, codec: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = columns(codec)
    training = Training(codec, n, skips=())
    shard = Shard(kind, 1, n, torch.bfloat16).to(device)
    subscriber, target = training.follow(shard, scrub_versions=1)
    subscriber.update()
    monkeypatch.setattr(device_staging, "HELD_BYTES", _room_for_one_version(training))
    monkeypatch.setattr(device_staging, "HELD_SHARE", 0)
    training.step(3)
    subscriber.update()
    assert not target.names_beside
    assert bits_in(shard) == loaded(training, shard, n)
    training.step()
    done = subscriber.update()
    assert done is not None
    assert not done.was_whole
    assert subscriber.n_heals == 0
    assert bits_in(shard) == loaded(training, shard, n)


def _room_for_one_version(training: Training) -> int:
    """The first patch of a chain fits, all of them do not."""
    n_elements = sum(tensor.numel() for tensor in training.tensors.values())
    return n_elements // 200 * 6 + 200


def test_what_is_counted_is_what_the_host_counts(
    codec: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = columns(codec)
    training = Training(codec, n)
    found = []
    for types in ({"cuda"}, {"cuda", "cpu"}):
        monkeypatch.setattr("weightwire.kernels.devices.TYPES", types)
        at = torch.device("cpu") if len(types) == 1 else device
        subscriber, target = training.follow(Shard("rows", 1, n, torch.bfloat16).to(at))
        found.append((subscriber, target))
        subscriber.update()
    training.step()
    counts = []
    for types, (subscriber, target) in zip(({"cuda"}, {"cuda", "cpu"}), found, strict=True):
        monkeypatch.setattr("weightwire.kernels.devices.TYPES", types)
        done = subscriber.update()
        assert done is not None
        counts.append((done.n_changed, target.n_decoded))
    assert counts[0] == counts[1]


def test_host_never_reads_what_the_device_holds(
    codec: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = columns(codec)
    training = Training(codec, n)
    shard = Shard("rows", 1, n, torch.float32).to(device)
    subscriber, target = training.follow(shard)
    subscriber.update()
    training.step()

    def refuse(*_: object) -> object:
        raise AssertionError("the host read what is on the device")

    for place, name in ((DeviceMemory, "read"), (Staging, "_decode_part")):
        monkeypatch.setattr(place, name, refuse)
    subscriber.update()
    assert target.names_beside == {"a", "b", "norm"}
    assert bits_in(shard) == loaded(training, shard, n)
