"""An engine on a device: decoded, placed, written and proven there, in whatever layout it has."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

torch = pytest.importorskip("torch", reason="devices are reached through torch")

import sample_engines  # noqa: E402
from sample_devices import HostTrainer, HostTraining, Watched, bits_of, on  # noqa: E402
from sample_engines import Engine, loaded  # noqa: E402

from sample_training import inline  # noqa: E402
from weightwire.apply import device_writes  # noqa: E402
from weightwire.apply.layouts.casts import Cast  # noqa: E402
from weightwire.apply.layouts.layout import Layout  # noqa: E402
from weightwire.errors import TargetMismatch  # noqa: E402
from weightwire.kernels.triton import scatter  # noqa: E402
from weightwire.model import dtype_named  # noqa: E402
from weightwire.subscriber import State, Subscriber  # noqa: E402

pytestmark = pytest.mark.long
"""Interpreted, they take minutes."""


@pytest.fixture(autouse=True)
def _few_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stands for all; in the interpreter every tensor costs time."""
    monkeypatch.setattr(sample_engines, "N_EXPERTS", 1)


def follow(training: HostTraining, engine: Engine, **options: object) -> tuple[Subscriber, Watched]:
    target = Watched(engine.load_weights, engine.tensors)
    return Subscriber(training.store, target, background=inline, **options), target  # type: ignore[arg-type]


def bits_in(engine: torch.nn.Module) -> dict[str, bytes]:
    return bits_of(dict((*engine.named_parameters(), *engine.named_buffers())))


def n_loaded(layout: Layout) -> int:
    return len(layout.parts)


DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float8_e4m3fn, torch.bfloat16),
    (torch.float8_e5m2, torch.float16),
]


@pytest.mark.parametrize(("published", "runtime"), DTYPES)
def test_every_parameter_is_what_a_fresh_load_of_the_version_gives(
    published: torch.dtype, runtime: torch.dtype, device: torch.device
) -> None:
    training = HostTraining(published)
    engine = Engine(dtype=runtime, ties_head=False).to(device)
    subscriber, target = follow(training, engine)
    subscriber.update()
    training.step()
    done = subscriber.update()
    assert done is not None
    assert not done.was_whole
    assert bits_in(engine) == loaded(engine, training.tensors)
    assert len(target.names_beside) == n_loaded(target.layout)
    assert not target.ready.writes
    assert target.n_mirror_bytes == 0


def test_chain_of_patches_is_staged_and_written_at_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = HostTraining(skips=())
    engine = Engine(dtype=torch.float32).to(device)
    subscriber, target = follow(training, engine)
    subscriber.update()
    training.step(3)
    subscriber.stage()
    assert len(target.names_beside) == n_loaded(target.layout)
    n_launches = []
    launch = scatter._launch_write
    monkeypatch.setattr(scatter, "_launch_write", lambda part: (n_launches.append(1), launch(part)))
    subscriber.activate()
    assert len(n_launches) == 1
    subscriber.wait()
    assert bits_in(engine) == loaded(engine, training.tensors)


