"""Small worlds that can be made again and again, each exactly like the last, and what must hold in them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import weightwire as ww
from hand_clock import HandClock
from weightwire.store import layout
from weightwire.store.memory import MemoryStore
from weightwire.store.retry import RetryPolicy
from weightwire.subscriber import State
from weightwire.testing.crash_points import CrashingStore, CrashPoint, Fuse
from weightwire.workers import InlineExecutor

Tensors = dict[str, Any]
ONCE = RetryPolicy(n_attempts=1)


def inline(n_threads: int, name: str) -> Executor:
    """All work in one thread, so that effects have one order."""
    return InlineExecutor()


def first_state() -> Tensors:
    """A state of several types, with a 0-d, an empty and a tied tensor."""
    rng = np.random.default_rng(1)
    state: Tensors = {
        "embed": (rng.standard_normal((40, 16)) * 0.02).astype(ml_dtypes.bfloat16),
        "layer.0": (rng.standard_normal(900) * 0.02).astype(ml_dtypes.bfloat16),
        "layer.1": rng.standard_normal((20, 15)).astype(np.float32),
        "steps": np.array(7, np.int64),
        "nothing": np.empty((0, 3), np.float16),
    }
    state["head"] = state["embed"]
    return state


def train(state: Tensors, step: int) -> None:
    """One optimizer step: some elements of every tensor move."""
    rng = np.random.default_rng(1000 + step)
    for name, tensor in state.items():
        if name == "head" or not tensor.size:
            continue
        bits = tensor.reshape(-1).view(f"<u{tensor.itemsize}")
        places = rng.choice(bits.size, max(1, bits.size // 25), replace=False)
        bits[places] ^= bits.dtype.type(1 + step % 3)


def bits_of(state: Tensors) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Names, types, shapes and bytes: equality is bit for bit."""
    return {n: (str(t.dtype), t.shape, np.ascontiguousarray(t).tobytes()) for n, t in state.items()}


def zeros(state: Tensors) -> Tensors:
    """The memory of an engine that was just started; tied names are copies there."""
    return {name: np.zeros_like(tensor) for name, tensor in state.items()}


@dataclass
class World:
    """A store, a disk, a trainer, and the truth about what was committed."""

    folder: Path
    clock: HandClock = field(default_factory=lambda: HandClock(jitter=0.5))
    state: Tensors = field(default_factory=first_state)
    truth: dict[str, dict[str, tuple[str, tuple[int, ...], bytes]]] = field(default_factory=dict)
    """Bits by digest, of everything that was ever handed to a publisher."""
    n_steps: int = 0
    n_caches: int = 0

    def __post_init__(self) -> None:
        self.store = MemoryStore(self.clock)
        self.door = CrashingStore(self.store, Fuse())
        self.publisher: ww.Publisher | None = None
        self.subscriber: ww.Subscriber | None = None
        self.note()

    def note(self) -> None:
        """Remember what the trainer holds now."""
        self.truth[ww.digest(self.state)] = bits_of(self.state)

    def train(self) -> None:
        self.n_steps += 1
        train(self.state, self.n_steps)
        self.note()

    def open_publisher(self, **options: Any) -> ww.Publisher:
        self.publisher = ww.Publisher(
            self.door, self.state, clock=self.clock, background=inline, retry=ONCE, **options
        )
        return self.publisher

    def publish(self, *, changed: bool = True) -> ww.Published:
        if changed:
            self.train()
        return self.again.publish().result()

    @property
    def again(self) -> ww.Publisher:
        """The publisher of this world."""
        if self.publisher is None:
            raise LookupError("no publisher was opened")
        return self.publisher

    def open_subscriber(self, target: Any, **options: Any) -> ww.Subscriber:
        self.n_caches += (
            1  # a folder of its own, unless one is given: nobody cleans up after a crash
        )
        options = {"cache": self.folder / f"cache-{self.n_caches}", "worker": "w", **options}
        self.subscriber = ww.Subscriber(
            self.door, target, clock=self.clock, background=inline, retry=ONCE, **options
        )
        return self.subscriber

    def restart(self) -> None:
        """A new process: the store and the disk are there, everything else is gone."""
        self.door = CrashingStore(self.store, Fuse())
        self.publisher = self.subscriber = None


def run_of(folder: Path, n_versions: int, **options: Any) -> World:
    """A world whose publisher has committed so many versions."""
    world = World(folder)
    world.open_publisher(**options)
    for number in range(n_versions):
        world.publish(changed=number > 0)
    return world


def commits(world: World) -> dict[int, bytes]:
    """Every commit record by version."""
    entries = (layout.parse_entry(info.key) for info in world.store.list(layout.LOG))
    return {e.version: world.store.read(e.key) for e in entries if e and e.kind == "commit"}


def fresh_folders(root: Path) -> Callable[[], Path]:
    """Gives another empty folder at each call."""
    numbers = iter(range(1 << 20))

    def fresh() -> Path:
        folder = root / f"world-{next(numbers)}"
        folder.mkdir(parents=True)
        return folder

    return fresh


def check_late_joiner(world: World) -> None:
    """Someone who has nothing gets the newest version, and every bit of it is one that was published."""
    if not commits(world):
        return
    joiner = zeros(world.state)
    subscriber = world.open_subscriber(joiner, receipts=False)
    newest = subscriber.poll()
    subscriber.update()
    assert subscriber.version == newest
    assert subscriber.state is State.IDLE
    assert bits_of(joiner) == world.truth[subscriber.digest]
    subscriber.close()


def check_recovery(
    crash: CrashPoint[World], before: dict[int, bytes], **options: Any
) -> ww.Published:
    """A new publisher loses nothing, publishes exact bits, and everyone gets them."""
    world = crash.world
    world.restart()
    after = commits(world)
    assert {v: after.get(v) for v in before} == before, f"{crash}: a committed version is lost"
    check_late_joiner(world)
    published = _publish_anew(world, options)
    assert published.version > max(after, default=-1), str(crash)
    check_late_joiner(world)
    assert max(commits(world)) == published.version
    return published


def _publish_anew(world: World, options: dict[str, Any]) -> ww.Published:
    publisher = world.open_publisher(**options)
    published = world.publish()
    assert published.digest == ww.digest(world.state)
    publisher.close()
    return published


def report(action: str, n_points: int) -> None:
    """Say how many places were tried; none at all means that the test tests nothing."""
    assert n_points > 0, f"{action}: no crash points"
    print(f"crash points: {action}: {n_points}")
