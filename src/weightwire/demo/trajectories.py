"""The way back: what the workers generated, as objects in the same store, readable by anyone.

    <arm>-rollouts/000007/worker-1.json

Names follow from batch and worker, and so do the bytes: a worker that is killed and started again
writes the same object again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from weightwire.clock import Clock
from weightwire.demo.settings import Arm, Settings
from weightwire.errors import MalformedRecord, StoreUnavailable
from weightwire.store.contract import ObjectStore
from weightwire.store.retry import RetryingStore, RetryPolicy

_LOOK_S = 0.02
_SLOWEST_LOOK_S = 0.2


@dataclass(frozen=True)
class Group:
    """Several answers to one prompt, and what they were worth."""

    prompt: str
    prompt_ids: list[int]
    answers: list[list[int]]
    log_probs: list[list[float]]
    """Of each token, by the policy that drew it."""
    rewards: list[float]


@dataclass(frozen=True)
class Rollouts:
    """One worker's part of a batch."""

    batch: int
    worker: int
    version: int
    """Which version of the policy generated it."""
    groups: list[Group]


def rollouts_bytes(rollouts: Rollouts) -> bytes:
    """As JSON: Python writes floats so that they are read back bit for bit."""
    return json.dumps(asdict(rollouts), sort_keys=True, separators=(",", ":")).encode()


def parse_rollouts(data: bytes, where: str) -> Rollouts:
    """What ``rollouts_bytes`` wrote.

    Raises:
        MalformedRecord: anything else.
    """
    try:
        fields = json.loads(data)
        groups = [Group(**group) for group in fields.pop("groups")]
        return Rollouts(**fields, groups=groups)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MalformedRecord(f"{where}: not rollouts: {error}") from error


def sha256_of(parts: list[Rollouts]) -> str:
    """What a batch was, all workers together."""
    found = hashlib.sha256()
    for part in parts:
        found.update(rollouts_bytes(part))
    return found.hexdigest()


class Mailbox:
    """The rollouts of one arm: workers put, the trainer takes."""

    def __init__(self, settings: Settings, arm: Arm, clock: Clock, *, for_worker: bool) -> None:
        self._clock, self._n_workers = clock, settings.n_workers
        store = settings.open(f"{arm}-rollouts", for_worker=for_worker)
        self._store: ObjectStore = RetryingStore(store, clock, RetryPolicy())

    def put(self, rollouts: Rollouts) -> None:
        """Deliver one worker's part.

        Raises:
            StoreUnavailable, StoreRefused: the store's own errors.
        """
        self._store.put(_key(rollouts.batch, rollouts.worker), rollouts_bytes(rollouts))

    def first_missing(self, worker: int, n_batches: int) -> int:
        """The batch a worker has to go on with: nobody else remembers what it did before.

        Raises:
            StoreUnavailable, StoreRefused: the store's own errors.
        """
        there = {info.key for info in self._store.list("")}
        missing = (batch for batch in range(n_batches) if _key(batch, worker) not in there)
        return next(missing, n_batches)

    def take(self, batch: int) -> list[Rollouts]:
        """Wait for a batch of all workers; in their order, not in the order of arrival.

        Raises:
            MalformedRecord: an object that is no rollouts.
            StoreUnavailable, StoreRefused: the store's own errors.
        """
        keys = [_key(batch, worker) for worker in range(self._n_workers)]
        self._wait_for(keys)
        return [parse_rollouts(self._store.read(key), key) for key in keys]

    def _wait_for(self, keys: list[str]) -> None:
        folder = keys[0].rpartition("/")[0] + "/"
        look_s = _LOOK_S
        while not {*keys} <= {*self._names(folder)}:
            self._clock.sleep(look_s)
            look_s = min(look_s * 1.2, _SLOWEST_LOOK_S)

    def _names(self, folder: str) -> Iterator[str]:
        try:
            yield from [info.key for info in self._store.list(folder)]
        except StoreUnavailable:
            return  # it is looked for again


def _key(batch: int, worker: int) -> str:
    return f"{batch:06d}/worker-{worker}.json"