class Split(torch.nn.Module):
    """Halves of columns and of rows, each in a parameter of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = {
            "left": (3, 1000),
            "right": (3000, 3),
            "top": (20,),
            "bottom": (30,),
            "scale": (1,),
        }
        for name, shape in shapes.items():
            room = torch.nn.Parameter(torch.full(shape, 7.0, dtype=dtype), requires_grad=False)
            self.register_parameter(name, room)

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            if name == "embed":
                self.left.data.copy_(tensor[:, :1000])
                self.right.data.copy_(tensor[:, 1000:].t())
            elif name == "mlp":
                self.top.data.copy_(tensor[:20])
                self.bottom.data.copy_(tensor[20:])
            else:
                self.scale.data.copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensor_that_is_split_over_parameters_is_decoded_and_written_on_the_device(
    dtype: torch.dtype, device: torch.device
) -> None:
    trainer = HostTrainer(codec="plain", skips=())
    engine, fresh = Split(dtype).to(device), Split(dtype)
    target = Watched(engine.load_weights, engine.named_parameters)
    subscriber = Subscriber(trainer.store, target, background=inline, scrub_versions=1)
    subscriber.update()
    for n_steps in (1, 2):
        trainer.step(n_steps)
        done = subscriber.update()
        assert done is not None
        assert not done.was_whole
        assert len(target.names_beside) == 3
        assert not target.ready.writes
        fresh.load_weights(on(torch.device("cpu"), trainer.state).items())
        assert bits_in(engine) == bits_in(fresh)
    assert subscriber.n_heals == 0


def test_compact_patches_are_decoded_beside_fused_and_strided_weights(
    device: torch.device,
) -> None:
    training = HostTraining(codec="compact")
    engine = Engine().to(device)
    subscriber, target = follow(training, engine)
    subscriber.update()
    training.step()
    subscriber.update()
    assert len(target.names_beside) == n_loaded(target.layout)
    assert bits_in(engine) == loaded(engine, training.tensors)


def test_published_nans_keep_their_payload_on_the_way_there_and_back(
    device: torch.device,
) -> None:
    training = HostTraining(torch.float16)
    norm = training.tensors["layer.norm.weight"].view(torch.int16)
    norm[:4] = torch.tensor([0x7C01, 0x7E00, -1, -0x8000], dtype=torch.int16)
    training.step()
    engine = Engine(dtype=torch.float32).to(device)
    subscriber, target = follow(training, engine, scrub_versions=1)
    subscriber.update()
    norm[4:8] = torch.tensor([0x7FFF, 0x7C00, -0x3FF, 1], dtype=torch.int16)
    for _ in range(2):
        training.step()
        done = subscriber.update()
        assert done is not None
        assert not done.was_whole
        assert len(target.names_beside) == n_loaded(target.layout)
        # torch's own cast, as in the engine's loader, drops payloads.
        wide = Cast(dtype_named("F16"), dtype_named("F32")).widen(norm.numpy().view("u2"))
        assert bits_in(engine)["norm"] == wide.tobytes()
    assert subscriber.n_heals == 0


def test_rank_that_holds_some_of_each_tensor_is_decoded_and_written_on_the_device(
    device: torch.device,
) -> None:
    training = HostTraining()
    engine = Engine(1, 2, torch.float32).to(device)
    subscriber, target = follow(training, engine, scrub_versions=1)
    subscriber.update()
    for _ in range(2):
        training.step()
        subscriber.update()
        assert bits_in(engine) == loaded(engine, training.tensors)
        assert not target.ready.writes
        assert len(target.names_beside) == n_loaded(target.layout)
    assert target.n_mirror_bytes > 0
    assert subscriber.n_heals == 0


@pytest.mark.parametrize(("parameter", "bit"), [("norm", 1), ("w2", 1 << 16), ("head", 1 << 16)])
def test_damage_to_live_memory_is_found_on_the_device_and_healed(
    parameter: str, bit: int, device: torch.device
) -> None:
    training = HostTraining()
    engine = Engine(dtype=torch.float32, ties_head=False).to(device)
    subscriber, _ = follow(training, engine, scrub_versions=1)
    subscriber.update()
    getattr(engine, parameter).data.view(torch.int32).view(-1)[3] ^= bit
    training.step()
    subscriber.update()
    assert subscriber.n_heals == 1
    assert bits_in(engine) == loaded(engine, training.tensors)


def test_damage_that_no_scrub_saw_is_found_by_the_proof_of_the_base(device: torch.device) -> None:
    training = HostTraining()
    engine = Engine(dtype=torch.float32).to(device)
    subscriber, _ = follow(training, engine, scrub_versions=1000)
    subscriber.update()
    engine.w13.data.view(torch.int32).view(-1)[-3] ^= 1 << 20
    training.step()
    done = subscriber.update()
    assert done is not None
    assert done.was_whole
    assert subscriber.n_heals == 1
    assert bits_in(engine) == loaded(engine, training.tensors)


class Killed(Exception):
    """The process died in the midst of an activation."""


def test_interrupted_activation_can_be_repeated(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = HostTraining(skips=())
    engine = Engine().to(device)
    subscriber, _ = follow(training, engine)
    subscriber.update()
    training.step(2)
    subscriber.stage()

    def die(part: scatter.ScatterPart) -> None:
        """Some places of one parameter are written, others are not."""
        half = len(part.bucket.memories[0]) // 2
        memory, positions = part.memories[0], part.positions[0].long()
        memory[positions[:half]] = part.bucket.memories[0][:half]
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(scatter, "_launch_write", die)
        with pytest.raises(Killed):
            subscriber.activate()
    assert subscriber.state is State.DIRTY
    subscriber.activate()
    subscriber.wait()
    assert bits_in(engine) == loaded(engine, training.tensors)


def test_write_that_did_not_happen_is_noticed_and_repaired(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = HostTraining()
    engine = Engine().to(device)
    subscriber, _ = follow(training, engine)
    subscriber.update()
    training.step()
    subscriber.stage()
    with monkeypatch.context() as patched:
        patched.setattr(device_writes.DeviceWrites, "write", lambda _: None)
        subscriber.activate()
    with pytest.raises(TargetMismatch, match="live memory"):
        subscriber.wait()
    subscriber.update()
    assert bits_in(engine) == loaded(engine, training.tensors)


def test_shares_read_on_the_device_are_those_of_the_host(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = HostTraining()
    engine, there = Engine(1, 2, torch.float32), Engine(1, 2, torch.float32).to(device)
    with monkeypatch.context() as patched:
        patched.setattr("weightwire.kernels.devices.TYPES", {"cuda"})
        subscriber, here = follow(training, engine)
        subscriber.update()
        wanted = here.shares()
    subscriber, target = follow(training, there)
    subscriber.update()
    assert target.shares() == wanted
