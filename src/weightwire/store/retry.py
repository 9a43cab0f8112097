"""Trying again, for a while, and knowing afterwards whether a create was ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from weightwire.clock import Clock
from weightwire.errors import CommitUnknown, ObjectMissing, StoreRefused, StoreUnavailable
from weightwire.store.contract import ObjectInfo, ObjectStore

Result = TypeVar("Result")


@dataclass(frozen=True)
class RetryPolicy:
    """How often, how soon and for how long. Delays double, and each is drawn from zero up."""

    n_attempts: int = 6
    first_delay_s: float = 0.2
    max_delay_s: float = 10.0
    deadline_s: float = 60.0
    """No new attempt starts this long after the first one."""

    def longest_delay_s(self, n_failed: int) -> float:
        """The most to wait after so many failures in a row."""
        # The exponent is bounded so that a policy of very many attempts does not overflow.
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** min(n_failed - 1, 64))


class RetryingStore:
    """A store that repeats what failed with ``StoreUnavailable``, and nothing else.

    Full jitter: a thousand receivers that lost the same store come back spread out over the delay,
    not all at its end.
    """

    def __init__(self, store: ObjectStore, clock: Clock, policy: RetryPolicy) -> None:
        self._store = store
        self._clock = clock
        self._policy = policy

    def __repr__(self) -> str:
        return f"RetryingStore({self._store!r})"

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Write an object; an iterator that is used up cannot be sent again, so it is sent once.

        Raises:
            StoreUnavailable: in every attempt.
            StoreRefused: in one.
        """
        if isinstance(data, Iterator):
            self._store.put(key, data)
        else:
            self._repeat(lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        """Write an object if there is none; an answer, or ``CommitUnknown``, never a guess.

        Once an attempt got no answer, "it exists already" may mean our own write: then the bytes
        are read back and compared. Records carry a random put id, so equal bytes are ours. If the
        object is gone again by then, it is created again.

        Raises:
            CommitUnknown: no attempt was answered, or a later one was refused.
            StoreRefused: the first attempt was.
        """
        attempt = _Create(self._store, key, data)
        try:
            return self._repeat(attempt)
        except StoreUnavailable as error:
            raise CommitUnknown(f"{key}: was it created? {error}") from error
        except StoreRefused as error:
            if not attempt.is_in_doubt:
                raise
            raise CommitUnknown(f"{key}: was it created before? {error}") from error

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of an object, or a range of them.

        Raises:
            ObjectMissing, StoreRefused: as the contract says.
            StoreUnavailable: in every attempt.
        """
        return self._repeat(lambda: self._store.read(key, start, stop))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects in key order; a listing that breaks off goes on after the last key it gave.

        Raises:
            StoreRefused: as the contract says.
            StoreUnavailable: in as many attempts as are allowed without a single new key.
        """
        budget = _Budget(self._clock, self._policy)
        while True:
            try:
                for info in self._store.list(prefix, after):
                    after, budget = info.key, _Budget(self._clock, self._policy)
                    yield info
                return
            except StoreUnavailable:
                if not budget.wait():
                    raise

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those removed in an earlier attempt are passed over in a later one.

        Raises:
            StoreRefused: as the contract says.
            StoreUnavailable: in every attempt.
        """
        doomed = list(keys)
        self._repeat(lambda: self._store.delete(doomed))

    def _repeat(self, attempt: Callable[[], Result]) -> Result:
        """The result of the first attempt that is answered.

        Raises:
            StoreUnavailable: none was.
        """
        budget = _Budget(self._clock, self._policy)
        while True:
            try:
                return attempt()
            except StoreUnavailable:
                if not budget.wait():
                    raise


class _Create:
    """One create, tried until it is known whether it happened."""

    def __init__(self, store: ObjectStore, key: str, data: bytes) -> None:
        self._store = store
        self._key = key
        self._data = data
        self.is_in_doubt = False

    def __call__(self) -> bool:
        """One attempt."""
        try:
            is_new = self._store.create(self._key, self._data)
        except StoreUnavailable:
            self.is_in_doubt = True
            raise
        return is_new or (self.is_in_doubt and self._is_ours())

    def _is_ours(self) -> bool:
        """Whether the object that was in the way is the one we sent.

        Raises:
            StoreUnavailable: not known, or gone meanwhile; create again.
        """
        try:
            return self._store.read(self._key) == self._data
        except ObjectMissing as error:
            raise StoreUnavailable(f"{self._key}: it was there, and is gone") from error


class _Budget:
    """The attempts and the time left for one operation."""

    def __init__(self, clock: Clock, policy: RetryPolicy) -> None:
        self._clock = clock
        self._policy = policy
        self._n_failed = 0
        self._ends = clock.monotonic() + policy.deadline_s

    def wait(self) -> bool:
        """Wait before the next attempt; False, at once, if there is to be none."""
        self._n_failed += 1
        delay = self._clock.jitter() * self._policy.longest_delay_s(self._n_failed)
        is_spent = self._n_failed >= self._policy.n_attempts
        if is_spent or self._clock.monotonic() + delay >= self._ends:
            return False
        self._clock.sleep(delay)
        return True
