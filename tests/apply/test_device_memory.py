"""A module or mapping whose tensors are on a device follows a run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="devices are reached through torch")

from sample_devices import CASES, Arrays, HostTrainer, bits_of, on, versions  # noqa: E402

import weightwire as ww  # noqa: E402
from sample_training import inline  # noqa: E402
from weightwire.apply import device_writes, memory, staging  # noqa: E402
from weightwire.diff.memory import open_state  # noqa: E402
from weightwire.digest import digest_state  # noqa: E402
from weightwire.engines.module_target import ModuleTarget  # noqa: E402
from weightwire.errors import BaseMismatch, TargetMismatch  # noqa: E402
from weightwire.kernels.triton import scatter  # noqa: E402
from weightwire.subscriber import State, Subscriber  # noqa: E402


def follow(trainer: HostTrainer, target: object, **options: object) -> Subscriber:
    return Subscriber(trainer.store, target, background=inline, **options)  # type: ignore[arg-type]


@pytest.fixture
def no_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decoded on the host, and no changes are copied to it."""

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(staging, "proven_changes", refuse)
    monkeypatch.setattr(staging.Staging, "_copied", refuse)


@pytest.mark.usefixtures("no_way_back")
@pytest.mark.parametrize(("dtype", "codec"), CASES)
def test_mapping_on_a_device_follows_a_host_publisher(
    dtype: str, codec: str, device: torch.device
) -> None:
    trainer = HostTrainer(dtype, codec=codec)
    live = on(device, trainer.state)
    subscriber = follow(trainer, live)
    subscriber.update()
    trainer.step()
    done = subscriber.update()
    assert done is not None
    assert not done.was_whole
    assert bits_of(live) == bits_of(trainer.state)
    assert subscriber.digest == digest_state(open_state(trainer.state))[0]
    assert {tensor.device.type for tensor in live.values()} == {device.type}


