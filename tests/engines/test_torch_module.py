"""A torch module follows a run: nothing moves while it generates, everything arrives bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import weightwire as ww
from engines.small_runs import SOON, SmallRun, bits_of, small_module
from weightwire.engines.torch_module import TorchModuleEngine
from weightwire.errors import Dirty, NotARun, NoWay, StopError, UnsupportedLayout
from weightwire.subscriber import Subscriber


def test_the_newest_version_is_loaded_when_the_constructor_returns(run: SmallRun) -> None:
    run.publish()
    module = small_module()
    with TorchModuleEngine(run.store, module) as engine:
        assert engine.version == 1
        assert engine.digest == run.digests[1] == ww.digest(module)
    assert bits_of(module) == run.bits[1]


def test_it_follows_by_itself_while_idle(run: SmallRun) -> None:
    module = small_module()
    with TorchModuleEngine(run.store, module, polling=SOON) as engine:
        for _ in range(5):
            version = run.publish()
            assert engine.wait_for(version, timeout_s=30)
            assert bits_of(module) == run.bits[version]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wider_module_holds_the_same_numbers(run: SmallRun, dtype: torch.dtype) -> None:
    module = small_module(dtype)
    with TorchModuleEngine(run.store, module, polling=SOON) as engine:
        assert bits_of(module) == run.bits[0]
        for _ in range(3):
            version = run.publish()
            assert engine.wait_for(version, timeout_s=30)
            assert bits_of(module) == run.bits[version]
            assert engine.digest == run.digests[version]


def test_a_narrower_module_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    wide = small_module(torch.float32, seed=3)
    with ww.Publisher(tmp_path / "run", wide) as publisher:
        publisher.publish().result()
    module = small_module()
    before = bits_of(module)
    with pytest.raises(UnsupportedLayout, match=r"0\.weight"):
        TorchModuleEngine(tmp_path / "run", module)
    assert bits_of(module) == before


def test_weights_do_not_move_inside_a_generation(run: SmallRun) -> None:
    module = small_module()
    with TorchModuleEngine(run.store, module, polling=SOON) as engine:
        with engine.generation() as version:
            newest = run.publish()
            while engine.lag == 0:  # until the thread has seen it, and stages
                engine.notify()
                threading.Event().wait(0.01)
            threading.Event().wait(0.1)
            assert engine.version == version == 0
            assert bits_of(module) == run.bits[0]
        assert engine.wait_for(newest, timeout_s=30)
        assert bits_of(module) == run.bits[newest]


def test_every_generation_of_many_threads_sees_one_whole_version(run: SmallRun) -> None:
    module = small_module()
    seen: list[tuple[int, bool]] = []
    stop = threading.Event()

    with TorchModuleEngine(run.store, module, polling=SOON) as engine:

        def generate() -> None:
            while not stop.is_set():
                with engine.generation() as version:
                    first = bits_of(module)
                    seen.append((version, first == run.bits[version] == bits_of(module)))

        threads = [threading.Thread(target=generate) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(8):
                assert engine.wait_for(run.publish(), timeout_s=30)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert {version for version, _ in seen} >= {0, 8}
    assert all(is_whole for _, is_whole in seen)


def test_generation_is_a_decorator_too(run: SmallRun) -> None:
    module = small_module()
    with TorchModuleEngine(run.store, module, polling=SOON) as engine:

        @engine.generation()
        def generate() -> int:
            assert engine._gate.is_inside
            return engine.version

        assert generate() == 0
        assert engine.wait_for(run.publish(), timeout_s=30)
        assert generate() == 1


def test_waiting_inside_a_generation_is_refused(run: SmallRun) -> None:
    with (
        TorchModuleEngine(run.store, small_module()) as engine,
        engine.generation(),
        pytest.raises(StopError, match="inside generation"),
    ):
        engine.wait_for(1)


def test_waiting_for_a_version_that_does_not_come_says_so(run: SmallRun) -> None:
    with TorchModuleEngine(run.store, small_module()) as engine:
        assert not engine.wait_for(1, timeout_s=0.05)


def test_who_is_told_of_updates_hears_of_each_version(run: SmallRun) -> None:
    heard: list[int] = []
    module = small_module()
    with TorchModuleEngine(
        run.store, module, polling=SOON, on_updated=lambda updated: heard.append(updated.version)
    ) as engine:
        assert engine.wait_for(run.publish(), timeout_s=30)
    assert heard == [0, 1]


def test_a_module_that_lags_too_far_begins_no_generation(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = small_module()
    engine = TorchModuleEngine(run.store, module, polling=SOON, max_lag=1, patience_s=0.3)
    stuck = threading.Event()

    def cannot_stage(self: Subscriber, version: int | None = None) -> bool:
        stuck.set()
        raise NoWay("the store is slow today")

    with engine:
        monkeypatch.setattr(Subscriber, "stage", cannot_stage)
        run.publish()
        assert stuck.wait(10)
        with engine.generation() as version:
            assert version == 0
        run.publish()
        while engine.lag < 2:
            threading.Event().wait(0.01)
        with pytest.raises(NoWay, match="2 behind"), engine.generation():
            pass
        monkeypatch.undo()
        assert engine.wait_for(2, timeout_s=30)
        with engine.generation() as version:
            assert version == 2


def test_damage_is_not_served_and_repaired(run: SmallRun) -> None:
    module = small_module()
    with TorchModuleEngine(run.store, module, polling=SOON, scrub_versions=1) as engine:
        with torch.no_grad():
            module[0].weight.view(-1)[7] += 1
        version = run.publish()
        assert engine.wait_for(version, timeout_s=30)
        with engine.generation() as served:
            assert served == version
            assert bits_of(module) == run.bits[version]


def test_a_dirty_module_is_refused(run: SmallRun) -> None:
    engine = TorchModuleEngine(run.store, small_module(), patience_s=0.05)
    engine._stop.set()  # nobody repairs
    engine._thread.join()
    engine._stop.clear()
    engine._subscriber._holding.is_dirty = True
    with pytest.raises(Dirty), engine.generation():
        pass
    engine.close()


def test_what_ends_the_following_is_raised_where_it_matters(
    run: SmallRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(self: Subscriber, version: int | None = None) -> bool:
        raise RuntimeError("out of something")

    with TorchModuleEngine(run.store, small_module(), polling=SOON) as engine:
        monkeypatch.setattr(Subscriber, "stage", breaks)
        run.publish()
        with pytest.raises(StopError, match="out of something"):
            engine.wait_for(1, timeout_s=30)
        with pytest.raises(StopError, match="out of something"), engine.generation():
            pass
        assert engine.error is not None


def test_it_waits_for_a_trainer_that_comes_later(tmp_path: Path) -> None:
    made: list[TorchModuleEngine] = []
    module = small_module()
    thread = threading.Thread(
        target=lambda: made.append(TorchModuleEngine(tmp_path / "run", module, patience_s=60))
    )
    thread.start()
    run = SmallRun(tmp_path)
    run.publish()
    thread.join(60)
    with made[0] as engine:
        assert engine.version == 0
    assert bits_of(module) == run.bits[0]
    run.close()


def test_a_run_that_never_begins_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(NotARun):
        TorchModuleEngine(tmp_path / "run", small_module(), patience_s=0.0)


def test_closing_ends_the_thread_although_a_generation_is_inside(run: SmallRun) -> None:
    module = small_module()
    engine = TorchModuleEngine(run.store, module, polling=SOON)
    with engine.generation():
        run.publish()
        while engine.lag == 0:
            threading.Event().wait(0.01)
        engine.close()
        assert not engine._thread.is_alive()
        assert bits_of(module) == run.bits[0]
    with pytest.raises(StopError, match="closed"), engine.generation():
        pass
