"""A trainer, a store that can be made to misbehave, and engines: what the field's bugs need to happen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

import weightwire as ww
from weightwire.apply.targets import MemoryTarget, Ready
from weightwire.errors import ObjectMissing, StoreUnavailable
from weightwire.store.contract import ObjectInfo, ObjectStore
from weightwire.store.memory import MemoryStore
from weightwire.store.retry import RetryPolicy
from weightwire.workers import InlineExecutor

Tensors = dict[str, Any]
ONCE = RetryPolicy(n_attempts=1)


def inline(n_threads: int, name: str) -> InlineExecutor:
    """Everything in order."""
    return InlineExecutor()


def first_state() -> Tensors:
    """A small model of several types."""
    rng = np.random.default_rng(4)
    return {
        "embed": (rng.standard_normal((50, 20)) * 0.02).astype(ml_dtypes.bfloat16),
        "layer": (rng.standard_normal(2000) * 0.02).astype(ml_dtypes.bfloat16),
        "norm": rng.standard_normal(300).astype(np.float32),
        "step": np.array(3, np.int64),
    }


def train(state: Tensors, seed: int) -> None:
    """Some elements of every tensor move by one bit pattern."""
    rng = np.random.default_rng(seed)
    for tensor in state.values():
        bits = bits_in(tensor)
        bits[rng.choice(bits.size, max(1, bits.size // 30), replace=False)] += 1


def bits_in(tensor: Any) -> Any:
    """A tensor's own memory as flat unsigned integers."""
    flat = tensor.reshape(-1).view(f"<u{tensor.itemsize}")
    assert np.shares_memory(flat, tensor) or not tensor.size
    return flat


def bits_of(state: Tensors) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Names, types, shapes and bytes: equality is bit for bit."""
    return {n: (str(t.dtype), t.shape, np.ascontiguousarray(t).tobytes()) for n, t in state.items()}


def zeros(state: Tensors) -> Tensors:
    """An engine that was just started."""
    return {name: np.zeros_like(tensor) for name, tensor in state.items()}


class Meddled:
    """A store in which a test decides what becomes of each operation; counts reads by key."""

    def __init__(self, store: ObjectStore | None = None) -> None:
        self.inner: ObjectStore = store or MemoryStore()
        self.is_down: Callable[[str, str], bool] = lambda *_: False
        self.spoil: Callable[[str, bytes], bytes] = lambda _, data: data
        self.hide: Callable[[str], bool] = lambda _: False
        self.hide_in_lists: Callable[[str], bool] = lambda _: False
        self.reads: list[str] = []

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        self._meet("put", key)
        self.inner.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._meet("create", key)
        return self.inner.create(key, data)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._meet("read", key)
        self.reads.append(key)
        if self.hide(key):
            raise ObjectMissing(f"{key}: not there (injected)")
        return self.spoil(key, self.inner.read(key, start, stop))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self._meet("list", prefix)
        found = self.inner.list(prefix, after)
        return (i for i in found if not self.hide(i.key) and not self.hide_in_lists(i.key))

    def delete(self, keys: Iterable[str]) -> None:
        self.inner.delete(keys)

    def _meet(self, verb: str, key: str) -> None:
        if self.is_down(verb, key):
            raise StoreUnavailable(f"cannot {verb} {key}: no answer (injected)")


class Trainer:
    """A state, its publisher, and a count of steps; all work is done in order, in this thread."""

    def __init__(self, store: Any, state: Tensors | None = None, **options: Any) -> None:
        self.state = first_state() if state is None else state
        self.n_steps = 0
        self.publisher = ww.Publisher(store, self.state, background=inline, retry=ONCE, **options)

    def train(self) -> None:
        self.n_steps += 1
        train(self.state, self.n_steps)

    def publish(self) -> ww.Published:
        return self.publisher.publish().result()

    def step(self, n_versions: int = 1) -> ww.Published:
        for _ in range(n_versions):
            self.train()
            published = self.publish()
        return published


class Engine:
    """Live weights and their subscriber."""

    def __init__(self, store: Any, state: Tensors, target: Any = None, **options: Any) -> None:
        self.live = zeros(state)
        chosen = self.live if target is None else target(self.live)
        options = {"worker": "w", **options}
        self.subscriber = ww.Subscriber(store, chosen, background=inline, retry=ONCE, **options)

    def update(self) -> ww.Updated | None:
        return self.subscriber.update()

    def holds(self, state: Tensors) -> bool:
        """Whether the engine has these very bits, and says so."""
        same = bits_of(self.live) == bits_of(state)
        return same and self.subscriber.digest == ww.digest(state) and not self.subscriber.is_dirty

    def close(self) -> None:
        self.subscriber.close()


class Sabotaged(MemoryTarget):
    """Live weights that go wrong in or after an activation, as a test says."""

    def __init__(self, state: Tensors) -> None:
        super().__init__(state)
        self.tensors = state
        self.instead: Callable[[Tensors, Callable[[], None]], None] = lambda _, write: write()

    def activate(self, ready: Ready) -> None:
        write = super().activate
        self.instead(self.tensors, lambda: write(ready))
