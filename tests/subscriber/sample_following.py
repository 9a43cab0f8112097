"""A trainer with a store, receivers on demand, and a way to damage what is stored."""

from __future__ import annotations

from sample_training import inline, train, weights
from weightwire.publisher import Publisher
from weightwire.store.memory import MemoryStore
from weightwire.subscriber import Subscriber


class Training:
    """A trainer, its store, and receivers on demand."""

    def __init__(self, store: object = None, **options: object) -> None:
        self.store = store if store is not None else MemoryStore()
        self.state = weights()
        self.pub = Publisher(self.store, self.state, background=inline, **options)  # type: ignore[arg-type]
        self.pub.publish().result()
        self.n_steps = 0

    def publish(self, n: int = 1) -> None:
        for _ in range(n):
            self.n_steps += 1
            train(self.state, self.n_steps)
            self.pub.publish().result()

    def subscriber(self, live: object, store: object = None, **options: object) -> Subscriber:
        return Subscriber(store or self.store, live, background=inline, **options)  # type: ignore[arg-type]


def flip(store: MemoryStore, part: str) -> str:
    """Damage one stored object for good."""
    [key, *_] = [info.key for info in store.list("") if part in info.key]
    raw = bytearray(store.read(key))
    raw[len(raw) // 2] ^= 1
    store.put(key, bytes(raw))
    return key
