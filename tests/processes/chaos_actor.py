"""A publisher or a subscriber that works until it is told to stop, killed, or fenced.

chaos_actor.py publish LOG SEED
chaos_actor.py follow LOG WORKER TARGET CACHE      TARGET is a folder, or "memory"
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from actor_states import (
    FENCED,
    Tensors,
    first_state,
    note,
    sha256_of,
    sha256_of_folder,
    store_of_environment,
    train,
)

import weightwire as ww
from weightwire.errors import FencedWriter, NotARun, RetryError
from weightwire.subscriber import Polling

stop = threading.Event()


def publish(log: Path, seed: int) -> int:
    """Train and publish; every incarnation trains in another direction."""
    state, rng = first_state(), np.random.default_rng(seed)
    anchors = ww.AnchorPolicy(every=6)
    try:
        with ww.Publisher(store_of_environment(), state, anchors=anchors, skips=(4,)) as publisher:
            while not stop.is_set():
                train(state, rng)
                _publish_once(publisher, state, log)
                time.sleep(0.2)
    except FencedWriter:
        return FENCED
    return 0


def _publish_once(publisher: ww.Publisher, state: Tensors, log: Path) -> None:
    digest = ww.digest(state)
    note(log, event="will", digest=digest, sha256=sha256_of(state))
    try:
        done = publisher.publish().result()
    except RetryError as error:
        logging.warning("will try again: %s", error)
        return
    note(log, event="did", version=done.version, digest=done.digest, epoch=done.epoch)


def follow(log: Path, worker: str, target: str, cache: Path) -> int:
    """Follow, and write down what is held after every update."""
    live: Any = _empty() if target == "memory" else Path(target)
    with _open(live, worker, cache) as subscriber:
        for updated in subscriber.follow(stop):
            bits = sha256_of(live) if target == "memory" else sha256_of_folder(live)
            note(log, event="held", version=updated.version, digest=updated.digest, sha256=bits)
            if target == "memory" and ww.digest(live) != updated.digest:
                raise SystemExit(f"version {updated.version}: memory is not what was reported")
    return 0


def _empty() -> Tensors:
    return {name: np.zeros_like(tensor) for name, tensor in first_state().items()}


def _open(live: Any, worker: str, cache: Path) -> ww.Subscriber:
    polling = Polling(first_s=0.1, max_s=0.4)
    while True:
        try:
            return ww.Subscriber(
                store_of_environment(), live, worker=worker, cache=cache, polling=polling
            )
        except NotARun:  # nobody has published yet
            time.sleep(0.2)


def main(role: str, log: str, *rest: str) -> int:
    """Do one role until told to stop."""
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if role == "publish":
        return publish(Path(log), int(rest[0]))
    return follow(Path(log), rest[0], rest[1], Path(rest[2]))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(process)d %(levelname)s %(message)s")
    sys.exit(main(*sys.argv[1:]))
