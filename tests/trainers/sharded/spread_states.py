"""States cut among ranks at will, published by threads, and held by receivers that never knew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

import weightwire as ww
from sample_training import bits_of, inline
from weightwire.diff.memory import MemoryState, open_state
from weightwire.diff.places import Outline
from weightwire.diff.state import StateView
from weightwire.events import Published
from weightwire.model import TensorSpec
from weightwire.store.retry import RetryPolicy
from weightwire.testing.thread_ranks import ThreadRanks, on_ranks
from weightwire.trainers.sharded import ShardedPublisher
from weightwire.trainers.shards import Shards

ONCE = RetryPolicy(n_attempts=1)
State = dict[str, np.ndarray]
Cuts = Mapping[str, Sequence[int]]


def even_cuts(state: State, n_ranks: int) -> dict[str, list[int]]:
    """Where FSDP2 would cut: equal numbers of rows, the last ranks getting fewer or none."""
    cuts = {}
    for name, tensor in state.items():
        n_rows = tensor.shape[0] if tensor.ndim else 1
        n_each, width = -(-n_rows // n_ranks), tensor.size // max(n_rows, 1)
        cuts[name] = [min(rank * n_each, n_rows) * width for rank in range(n_ranks + 1)]
    return cuts


def shards_of(state: State, cuts: Cuts, rank: int) -> Shards:
    """One rank's part of a state in memory."""
    whole = open_state(state)
    outline = Outline(dict(whole.specs), dict(whole.ties))
    starts, parts = {}, {}
    for name, spec in whole.specs.items():
        start, stop = cuts[name][rank], cuts[name][rank + 1]
        if start < stop or (spec.n_elements == 0 and rank == 0):
            starts[name] = start
            parts[name] = state[name].reshape(-1)[start:stop]
    memory = MemoryState(parts.items())
    flat = {n: TensorSpec(n, s.dtype, (s.n_elements,)) for n, s in memory.specs.items()}
    return Shards(outline, starts, StateView(memory, flat, {}))


class Cluster:
    """So many ranks with one state between them; every call happens on all of them at once."""

    def __init__(self, store: Any, state: State, n_ranks: int, **options: Any) -> None:
        self.state, self.cuts = state, even_cuts(state, n_ranks)

        def begin(ranks: ThreadRanks) -> ShardedPublisher:
            mine = store(ranks.rank) if callable(store) else store
            return ShardedPublisher(
                mine,
                lambda: shards_of(self.state, self.cuts, ranks.rank),
                ranks=ranks,
                **{"background": inline, "retry": ONCE, "n_threads": 1, **options},
            )

        self.publishers = _values(on_ranks(n_ranks, begin))

    def publish(self, step: int | None = None) -> list[Any]:
        """What each rank's future gave, or raised."""

        def publish(ranks: ThreadRanks) -> Published:
            publisher = self.publishers[ranks.rank]
            try:
                done: Future[Published] = publisher.publish(step=step)
                return done.result()
            except BaseException as error:
                if not isinstance(error, Exception):
                    publisher._ranks.die()  # it was killed, and the others notice
                raise

        return on_ranks(len(self.publishers), publish)

    def published(self, step: int | None = None) -> Published:
        """The one answer that every rank gave."""
        answers = _values(self.publish(step))
        assert len({(each.version, each.digest, each.n_changed) for each in answers}) == 1
        return answers[0]

    def close(self) -> None:
        _values(on_ranks(len(self.publishers), lambda r: self.publishers[r.rank].close()))


def _values(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def received(store: Any) -> dict[str, bytes]:
    """What an engine that starts now would serve."""
    live: dict[str, np.ndarray] = {}
    with ww.Subscriber(store, live, background=inline) as subscriber:
        subscriber.update()
    return bits_of(live)
