"""Dying at any file operation of a subscriber: its cache, and a checkpoint that is written anew."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_worlds import World, bits_of, commits, fresh_folders, report, run_of, zeros

import weightwire as ww
from weightwire.checkpoint import Checkpoint, rename, writer
from weightwire.digest import digest_state
from weightwire.subscriber import State
from weightwire.testing.crash_points import CrashPoint, Fuse, enumerate_crashes

Burn = Callable[[Fuse], Any]


def fused(fuse: Fuse, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, as one effect."""

    def call(*arguments: Any, **options: Any) -> Any:
        return fuse.effect(name, lambda: function(*arguments, **options))

    return call


def fused_halves(fuse: Fuse, write: Callable[..., Any]) -> Callable[..., Any]:
    """A positioned or streamed write, as two effects."""

    def call(descriptor: int, data: Any, *offset: int) -> int:
        half = len(data) // 2
        fuse.effect("write", lambda: write(descriptor, data[:half], *offset))
        later = [at + half for at in offset]
        fuse.effect("write", lambda: write(descriptor, data[half:], *later))
        return len(data)

    return call


def write_bytes(fuse: Fuse) -> Callable[[Path, bytes], int]:
    def call(path: Path, data: bytes) -> int:
        with path.open("wb", buffering=0) as file:
            for part in (data[: len(data) // 2], data[len(data) // 2 :]):
                fuse.effect(f"write {path.name}", lambda p=part: file.write(p))
        return len(data)

    return call


@pytest.fixture
def burning(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fuse], Any]:
    """Makes what a subscriber does to files effects of a fuse, while the block lasts."""

    @contextmanager
    def block(fuse: Fuse) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for name in ("rename", "replace", "mkdir", "unlink"):
                patch.setattr(Path, name, fused(fuse, name, getattr(Path, name)))
            patch.setattr(Path, "write_bytes", write_bytes(fuse))
            patch.setattr(shutil, "rmtree", fused(fuse, "rmtree", shutil.rmtree))
            patch.setattr(os, "pwrite", fused_halves(fuse, os.pwrite))
            patch.setattr(os, "ftruncate", fused(fuse, "ftruncate", os.ftruncate))
            patch.setattr(writer, "_write_all", fused_halves(fuse, writer._write_all))
            patch.setattr(rename, "_renameat2", fused(fuse, "exchange", rename._renameat2))
            yield

    return block


def check_restart(crash: CrashPoint[World], target: Any) -> None:
    """A new process over the same files ends exact, and leaves the cache tidy."""
    world = crash.world
    world.restart()
    subscriber = world.open_subscriber(target, cache=world.folder / "cache")
    subscriber.update()
    assert subscriber.version == max(commits(world)), str(crash)
    assert subscriber.state is State.IDLE
    if isinstance(target, Path):
        with Checkpoint.open(target) as checkpoint:
            assert digest_state(checkpoint)[0] == ww.digest(world.state), str(crash)
    else:
        assert bits_of(target) == bits_of(world.state), str(crash)
    world.open_publisher()
    world.publish()
    subscriber.update()
    left = [path.name for path in (world.folder / "cache").glob("*/*.partial")]
    assert left == [], f"{crash}: what was half fetched is never cleaned up"
    subscriber.close()


@pytest.mark.parametrize("n_behind", [0, 2], ids=["newcomer", "behind"])
def test_a_cache_survives_a_crash_at_every_file_operation(
    tmp_path: Path, burning: Burn, n_behind: int
) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0

    def begin() -> World:
        world = run_of(fresh(), 3)
        subscriber = world.open_subscriber(zeros(world.state), cache=world.folder / "cache")
        if n_behind:
            subscriber.update()
            for _ in range(n_behind):
                world.publish()
        return world

    def update(world: World, fuse: Fuse) -> None:
        with burning(fuse):
            world.subscriber.update()  # type: ignore[union-attr]

    for crash in enumerate_crashes(begin, update):
        n_points += 1
        check_restart(crash, zeros(crash.world.state))
    report(f"file operations of a cache, {'behind' if n_behind else 'newcomer'}", n_points)


@pytest.mark.parametrize("kind", ["anchor", "other tensors"])
def test_a_checkpoint_written_anew_survives_a_crash_at_every_file_operation(
    tmp_path: Path, burning: Burn, kind: str
) -> None:
    fresh, n_points = fresh_folders(tmp_path), 0

    def begin() -> World:
        world = run_of(fresh(), 2)
        target = world.folder / "target"
        subscriber = world.open_subscriber(target, cache=world.folder / "cache")
        if kind == "other tensors":
            subscriber.update()
            world.state["new"] = np.arange(50, dtype=np.float16)
            del world.state["layer.1"]
            world.note()
            world.publish(changed=False)
        subscriber.stage()
        return world

    def activate(world: World, fuse: Fuse) -> None:
        with burning(fuse):
            world.subscriber.activate()  # type: ignore[union-attr]

    for crash in enumerate_crashes(begin, activate):
        n_points += 1
        check_restart(crash, crash.world.folder / "target")
    report(f"file operations of a checkpoint written anew, {kind}", n_points)
