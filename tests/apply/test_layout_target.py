from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from sample_engines import Engine, Training, bits_in, checkpoint, loaded, train

from sample_training import inline
from weightwire.apply.layouts import engine_memory, engine_parameters
from weightwire.apply.layouts.engine_memory import DeviceMemory, storage_integers
from weightwire.apply.layouts.target import LayoutTarget
from weightwire.apply.targets import MemoryTarget
from weightwire.errors import StopError, TargetMismatch, UnsupportedLayout
from weightwire.kernels.native import NativeKernels
from weightwire.model import Bits
from weightwire.publisher import Publisher
from weightwire.store.extras import AnchorPolicy
from weightwire.subscriber import State, Subscriber

DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float8_e4m3fn, torch.bfloat16),
    (torch.float8_e5m2, torch.float16),
]


@pytest.mark.parametrize("ties_head", [True, False])
@pytest.mark.parametrize(("published", "runtime"), DTYPES)
def test_every_parameter_is_what_a_fresh_load_of_the_version_gives(
    published: torch.dtype, runtime: torch.dtype, ties_head: bool
) -> None:
    training = Training(checkpoint(dtype=published))
    engine = Engine(dtype=runtime, ties_head=ties_head)
    subscriber, _ = training.follow(engine)
    for number in range(5):
        done = subscriber.update()
        assert done is not None
        assert done.was_whole == (number == 0)
        assert bits_in(engine) == loaded(engine, training.tensors)
        training.step()


@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_receiver_many_versions_behind_or_new_is_brought_to_the_newest(codec: str) -> None:
    training = Training(codec=codec, skips=())
    engine, late = Engine(dtype=torch.float32), Engine(dtype=torch.float32)
    subscriber, _ = training.follow(engine)
    subscriber.update()
    training.step(5)
    subscriber.update()
    training.follow(late)[0].update()
    assert bits_in(engine) == bits_in(late) == loaded(engine, training.tensors)


def test_names_tied_here_and_apart_in_the_run_are_refused_and_nothing_is_written() -> None:
    tensors = checkpoint()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    engine = Engine(ties_head=False)
    subscriber, _ = Training(tensors).follow(engine)
    subscriber.update()
    assert bits_in(engine) == loaded(engine, tensors)
    tied = Engine(ties_head=False)
    tied.head = tied.embed
    tied.load_weights = lambda pairs: [  # type: ignore[method-assign,assignment,misc]
        tied._load_vocabulary(tied.embed, t) for n, t in pairs if "embed" in n or "head" in n
    ]
    before = bits_in(tied)
    subscriber, _ = Training(tensors).follow(tied)
    with pytest.raises(UnsupportedLayout, match="'embed'"):
        subscriber.update()
    assert bits_in(tied) == before


def test_names_the_run_ties_and_the_engine_does_not_are_kept_as_copies() -> None:
    training = Training()
    engine = Engine(ties_head=False)
    subscriber, target = training.follow(engine)
    subscriber.update()
    parts = target.layout.parts["model.embed_tokens.weight"]
    assert sorted((part.parameter, part.is_copy) for part in parts)[0][0] == "embed"
    assert [part.is_copy for part in parts] == [False, True]
    training.step()
    subscriber.update()
    assert bits_in(engine)["head"] == bits_in(engine)["embed"]


def test_damage_to_a_copy_is_found_and_healed() -> None:
    training = Training()
    engine = Engine(ties_head=False)
    subscriber, _ = training.follow(engine, scrub_versions=1)
    subscriber.update()
    engine.head.data[3, 3] = 42.0
    training.step()
    subscriber.update()
    assert subscriber.n_heals == 1
    assert bits_in(engine) == loaded(engine, training.tensors)


@pytest.mark.parametrize("bits", [1, 1 << 16])
@pytest.mark.parametrize("parameter", ["norm", "w2", "gate_up"])
def test_damage_to_live_memory_is_found_and_healed(parameter: str, bits: int) -> None:
    training = Training()
    engine = Engine(dtype=torch.float32)
    subscriber, _ = training.follow(engine, scrub_versions=2)
    subscriber.update()
    getattr(engine, parameter).data.view(torch.int32).view(-1)[3] ^= bits
    for _ in range(2):
        training.step()
        subscriber.update()
    assert subscriber.n_heals == 1
    assert bits_in(engine) == loaded(engine, training.tensors)


