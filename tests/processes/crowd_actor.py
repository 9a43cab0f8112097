"""Eight subscribers in one process: each takes one update whenever it is told to, and counts requests.

    crowd_actor.py NAME N_SUBSCRIBERS

Reads "go" lines, answers each with one line of JSON, and ends when its input ends.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
from actor_states import Tensors, first_state, sha256_of, store_of_environment

import weightwire as ww
from weightwire.store.counting import CountingStore, StoreCounts

N_ELEMENTS = 2_000


class Member:
    """One subscriber and what it asked of the store."""

    def __init__(self, worker: str) -> None:
        self.live: Tensors = {n: np.zeros_like(t) for n, t in first_state(N_ELEMENTS).items()}
        self._store = CountingStore(store_of_environment())
        self.subscriber = ww.Subscriber(self._store, self.live, worker=worker)

    def update(self) -> dict[str, object]:
        """Bring it to the newest version; gives what that took."""
        before = self._store.snapshot()
        updated = self.subscriber.update()
        after = self._store.snapshot()
        return {
            "version": self.subscriber.version,
            "digest": self.subscriber.digest,
            "sha256": sha256_of(self.live),
            "n_requests": n_requests(after) - n_requests(before),
            "n_bytes": updated.n_bytes if updated else 0,
        }


def n_requests(counts: StoreCounts) -> int:
    """Everything the store was asked."""
    return sum(number for name, number in asdict(counts).items() if not name.startswith("n_bytes"))


def main(name: str, n_subscribers: str) -> None:
    """Answer until the input ends."""
    members = [Member(f"{name}-{number}") for number in range(int(n_subscribers))]
    with ThreadPoolExecutor(len(members)) as pool:
        for _ in sys.stdin:
            answers = list(pool.map(Member.update, members))
            print(json.dumps(answers), flush=True)
    for member in members:
        member.subscriber.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
