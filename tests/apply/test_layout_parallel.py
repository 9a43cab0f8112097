from __future__ import annotations

import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from sample_cuts import cut_patch
from sample_engines import Engine, Training, bits_in, checkpoint, loaded
from torch import nn

from sample_training import inline
from weightwire import limits
from weightwire.apply.layouts.shares import prove_shares
from weightwire.apply.layouts.target import LayoutTarget
from weightwire.apply.needs import GRAIN, Span
from weightwire.apply.staging import Staging
from weightwire.diff.memory import open_state
from weightwire.digest import TensorDigest, digest_state
from weightwire.errors import BaseMismatch, CutElsewhere, TargetMismatch
from weightwire.publisher import Publisher
from weightwire.store.memory import MemoryStore
from weightwire.subscriber import Subscriber


def digests_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorDigest]:
    return digest_state(open_state(tensors))[1]


@pytest.mark.parametrize("runtime", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_two_ranks_hold_what_fresh_loads_give_and_prove_it_together(
    runtime: torch.dtype, codec: str
) -> None:
    training = Training(codec=codec)
    engines = [Engine(rank, 2, runtime) for rank in range(2)]
    followed = [training.follow(engine) for engine in engines]
    for _ in range(4):
        done = [subscriber.update() for subscriber, _ in followed]
        for engine in engines:
            assert bits_in(engine) == loaded(engine, training.tensors)
        digests = digests_of(training.tensors)
        proven = prove_shares([target.shares() for _, target in followed], digests)
        assert {*proven} == digests.keys() - {"layer.rotary.inv_freq"}
        training.step()
    assert not any(update.was_whole for update in done if update)


def test_replicas_are_counted_once_and_must_be_equal() -> None:
    training = Training()
    targets = []
    for rank in (0, 1, 0, 1):
        subscriber, target = training.follow(Engine(rank, 2))
        subscriber.update()
        targets.append(target)
    shares = [target.shares() for target in targets]
    digests = digests_of(training.tensors)
    assert "layer.q_proj.weight" in prove_shares(shares, digests)
    wrong = [replace(s, digest=s.digest + TensorDigest(1, 0)) for s in shares[2]]
    with pytest.raises(TargetMismatch, match="two ranks"):
        prove_shares([*shares[:2], wrong], digests)
    assert prove_shares(shares[:1], digests) == ("layer.norm.weight", "layer.scale")


def test_ranks_that_hold_another_version_prove_nothing_and_the_tensor_is_named() -> None:
    training = Training()
    targets = []
    for rank in range(2):
        subscriber, target = training.follow(Engine(rank, 2))
        subscriber.update()
        targets.append(target)
        training.step()
    with pytest.raises(TargetMismatch, match="weight"):
        prove_shares([target.shares() for target in targets], digests_of(training.tensors))


class Shard(nn.Module):
    """Half of the rows, or of the columns, of one large matrix; or all of it."""

    def __init__(self, kind: str, rank: int, n_rows: int, n_columns: int) -> None:
        super().__init__()
        self.kind, self.rank = kind, 0 if kind == "whole" else rank
        shape = {
            "rows": (n_rows // 2, n_columns),
            "columns": (n_rows, n_columns // 2),
            "whole": (n_rows, n_columns),
            "other": (1,),
        }[kind]
        self.w = nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, pairs: object) -> None:
        for _, tensor in pairs:  # type: ignore[attr-defined]
            if self.kind == "other":
                self.w.data.fill_(0)
                continue
            dim = 1 if self.kind == "columns" else 0
            n = self.w.shape[dim]
            self.w.data.copy_(tensor.narrow(dim, self.rank * n, n))


def follow(store: object, shard: Shard) -> tuple[Subscriber, LayoutTarget]:
    target = LayoutTarget(shard.load_weights, shard.named_parameters)
    return Subscriber(store, target, background=inline), target  # type: ignore[arg-type]


def large_training(n_rows: int, n_columns: int) -> tuple[MemoryStore, Publisher, torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    weights = (torch.randn(n_rows, n_columns, generator=source) * 0.02).to(torch.bfloat16)
    store = MemoryStore()
    publisher = Publisher(store, {"w": weights}, background=inline)
    publisher.publish().result()
    return store, publisher, weights


def move(weights: torch.Tensor, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    bits = weights.view(-1).view(torch.int16)
    bits[torch.randint(len(bits), (len(bits) // 100,), generator=source)] += 1


CASES = [
    # kind, elements decoded of a version, elements mirrored; of 6 grains
    ("rows", 3, 0),
    ("columns", 6, 6),
    ("whole", 6, 0),
    ("other", 0, 0),
]


@pytest.mark.parametrize(("kind", "n_decoded", "n_mirrored"), CASES)
def test_rank_decodes_and_keeps_only_what_it_needs(
    kind: str, n_decoded: int, n_mirrored: int
) -> None:
    store, publisher, weights = large_training(6 * 256, GRAIN // 256)
    shard = Shard(kind, 1, *weights.shape)
    subscriber, target = follow(store, shard)
    subscriber.update()
    for seed in range(3):
        move(weights, seed)
        publisher.publish().result()
        subscriber.update()
    fresh = Shard(kind, 1, *weights.shape)
    fresh.load_weights([("w", weights)])
    assert torch.equal(shard.w.view(torch.int16), fresh.w.view(torch.int16))
    assert target.n_decoded == 3 * n_decoded * GRAIN
    assert target.n_mirror_bytes == 2 * n_mirrored * GRAIN


def test_fringes_of_a_shard_that_ends_inside_a_chunk_are_mirrored_and_kept_current() -> None:
    store, publisher, weights = large_training(10, GRAIN // 2 + 1000)
    shard = Shard("rows", 1, *weights.shape)
    subscriber, target = follow(store, shard)
    subscriber.update()
    first = 5 * weights.shape[1]
    assert target.n_mirror_bytes == 2 * (first - first // GRAIN * GRAIN)
    for seed in range(4):
        move(weights, seed)
        publisher.publish().result()
        done = subscriber.update()
        assert done is not None
        assert not done.was_whole
        assert torch.equal(shard.w.view(torch.int16), weights[5:].view(torch.int16))


@pytest.mark.parametrize("kind", ["rows", "columns"])
def test_damage_to_what_a_rank_keeps_of_a_tensor_is_found_and_healed(kind: str) -> None:
    store, publisher, weights = large_training(10, GRAIN // 2 + 1000)
    shard = Shard(kind, 1, *weights.shape)
    target = LayoutTarget(shard.load_weights, shard.named_parameters)
    subscriber = Subscriber(store, target, background=inline, scrub_versions=1)
    subscriber.update()
    shard.w.data.view(-1)[7] = 42.0
    move(weights, 1)
    publisher.publish().result()
    done = subscriber.update()
    assert done is not None
    assert done.was_whole
    assert subscriber.n_heals == 1
    fresh = Shard(kind, 1, *weights.shape)
    fresh.load_weights([("w", weights)])
    assert torch.equal(shard.w.view(torch.int16), fresh.w.view(torch.int16))


def partial_state() -> tuple[LayoutTarget, np.ndarray]:
    """A rank that keeps the second half of four grains."""
    _, _, weights = large_training(4, GRAIN)
    shard = Shard("rows", 1, *weights.shape)
    target = LayoutTarget(shard.load_weights, shard.named_parameters)
    live = open_state({"w": weights})
    ready = target.prepare(Staging(live, digest_state(live)[1]), "", folder=".")  # type: ignore[arg-type]
    target.activate(ready)
    target.check(ready)
    return target, weights.view(torch.int16).numpy()


def test_patch_that_cuts_inside_what_is_kept_asks_for_whole_tensors_and_then_works() -> None:
    target, old = partial_state()
    new = old + (np.arange(old.size).reshape(old.shape) % 91 == 0).astype(old.dtype)
    old, new = old.view(np.uint16), new.view(np.uint16)
    with target.open(None, {}) as state:
        staging = Staging(state)  # type: ignore[arg-type]
        patch = cut_patch("w", _bf16(old), _bf16(new), [GRAIN + 77])
        with pytest.raises(CutElsewhere, match="keep whole"):
            staging.take(patch)
    live = open_state({"w": _bf16(old)})
    needs = target.needs(live.specs, {})
    assert needs.span(live.specs["w"]) == Span(0, 4 * GRAIN)
    staging = Staging(live, None, needs)
    staging.take(patch)
    assert staging.read("w", 0, old.size).tobytes() == new.tobytes()


def test_kept_elements_that_went_bad_are_refused_before_a_part_is_decoded() -> None:
    target, old = partial_state()
    new = _bf16(old.view(np.uint16) ^ (np.arange(old.size).reshape(old.shape) % 50 == 0))
    patch = cut_patch("w", _bf16(old.view(np.uint16)), new, [])
    target.layout.memories[0].overwrite(
        next(target.layout.parts["w"][0].box.within(3 * GRAIN, 3 * GRAIN + 1)),
        np.array(77, np.uint16),
    )
    with target.open(None, {}) as state, pytest.raises(BaseMismatch, match="kept"):
        Staging(state).take(patch)  # type: ignore[arg-type]


def _bf16(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(ml_dtypes.bfloat16)


def test_checkpoint_without_the_alias_is_served_too() -> None:
    tensors = checkpoint()
    del tensors["lm_head.weight"]
    training = Training(tensors)
    engine = Engine()
    subscriber, _ = training.follow(engine)
    subscriber.update()
    training.step()
    subscriber.update()
    assert bits_in(engine) == loaded(engine, training.tensors)


def test_publisher_that_begins_to_cut_elsewhere_costs_one_load_and_whole_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, publisher, weights = large_training(4, GRAIN)
    shard = Shard("rows", 1, *weights.shape)
    subscriber, target = follow(store, shard)
    subscriber.update()
    found = []
    for number in range(4):
        if number == 1:
            monkeypatch.setattr(limits, "PIECE_ELEMENTS", 3 * GRAIN // 2 + 77)
        move(weights, number)
        publisher.publish().result()
        done = subscriber.update()
        assert done is not None
        found.append((done.was_whole, target.n_mirror_bytes // GRAIN))
        assert torch.equal(shard.w.view(torch.int16), weights[2:].view(torch.int16))
    assert found == [(False, 0), (True, 4), (False, 4), (False, 4)]
    assert subscriber.n_heals == 0


def test_late_rank_decodes_only_what_it_needs_of_a_chain() -> None:
    store, publisher, weights = large_training(4, GRAIN)
    for seed in range(3):
        move(weights, seed)
        publisher.publish().result()
    shard = Shard("rows", 1, *weights.shape)
    subscriber, target = follow(store, shard)
    done = subscriber.update()
    assert done is not None
    assert (done.was_whole, done.n_steps) == (True, 4)
    assert target.n_decoded == 3 * 2 * GRAIN
    assert torch.equal(shard.w.view(torch.int16), weights[2:].view(torch.int16))


def test_whole_load_needs_little_memory_beside_the_mirror() -> None:
    store, _, weights = large_training(256, 40 * 1024)
    subscriber, target = follow(store, Shard("columns", 1, *weights.shape))
    subscriber.stage()
    tracemalloc.start()
    subscriber.activate()
    n_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert target.n_mirror_bytes == 2 * weights.numel()
    assert n_peak - target.n_mirror_bytes < 12 << 20 < 2 * weights.numel()
