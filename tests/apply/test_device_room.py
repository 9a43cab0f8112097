"""A GPU without memory left: the work moves to the host, or fails by name, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="devices are reached through torch")

import sample_engines  # noqa: E402
from sample_devices import HostTrainer, HostTraining, bits_of, on  # noqa: E402
from sample_engines import Engine, loaded  # noqa: E402

from sample_training import inline  # noqa: E402
from weightwire.apply import device_writes, launches, targets  # noqa: E402
from weightwire.apply.layouts import device_elements  # noqa: E402
from weightwire.apply.layouts import target as layout_target  # noqa: E402
from weightwire.errors import DeviceFull  # noqa: E402
from weightwire.kernels.triton import digest  # noqa: E402
from weightwire.subscriber import Subscriber  # noqa: E402


def full(*_: object, **__: object) -> object:
    raise torch.OutOfMemoryError("CUDA out of memory")


def full_once(work: Callable[..., object]) -> Callable[..., object]:
    """The first call finds no room; what was let go of since is enough for the second."""
    calls: list[int] = []

    def run(*args: object) -> object:
        calls.append(1)
        return full() if len(calls) == 1 else work(*args)

    return run


def test_mapping_is_staged_on_the_host_where_its_writes_find_no_room(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = HostTrainer(codec="plain")
    live = on(device, trainer.state)
    subscriber = Subscriber(trainer.store, live, background=inline)
    subscriber.update()
    trainer.step()
    prepare = full_once(device_writes.prepare_writes)
    monkeypatch.setattr(launches, "prepare_writes", prepare)
    done = subscriber.update()
    assert done is not None
    assert not done.was_whole
    assert "staged on the host" in caplog.text
    assert bits_of(live) == bits_of(trainer.state)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Engine:
    monkeypatch.setattr(sample_engines, "N_EXPERTS", 1)
    return Engine(1, 2, torch.float32).to(device)


def bits_in(engine: Engine) -> dict[str, bytes]:
    return bits_of(dict((*engine.named_parameters(), *engine.named_buffers())))


def follow(engine: Engine) -> tuple[HostTraining, Subscriber]:
    training = HostTraining()
    target = layout_target.LayoutTarget(engine.load_weights, engine.tensors)
    return training, Subscriber(training.store, target, background=inline, scrub_versions=1)


@pytest.mark.long
def test_engine_is_staged_on_the_host_where_its_writes_find_no_room(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, subscriber = follow(engine)
    subscriber.update()
    training.step()
    with monkeypatch.context() as patched:
        prepare = full_once(layout_target.prepare_writes)
        patched.setattr(layout_target, "prepare_writes", prepare)
        done = subscriber.update()
    assert done is not None
    assert not done.was_whole
    assert bits_in(engine) == loaded(engine, training.tensors)
    training.step()
    subscriber.update()
    assert bits_in(engine) == loaded(engine, training.tensors)
    assert subscriber.n_heals == 0


@pytest.mark.long
def test_device_without_memory_for_proofs_leaves_them_to_the_host(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, subscriber = follow(engine)
    monkeypatch.setattr(digest, "digest_all", full)
    monkeypatch.setattr(device_elements, "differs", full)
    for _ in range(2):
        subscriber.update()
        assert bits_in(engine) == loaded(engine, training.tensors)
        training.step()
    assert subscriber.n_heals == 0


@pytest.mark.long
def test_device_that_stays_full_is_a_typed_error_and_nothing_is_written(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, subscriber = follow(engine)
    subscriber.update()
    before, version = bits_in(engine), subscriber.version
    training.step()
    with monkeypatch.context() as patched:
        patched.setattr(layout_target, "prepare_writes", full)
        with pytest.raises(DeviceFull, match="nothing was written"):
            subscriber.stage()
    assert (bits_in(engine), subscriber.version) == (before, version)
    subscriber.update()
    assert bits_in(engine) == loaded(engine, training.tensors)
    assert subscriber.n_heals == 0


def test_other_failures_stay_what_they_are(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = HostTrainer(codec="plain")
    subscriber = Subscriber(trainer.store, on(device, trainer.state), background=inline)
    subscriber.update()
    trainer.step()

    def broken(*_: object) -> object:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(launches, "prepare_writes", broken)
    with pytest.raises(RuntimeError, match="illegal"):
        subscriber.stage()


def test_loading_an_anchor_waits_for_the_device_before_and_after(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = HostTrainer(codec="plain")
    zeros = {name: torch.zeros_like(each) for name, each in on(device, trainer.state).items()}
    seen: list[tuple[set[str], bool]] = []

    def note(devices: object) -> None:
        is_loaded = bits_of(zeros) == bits_of(trainer.state)
        seen.append(({each.type for each in devices}, is_loaded))  # type: ignore[attr-defined]

    monkeypatch.setattr(targets, "settle", note)
    Subscriber(trainer.store, zeros, background=inline).update()
    assert seen == [({device.type}, False), ({device.type}, True)]
