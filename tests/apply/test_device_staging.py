"""Staged beside the weights is staged as on the host: the same writes, errors and bits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="devices are reached through torch")

from sample_cuts import cut_patch  # noqa: E402
from sample_devices import CASES, Arrays, bits_of, on, versions  # noqa: E402

import weightwire as ww  # noqa: E402
from weightwire.apply import device_staging  # noqa: E402
from weightwire.apply.staging import Staging  # noqa: E402
from weightwire.codec.patch import MemoryBuckets, Patch  # noqa: E402
from weightwire.diff.memory import MemoryState, open_state  # noqa: E402
from weightwire.errors import BaseMismatch, CorruptStream, TargetMismatch  # noqa: E402

Written = dict[tuple[str, int], tuple[bytes, bytes]]


def written(staging: Staging) -> Written:
    return {
        (name, start): (changes.positions.tobytes(), changes.bits.tobytes())
        for name, start, changes in staging.writes()
    }


def read_all(staging: Staging) -> dict[str, bytes]:
    return {n: staging.read(n, 0, s.n_elements).tobytes() for n, s in staging.specs.items()}


def staged(live: object, patches: Sequence[Patch]) -> Staging:
    staging = Staging(open_state(live))
    for patch in patches:
        staging.take(patch)
    return staging


def patches_of(chain: Sequence[Arrays], codec: str = "compact") -> list[Patch]:
    return [ww.diff(old, new, codec=codec) for old, new in pairwise(chain)]


@pytest.mark.parametrize(("dtype", "codec"), CASES)
def test_staged_beside_the_weights_is_what_the_host_stages(
    dtype: str, codec: str, device: torch.device
) -> None:
    chain = versions(2, dtype)
    patches = patches_of(chain, codec)
    live = on(device, chain[0])
    beside, here = staged(live, patches), staged(chain[0], patches)
    assert {write.name for write in beside.device_writes()} == {*chain[0]}
    assert written(beside) == written(here)
    assert read_all(beside) == bits_of(chain[1])
    assert beside.digests == here.digests
    assert (beside.n_changed, beside.n_decoded) == (here.n_changed, here.n_decoded)
    assert bits_of(live) == bits_of(chain[0])


def n_listed(staging: Staging, final: Arrays) -> int:
    """How many places the device's lists have, after each was seen to be what it is in the end."""
    n, state = 0, open_state(final)
    for write in staging.device_writes():
        changes = write.to_host()
        n += len(changes)
        bits = state.read(write.name, write.start, write.stop)
        assert bits[changes.positions].tobytes() == changes.bits.tobytes()
        assert (np.diff(changes.positions.astype(np.int64)) > 0).all()
    return n


@pytest.mark.parametrize("codec", [pytest.param("compact", marks=pytest.mark.long), "plain"])
def test_chain_is_staged_as_on_the_host_and_its_lists_agree_on_every_place(
    codec: str, device: torch.device
) -> None:
    chain = versions(4, share=0.1)
    patches = patches_of(chain, codec)
    live = on(device, chain[0])
    beside = staged(live, patches)
    assert written(beside) == written(staged(chain[0], patches))
    assert read_all(beside) == bits_of(chain[-1])
    assert n_listed(beside, chain[-1]) == beside.n_changed
    assert bits_of(live) == bits_of(chain[0])


@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_everything_that_changed_is_listed_once_and_nothing_else(
    codec: str, device: torch.device
) -> None:
    """Dense chunks and classes that are expected to change list what stays, too."""
    old = np.random.default_rng(1).standard_normal(150).astype(np.float16)
    new = old.copy()
    new.view(np.uint16)[np.r_[0:90, 140:150]] += 1
    patch = ww.diff({"w": old}, {"w": new}, codec=codec)
    beside = staged(on(device, {"w": old}), [patch])
    (write,) = beside.device_writes()
    assert write.to_host().positions.tolist() == [*range(90), *range(140, 150)]
    assert write.n_bytes == 100 * 6


