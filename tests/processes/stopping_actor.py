"""A publisher or a folder worker that stops itself, by a real signal, at a chosen place.

    stopping_actor.py publish N_VERSIONS PLACE NUMBER     PLACE: a part of a key
    stopping_actor.py work TARGET CACHE PLACE NUMBER      PLACE: "read KEY", "journal" or "rewrite"

The NUMBER-th time it comes to the place it stops (SIGSTOP), until someone wakes or kills it.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from actor_states import FENCED, first_state, store_of_environment, train

import weightwire as ww
from weightwire import limits
from weightwire.checkpoint import journal, writer
from weightwire.checkpoint.disk import LocalDisk
from weightwire.errors import FencedWriter
from weightwire.store.contract import ObjectInfo, ObjectStore
from weightwire.workers import InlineExecutor

CHUNK_BYTES = 1 << 16
"""Several chunks per anchor even for small weights."""


class Stop:
    """Counts the times a place is passed, and stops the process at one of them."""

    def __init__(self, place: str, number: int) -> None:
        self.place, self._left = place, number

    def at(self, where: str) -> None:
        if self.place not in where:
            return
        self._left -= 1
        if self._left == 0:
            # Sent to this very thread: it does not get one instruction further.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


class StoppingStore:
    """A store in front of which the process may stop; in the middle of a stream, too."""

    def __init__(self, store: ObjectStore, stop: Stop) -> None:
        self._store, self._stop = store, stop

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        self._stop.at(f"put {key}")
        self._store.put(key, data if isinstance(data, bytes) else self._middle(key, data))

    def create(self, key: str, data: bytes) -> bool:
        self._stop.at(f"create {key}")
        return self._store.create(key, data)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._stop.at(f"read {key}")
        return self._store.read(key, start, stop)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        return self._store.list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        self._store.delete(keys)

    def _middle(self, key: str, data: Iterable[bytes]) -> Iterator[bytes]:
        for number, piece in enumerate(data):
            yield piece[: len(piece) // 2]
            self._stop.at(f"middle {number} of {key}")
            yield piece[len(piece) // 2 :]


class StoppingDisk(LocalDisk):
    """A disk on which a checkpoint is overwritten; the process may stop between two writes."""

    stop: Stop

    def pwrite(self, file_descriptor: int, data: memoryview, offset: int) -> None:
        half = data.nbytes // 2
        super().pwrite(file_descriptor, data[:half], offset)
        self.stop.at("journal")
        super().pwrite(file_descriptor, data[half:], offset + half)


def publish(n_versions: int, stop: Stop) -> int:
    """Publish so many versions, with anchors and skip patches often."""
    state, rng = first_state(), np.random.default_rng(5)
    store = StoppingStore(store_of_environment(), stop)
    anchors = ww.AnchorPolicy(every=3)
    try:
        with ww.Publisher(store, state, anchors=anchors, skips=(2,)) as publisher:
            for _ in range(n_versions):
                done = publisher.publish().result()
                print(f"published {done.version} {done.digest}", flush=True)
                train(state, rng)
            publisher.wait()
    except FencedWriter:
        print("fenced", flush=True)
        return FENCED
    return 0


def work(target: Path, cache: Path, stop: Stop) -> int:
    """Bring a folder to the newest version."""
    StoppingDisk.stop = stop
    _stop_in_files(stop)
    store = StoppingStore(store_of_environment(), stop)
    limits.ANCHOR_CHUNK_BYTES = CHUNK_BYTES
    with ww.Subscriber(
        store, target, cache=cache, worker="folder", background=lambda *_: InlineExecutor()
    ) as subscriber:
        updated = subscriber.update()
        n_bytes = updated.n_bytes if updated else 0
        print(f"holds {subscriber.version} {subscriber.digest} {n_bytes}", flush=True)
    return 0


def _stop_in_files(stop: Stop) -> None:
    write_all: Any = writer._write_all

    def stopping(descriptor: int, data: memoryview) -> None:
        half = data.nbytes // 2
        write_all(descriptor, data[:half])
        stop.at("rewrite")
        write_all(descriptor, data[half:])

    journal.LocalDisk = StoppingDisk  # type: ignore[misc]
    writer._write_all = stopping


def main(role: str, *rest: str) -> int:
    """Do one role once."""
    stop = Stop(rest[-2], int(rest[-1]))
    if role == "publish":
        return publish(int(rest[0]), stop)
    return work(Path(rest[0]), Path(rest[1]), stop)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