def test_chain_is_written_by_one_launch_for_each_element_size(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = HostTrainer(codec="plain", skips=())
    live = on(device, trainer.state)
    subscriber = follow(trainer, live)
    subscriber.update()
    trainer.step(3)
    subscriber.stage()
    n_launches = []
    launch = scatter._launch_write
    monkeypatch.setattr(scatter, "_launch_write", lambda part: (n_launches.append(1), launch(part)))
    subscriber.activate()
    assert len(n_launches) == 1
    subscriber.wait()
    assert bits_of(live) == bits_of(trainer.state)


class Module(torch.nn.Module):
    """The tensors of a trainer as parameters of one type."""

    def __init__(self, state: Arrays, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        for name, tensor in on(device, state).items():
            self.register_parameter(name, torch.nn.Parameter(tensor.to(dtype), requires_grad=False))


@pytest.mark.usefixtures("no_way_back")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_module_of_the_runs_type_or_a_wider_one_follows(
    dtype: torch.dtype, device: torch.device
) -> None:
    trainer = HostTrainer(codec="plain")
    module = Module(trainer.state, device, dtype)
    subscriber = follow(trainer, ModuleTarget(module))
    subscriber.update()
    trainer.step()
    done = subscriber.update()
    assert done is not None
    assert not done.was_whole
    wanted = {name: t.to(dtype) for name, t in on(device, trainer.state).items()}
    assert bits_of(dict(module.named_parameters())) == bits_of(wanted)


def test_tensor_that_is_not_in_a_row_is_written_beside_the_others(device: torch.device) -> None:
    trainer = HostTrainer(codec="plain")
    live = on(device, trainer.state)
    live["embed"] = live["embed"].t().contiguous().t()
    subscriber = follow(trainer, live)
    subscriber.update()
    assert not live["embed"].is_contiguous()
    trainer.step()
    subscriber.update()
    assert bits_of(live) == bits_of(trainer.state)


def test_names_that_are_tied_in_the_run_and_copies_here_are_both_written(
    device: torch.device,
) -> None:
    old, new = versions(2)
    for state in (old, new):
        state["head"] = state["embed"]
    live = on(device, old)
    assert live["head"].data_ptr() != live["embed"].data_ptr()
    ww.apply(live, ww.diff(old, new, codec="plain"))
    assert bits_of(live) == bits_of(new)


def test_tensor_that_was_replaced_after_staging_is_written_where_it_is(
    device: torch.device,
) -> None:
    trainer = HostTrainer(codec="plain")
    live = on(device, trainer.state)
    subscriber = follow(trainer, live)
    subscriber.update()
    trainer.step()
    subscriber.stage()
    before = live["embed"]
    old = before.clone()
    live["embed"] = live["embed"].clone()
    subscriber.activate()
    subscriber.wait()
    assert bits_of(live) == bits_of(trainer.state)
    assert bits_of({"embed": before}) == bits_of({"embed": old})


def test_tensor_that_no_kernel_reaches_any_more_is_loaded_anew(device: torch.device) -> None:
    trainer = HostTrainer(codec="plain")
    live = on(device, trainer.state)
    subscriber = follow(trainer, live)
    subscriber.update()
    trainer.step()
    subscriber.stage()
    before = bits_of(live)
    live["embed"] = live["embed"].t().contiguous().t()
    with pytest.raises(TargetMismatch, match="'embed' moved"):
        subscriber.activate()
    assert bits_of(live) == before
    subscriber.update()
    assert bits_of(live) == bits_of(trainer.state)


def test_flipped_bit_in_live_memory_is_refused_and_healed(device: torch.device) -> None:
    trainer = HostTrainer(codec="plain")
    live = on(device, trainer.state)
    subscriber = follow(trainer, live, scrub_versions=1000)
    subscriber.update()
    live["embed"].view(torch.int16)[2, 5] ^= 4
    trainer.step()
    done = subscriber.update()
    assert done is not None
    assert done.was_whole
    assert subscriber.n_heals == 1
    assert bits_of(live) == bits_of(trainer.state)


def test_patch_for_another_state_writes_nothing(device: torch.device) -> None:
    first, second, third = versions(3)
    live = on(device, first)
    with pytest.raises(BaseMismatch):
        ww.apply(live, ww.diff(second, third, codec="plain"))
    assert bits_of(live) == bits_of(first)


def half_of(part: scatter.ScatterPart) -> None:
    """Some places are written, others are not."""
    for live, positions, bits in zip(
        part.memories, part.positions, part.bucket.memories, strict=True
    ):
        n = len(bits) // 2
        live[positions[:n].long()] = bits[:n]
    raise RuntimeError("killed")


def nothing(_: scatter.ScatterPart) -> None:
    raise RuntimeError("killed")


@pytest.mark.parametrize("die", [half_of, nothing])
def test_interrupted_activation_can_be_repeated(
    die: Callable[[scatter.ScatterPart], None],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = HostTrainer(codec="plain", skips=())
    live = on(device, trainer.state)
    subscriber = follow(trainer, live)
    subscriber.update()
    trainer.step(2)
    subscriber.stage()
    with monkeypatch.context() as patched:
        patched.setattr(scatter, "_launch_write", die)
        with pytest.raises(RuntimeError, match="killed"):
            subscriber.activate()
    assert subscriber.state is State.DIRTY
    subscriber.activate()
    subscriber.wait()
    assert bits_of(live) == bits_of(trainer.state)


def test_write_that_did_not_happen_is_noticed_and_named(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = versions(2)
    live = on(device, old)
    staged = memory.stage(live, ww.diff(old, new, codec="plain"))
    with monkeypatch.context() as patched:
        patched.setattr(device_writes.DeviceWrites, "write", lambda _: None)
        memory.activate(live, staged)
    with pytest.raises(TargetMismatch, match="live memory"):
        memory.check_written(live, staged)
    memory.activate(live, staged)
    memory.check_written(live, staged)
    live["mlp"].view(torch.int16)[staged.launches.writes[1].to_host().positions[0].item()] ^= 1
    with pytest.raises(TargetMismatch, match=staged.launches.writes[1].name):
        memory.check_written(live, staged)


def test_double_buffer_on_a_device_exchanges_tensors_of_that_device(device: torch.device) -> None:
    trainer = HostTrainer(codec="plain")
    live = on(device, trainer.state)
    subscriber = follow(trainer, live, double_buffer=True)
    for _ in range(4):
        subscriber.update()
        assert bits_of(live) == bits_of(trainer.state)
        assert {tensor.device.type for tensor in live.values()} == {device.type}
        trainer.step()


def test_tensor_that_is_new_in_the_run_is_made_on_the_device_of_the_others(
    device: torch.device,
) -> None:
    old, new = versions(2)
    live = on(device, old)
    new["more"] = new["mlp"].copy()
    ww.apply(live, ww.diff(old, new, codec="plain"))
    assert bits_of(live) == bits_of(new)
    assert live["more"].device.type == device.type