class Mortal(NativeKernels):
    """Dies after so many memories were written to."""

    def __init__(self, n_left: int) -> None:
        self.n_left = n_left

    def scatter_all(self, writes: Sequence[tuple[Bits, Bits, Bits]], n_threads: int) -> None:
        super().scatter_all(writes[: self.n_left], n_threads)
        raise RuntimeError("killed")


@pytest.mark.parametrize("n_writes", [0, 1, 7])
def test_interrupted_activation_can_be_repeated(
    n_writes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training()
    engine = Engine(1, 2)
    subscriber, _ = training.follow(engine)
    subscriber.update()
    training.step()
    subscriber.stage()
    with monkeypatch.context() as patched:
        patched.setattr(engine_memory, "kernels", lambda: Mortal(n_writes))
        with pytest.raises(RuntimeError):
            subscriber.activate()
    assert subscriber.state is State.DIRTY
    subscriber.activate()
    subscriber.wait()
    for _ in range(2):
        assert bits_in(engine) == loaded(engine, training.tensors)
        training.step()
        done = subscriber.update()
        assert done is not None
        assert not done.was_whole


def test_write_that_did_not_happen_is_noticed_and_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    engine = Engine()
    subscriber, _ = training.follow(engine)
    subscriber.update()
    training.step()
    subscriber.stage()
    with monkeypatch.context() as patched:
        patched.setattr(NativeKernels, "scatter_all", lambda *_: None)
        subscriber.activate()
    with pytest.raises(TargetMismatch, match="live memory"):
        subscriber.wait()
    subscriber.update()
    assert bits_in(engine) == loaded(engine, training.tensors)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_memory_that_only_a_device_can_reach_is_mirrored_and_written_there(
    n_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_parameters, "memory_of", lambda t: DeviceMemory(storage_integers(t)))
    training = Training()
    engine = Engine(n_ranks - 1, n_ranks, torch.float32)
    subscriber, target = training.follow(engine, scrub_versions=1)
    for _ in range(4):
        subscriber.update()
        assert bits_in(engine) == loaded(engine, training.tensors)
        training.step()
    held = target.layout.parts
    assert target.n_mirror_bytes == sum(2 * target.layout.specs[n].n_elements for n in held)
    engine.norm.data.view(torch.int32)[3] ^= 1 << 16
    subscriber.update()
    assert subscriber.n_heals == 1
    assert bits_in(engine) == loaded(engine, training.tensors)


def test_nothing_is_mirrored_where_the_engine_holds_everything() -> None:
    subscriber, target = Training().follow(Engine(dtype=torch.float32))
    subscriber.update()
    assert target.n_mirror_bytes == 0


def test_parameters_that_moved_are_traced_and_loaded_anew() -> None:
    training = Training()
    engine = Engine()
    subscriber, _ = training.follow(engine)
    subscriber.update()
    engine.qkv.data = torch.zeros_like(engine.qkv.data)
    training.step()
    done = subscriber.update()
    assert done is not None
    assert done.was_whole
    assert bits_in(engine) == loaded(engine, training.tensors)


def test_parameters_that_move_after_staging_are_not_written_to() -> None:
    training = Training()
    engine = Engine()
    subscriber, _ = training.follow(engine)
    subscriber.update()
    training.step()
    subscriber.stage()
    engine.qkv.data = torch.zeros_like(engine.qkv.data)
    with pytest.raises(TargetMismatch, match="moved"):
        subscriber.activate()
    subscriber.update()
    assert bits_in(engine) == loaded(engine, training.tensors)


def test_run_that_gains_loses_and_reties_tensors_is_followed() -> None:
    training = Training()
    engine = Engine(ties_head=False)
    subscriber, target = training.follow(engine)
    subscriber.update()
    training.tensors["lm_head.weight"] = training.tensors["lm_head.weight"].clone()
    training.tensors["layer.extra"] = torch.ones(5)
    del training.tensors["layer.rotary.inv_freq"]
    for _ in range(3):
        training.step()
        subscriber.update()
        assert bits_in(engine) == loaded(engine, training.tensors)
    assert "layer.extra" not in target.layout.parts
    training.tensors["lm_head.weight"] = training.tensors["model.embed_tokens.weight"]
    for _ in range(2):
        training.step()
        subscriber.update()
        assert bits_in(engine) == loaded(engine, training.tensors)


def test_tensor_that_went_and_came_back_is_written_whole() -> None:
    training = Training(skips=(), anchors=AnchorPolicy(chain_share=100))
    engine = Engine(1, 2)
    subscriber, _ = training.follow(engine)
    subscriber.update()
    norm = training.tensors.pop("layer.norm.weight")
    training.step()
    training.tensors["layer.norm.weight"] = norm + 1
    training.step(2)
    done = subscriber.update()
    assert done is not None
    assert not done.was_whole
    assert bits_in(engine) == loaded(engine, training.tensors)


def test_tensor_of_another_shape_is_refused_by_the_loader_and_nothing_is_written() -> None:
    training = Training()
    engine = Engine()
    subscriber, _ = training.follow(engine)
    subscriber.update()
    before = bits_in(engine)
    training.tensors["layer.norm.weight"] = torch.ones(5, dtype=torch.bfloat16)
    training.step()
    with pytest.raises(UnsupportedLayout, match="dry run"):
        subscriber.update()
    assert bits_in(engine) == before


def test_what_the_loader_leaves_alone_stays_and_what_is_unused_is_not_decoded() -> None:
    training = Training()
    engine = Engine()
    subscriber, target = training.follow(engine)
    subscriber.update()
    engine.get_buffer("cache").fill_(77)
    training.step()
    subscriber.update()
    assert bits_in(engine)["cache"] == torch.full((5,), 77.0).numpy().tobytes()
    unused = target.layout.specs["layer.rotary.inv_freq"].n_elements
    n_all = sum(spec.n_elements for spec in target.layout.specs.values())
    assert target.n_decoded == n_all - unused


def test_aborted_staging_leaves_the_engine_and_the_next_update_right() -> None:
    training = Training()
    engine = Engine(0, 2)
    subscriber, _ = training.follow(engine)
    subscriber.update()
    before = bits_in(engine)
    training.step()
    subscriber.stage()
    subscriber.abort()
    assert bits_in(engine) == before
    training.step()
    subscriber.update()
    assert bits_in(engine) == loaded(engine, training.tensors)


def test_parameters_may_be_a_mapping() -> None:
    training = Training()
    engine = Engine()
    target = LayoutTarget(engine.load_weights, dict(engine.tensors()))
    with Subscriber(training.store, target, background=inline) as subscriber:
        subscriber.update()
    assert bits_in(engine) == loaded(engine, training.tensors)


def test_layout_and_shares_before_the_first_load_are_refused() -> None:
    target = LayoutTarget(list, {})
    with pytest.raises(StopError, match="nothing was loaded"):
        _ = target.layout
    with pytest.raises(StopError, match="nothing was loaded"):
        target.shares()


def test_what_another_target_prepared_is_refused() -> None:
    training = Training()
    live = {name: tensor.clone() for name, tensor in training.tensors.items()}
    ready = []

    class Spy(MemoryTarget):
        def prepare(self, *args: object, **options: object) -> object:  # type: ignore[override]
            ready.append(super().prepare(*args, **options))  # type: ignore[arg-type]
            return ready[-1]

    with Subscriber(training.store, Spy(live), background=inline) as subscriber:
        subscriber.update()
    engine = Engine()
    with pytest.raises(StopError, match="another target"):
        LayoutTarget(engine.load_weights, engine.tensors).activate(ready[0])


def test_restarted_publisher_and_a_run_of_another_state_are_followed() -> None:
    training = Training()
    engine = Engine(1, 2)
    subscriber, _ = training.follow(engine)
    subscriber.update()
    train(training.tensors, 77)
    again = Publisher(training.store, training.tensors, background=inline)
    again.publish().result()
    subscriber.update()
    assert bits_in(engine) == loaded(engine, training.tensors)