CUTS = [([], [70], []), ([70], [30, 90], [65])]


@pytest.mark.long
@pytest.mark.parametrize("cuts", CUTS)
def test_patches_of_a_chain_may_cut_a_tensor_anywhere(
    cuts: tuple[list[int], ...], device: torch.device
) -> None:
    source = np.random.default_rng(len(cuts))
    chain = [source.standard_normal(110).astype(np.float32)]
    for number in range(len(cuts)):
        now = chain[-1].copy()
        now.view(np.uint32)[source.choice(110, 15, replace=False)] += 1 + number
        chain.append(now)
    patches = [
        cut_patch("w", old, new, each)
        for (old, new), each in zip(pairwise(chain), cuts, strict=True)
    ]
    live = on(device, {"w": chain[0]})
    beside = staged(live, patches)
    assert written(beside) == written(staged({"w": chain[0]}, patches))
    assert n_listed(beside, {"w": chain[-1]}) == beside.n_changed
    assert bits_of(live) == bits_of({"w": chain[0]})
    assert beside.read("w", 37, 101).tobytes() == chain[-1][37:101].tobytes()


def test_small_batches_give_what_one_gives(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = versions(3)
    patches = patches_of(chain, "plain")
    monkeypatch.setattr(device_staging, "BATCH_BYTES", 1)
    beside = staged(on(device, chain[0]), patches)
    assert {*beside.changed_names} == {write.name for write in beside.device_writes()}
    assert written(beside) == written(staged(chain[0], patches))


def test_changes_beyond_their_share_go_on_with_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chain = versions(4)
    patches = patches_of(chain, "plain")
    one = patches[0].n_changed * 6
    monkeypatch.setattr(device_staging, "HELD_BYTES", 2 * one + 5)
    monkeypatch.setattr(device_staging, "HELD_SHARE", 0.0)
    beside = staged(on(device, chain[0]), patches)
    assert not [*beside.device_writes()]
    assert written(beside) == written(staged(chain[0], patches))
    assert [record.message for record in caplog.records].count(
        "changes would take more than their share of the device's memory: this update is staged"
        " on the host"
    ) == 1


def test_device_that_runs_out_of_memory_in_a_chain_goes_on_with_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = versions(4)
    patches = patches_of(chain, "plain")
    staging = staged(on(device, chain[0]), patches[:2])

    def refuse(*_: object) -> object:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(device_staging, "proven_on_device", refuse)
    staging.take(patches[2])
    assert not [*staging.device_writes()]
    assert written(staging) == written(staged(chain[0], patches))


class NoRoomLeft(MemoryState):
    """Puts bits together on the device, until that has no memory left."""

    n_left = 4

    def read_device(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        self.n_left -= 1
        if self.n_left < 0 and start < stop:
            raise torch.cuda.OutOfMemoryError
        return super().read_device(name, start, stop)


def test_device_without_memory_for_live_bits_leaves_the_rest_to_the_host(
    device: torch.device,
) -> None:
    chain = versions(3)
    patches = patches_of(chain, "plain")
    beside = staged(NoRoomLeft(on(device, chain[0]).items()), patches)
    assert not [*beside.device_writes()]
    assert written(beside) == written(staged(chain[0], patches))


class SomeOnDevice(MemoryState):
    """Gives a device's bits of one tensor only, and from a moment on of none."""

    n_left = 100

    def read_device(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        self.n_left -= name == "embed"
        is_given = name == "embed" and self.n_left >= 0
        return super().read_device(name, start, stop) if is_given else None


def test_tensors_that_no_kernel_reaches_are_staged_on_the_host_beside_the_others(
    device: torch.device,
) -> None:
    chain = versions(3)
    patches = patches_of(chain, "plain")
    beside = staged(SomeOnDevice(on(device, chain[0]).items()), patches)
    assert {write.name for write in beside.device_writes()} == {"embed"}
    assert written(beside) == written(staged(chain[0], patches))


@pytest.mark.parametrize("n_reads", [2, 4, 6])
def test_tensor_of_which_later_pieces_are_not_reached_moves_to_the_host(
    n_reads: int, device: torch.device
) -> None:
    source = np.random.default_rng(0)
    chain = [source.standard_normal(90).astype(np.float32)]
    for _ in range(2):
        chain.append(chain[-1].copy())
        chain[-1].view(np.uint32)[source.choice(90, 9, replace=False)] += 1
    patches = [cut_patch("embed", old, new, [50], "plain") for old, new in pairwise(chain)]
    live = SomeOnDevice(on(device, {"embed": chain[0]}).items())
    live.n_left = n_reads
    beside = staged(live, patches)
    assert not [*beside.device_writes()]
    assert written(beside) == written(staged({"embed": chain[0]}, patches))


@pytest.mark.parametrize("event", ["full", "reshape", "removed", "int64"])
def test_unusual_records_are_staged_on_the_host(event: str, device: torch.device) -> None:
    chain = versions(4)
    for number, each in enumerate(chain[1:]):
        if event == "full":
            each["new"] = np.arange(40, dtype=np.float32) + number
        elif event == "reshape":
            each["embed"] = each["embed"].reshape(-1, 5)
        elif event == "removed" and number:
            del each["mlp"]
    if event == "int64":
        for number, each in enumerate(chain):
            each["steps"] = np.arange(30) * number
    patches = patches_of(chain, "plain")
    beside, here = staged(on(device, chain[0]), patches), staged(chain[0], patches)
    assert read_all(beside) == bits_of(chain[-1])
    assert written(beside) == written(here)
    assert {n: b.tobytes() for n, b in beside.fresh.items()} == {
        n: b.tobytes() for n, b in here.fresh.items()
    }
    assert {write.name for write in beside.device_writes()} >= {"scale"}


def test_wrong_base_is_refused_by_name(device: torch.device) -> None:
    first, second = versions(2)
    live = on(device, first)
    live["mlp"].view(torch.int16)[7] ^= 1
    with pytest.raises(BaseMismatch, match="'mlp'"):
        staged(live, patches_of([first, second]))


def test_wrong_base_in_the_midst_of_a_chain_is_refused(device: torch.device) -> None:
    chain = versions(4)
    patches = patches_of(chain)
    with pytest.raises(BaseMismatch, match="digest"):
        staged(on(device, chain[0]), [patches[0], patches[2]])


def damaged(patch: Patch, monkeypatch: pytest.MonkeyPatch, at: int) -> Patch:
    """A bit of the last bucket's coded bytes flipped; its hash does not tell."""
    entry = patch.index.buckets[-1]
    raw = bytearray(patch._checked(entry))
    raw[at] ^= 1
    monkeypatch.setattr(Patch, "_checked", lambda *_: bytes(raw))
    return Patch(patch.index, MemoryBuckets({}))


@pytest.mark.parametrize("codec", [pytest.param("compact", marks=pytest.mark.long), "plain"])
def test_damaged_patch_is_refused_as_on_the_host(
    codec: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = np.random.default_rng(3)
    old = source.standard_normal(300).astype(np.float32)
    new = old.copy()
    new.view(np.uint32)[source.choice(300, 30, replace=False)] += 1
    patch = ww.diff({"w": old}, {"w": new}, codec=codec)
    n_bytes = len(patch._checked(patch.index.buckets[-1]))
    refused = set()
    for at in range(n_bytes - 12, n_bytes, 3):
        with monkeypatch.context() as patched:
            bad = damaged(patch, patched, at)
            with pytest.raises((CorruptStream, TargetMismatch)) as here:
                staged({"w": old}, [bad])
            with pytest.raises(here.type, match="'w'") as beside:
                staged(on(device, {"w": old}), [bad])
        assert str(beside.value) == str(here.value)
        refused.add(here.type)
    assert TargetMismatch in refused
