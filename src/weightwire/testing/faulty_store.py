"""A store between you and your store, which does all that real ones do on bad days."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

from weightwire.clock import Clock
from weightwire.errors import ObjectMissing, StoreRefused, StoreUnavailable
from weightwire.store.contract import ObjectInfo, ObjectStore
from weightwire.testing import faults as of
from weightwire.testing.faults import FaultKind, FaultPlan


@dataclass
class _Delayed:
    """A write that is still on its way."""

    n_operations_left: int
    write: Callable[[], object]


class FaultyStore:
    """Passes operations on to ``store``, and lets those things go wrong that ``faults`` says.

    The same ``chance`` and the same operations give the same faults. It never does what no real
    store does: a create that was won stays won, and a listing omits only objects that are new or,
    with ``LIST_OMITS_ONE``, a single one.
    """

    def __init__(
        self,
        store: ObjectStore,
        chance: random.Random,
        faults: Mapping[FaultKind, float] | FaultPlan,
        clock: Clock,
    ) -> None:
        self.injected: Counter[FaultKind] = Counter()
        self._store = store
        self._chance = chance
        self._plan = faults if isinstance(faults, FaultPlan) else FaultPlan(dict(faults))
        self._clock = clock
        self._lock = threading.RLock()
        self._delayed: list[_Delayed] = []
        self._recent: deque[str] = deque(maxlen=self._plan.n_recent_writes)
        self._missed: set[str] = set()
        self._n_throttled = 0
        self._out_until = float("-inf")

    def __repr__(self) -> str:
        return f"FaultyStore({self._store!r}, {self.injected.total()} faults)"

    def heal(self) -> None:
        """No more faults from here on; writes that were still on their way arrive now."""
        with self._lock:
            self._plan = FaultPlan()
            self._n_throttled = 0
            self._out_until = float("-inf")
            self._land(lambda _: True)

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Put, or not, or later, or twice.

        Raises:
            StoreUnavailable, StoreRefused: injected, or from the store.
        """
        fault = self._fault_of("put", key, of.OF_PUT)
        if fault is FaultKind.DELAYED_EFFECT or fault is FaultKind.DUPLICATE_DELIVERY:
            data = data if isinstance(data, bytes) else b"".join(data)
        if fault is FaultKind.DELAYED_EFFECT:
            self._do_later("put", key, lambda: self._put(key, data))
        if fault is FaultKind.DUPLICATE_DELIVERY:
            self._put(key, data)
        self._put(key, data)
        if fault is FaultKind.PUT_REPLY_LOST:
            raise _no_answer("put", key)

    def create(self, key: str, data: bytes) -> bool:
        """Create, or not, or later.

        Raises:
            StoreUnavailable, StoreRefused: injected, or from the store.
        """
        fault = self._fault_of("create", key, of.OF_CREATE)
        if fault is FaultKind.DELAYED_EFFECT:
            self._do_later("create", key, lambda: self._create(key, data))
        is_new = self._create(key, data)
        if fault is FaultKind.CREATE_REPLY_LOST:
            raise _no_answer("create", key)
        return is_new

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read, or fail, or read something else.

        Raises:
            ObjectMissing, StoreUnavailable, StoreRefused: injected, or from the store.
        """
        fault = self._fault_of("read", key, self._possible_reads(key))
        if fault is FaultKind.MISSING_ONCE:
            self._missed.add(key)
            raise ObjectMissing(f"{key}: not there yet (injected)")
        if fault is FaultKind.STUCK_READ:
            self._clock.sleep(self._plan.stuck_s)
            raise _no_answer("read", key)
        if fault is FaultKind.WRONG_OBJECT:
            return self._read_another(key, start, stop)
        if fault is FaultKind.RANGE_OFF:
            return self._read_beside(key, start, stop)
        return self._spoilt(fault, self._store.read(key, start, stop))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """List, or leave something out, or break off.

        Raises:
            StoreUnavailable, StoreRefused: injected, or from the store.
        """
        fault = self._fault_of("list", prefix, of.OF_LIST)
        found = list(self._store.list(prefix, after))
        if fault is FaultKind.STALE_LIST:
            hidden = self._newest_keys()
            found = [info for info in found if info.key not in hidden]
        if fault is FaultKind.LIST_OMITS_ONE and found:
            del found[self._below(len(found))]
        if fault is not FaultKind.LIST_ENDS_EARLY:
            yield from found
            return
        yield from found[: self._below(len(found) + 1)]
        raise _no_answer("list", prefix)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete, or not, or later.

        Raises:
            StoreUnavailable, StoreRefused: injected, or from the store.
        """
        doomed = list(keys)
        first = next(iter(doomed), "")
        fault = self._fault_of("delete", first, of.OF_DELETE)
        if fault is FaultKind.DELAYED_EFFECT:
            self._do_later("delete", first, lambda: self._store.delete(doomed))
        self._store.delete(doomed)
        if fault is FaultKind.DELETE_REPLY_LOST:
            raise _no_answer("delete", first)

    def _fault_of(self, verb: str, key: str, kinds: tuple[FaultKind, ...]) -> FaultKind | None:
        """What will go wrong in this operation; what goes wrong before it, goes wrong here.

        Raises:
            StoreUnavailable, StoreRefused: injected.
        """
        with self._lock:
            self._land(lambda delayed: delayed.n_operations_left <= 0)
            latency_s = self._latency_s()
            fault = self._ongoing() or self._drawn((*of.BEFORE_ANY, *kinds))
        if latency_s:
            self._clock.sleep(latency_s)
        if fault is FaultKind.PERMISSION_BLIP:
            raise StoreRefused(f"cannot {verb} {key}: refused (injected)")
        if fault in of.BEFORE_ANY:
            raise _no_answer(verb, key)
        return fault

    def _latency_s(self) -> float:
        """How long the next answer takes."""
        if self._drawn((FaultKind.LATENCY,)) is None:
            return 0.0
        return self._chance.random() * self._plan.max_latency_s

    def _ongoing(self) -> FaultKind | None:
        """Trouble that began in an earlier operation."""
        if self._clock.monotonic() < self._out_until:
            return FaultKind.OUTAGE
        if self._n_throttled > 0:
            self._n_throttled -= 1
            return FaultKind.THROTTLING
        return None

    def _drawn(self, kinds: tuple[FaultKind, ...]) -> FaultKind | None:
        """The first of these kinds that chance picks."""
        for kind in kinds:
            odds = self._plan.odds.get(kind, 0.0)
            if odds and self._chance.random() < odds and self._may_inject():
                self.injected[kind] += 1
                self._begin(kind)
                return kind
        return None

    def _may_inject(self) -> bool:
        """Whether the plan allows one more."""
        most = self._plan.n_faults
        return most is None or self.injected.total() < most

    def _begin(self, kind: FaultKind) -> None:
        """Start what lasts longer than one operation."""
        if kind is FaultKind.OUTAGE:
            length_s = self._chance.random() * self._plan.max_outage_s
            self._out_until = self._clock.monotonic() + length_s
        if kind is FaultKind.THROTTLING:
            self._n_throttled = self._chance.randrange(self._plan.max_burst)

    def _do_later(self, verb: str, key: str, write: Callable[[], object]) -> NoReturn:
        """Send a write on a long way.

        Raises:
            StoreUnavailable: always: nobody answers.
        """
        with self._lock:
            n_operations = self._chance.randint(1, self._plan.max_delay)
            self._delayed.append(_Delayed(n_operations, write))
        raise _no_answer(verb, key)

    def _land(self, is_due: Callable[[_Delayed], bool]) -> None:
        """Let time pass for delayed writes, and do those that are due."""
        due = [delayed for delayed in self._delayed if is_due(delayed)]
        self._delayed = [delayed for delayed in self._delayed if delayed not in due]
        for delayed in self._delayed:
            delayed.n_operations_left -= 1
        for delayed in due:
            delayed.write()

    def _put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Put, and remember an object that is new."""
        is_new = all(info.key != key for info in self._store.list(key))
        self._store.put(key, data)
        if is_new:
            self._remember(key)

    def _create(self, key: str, data: bytes) -> bool:
        """Create, and remember an object that is new."""
        is_new = self._store.create(key, data)
        if is_new:
            self._remember(key)
        return is_new

    def _remember(self, key: str) -> None:
        """Note an object that a stale listing can miss."""
        with self._lock:
            self._recent.append(key)

    def _newest_keys(self) -> set[str]:
        """What was written since the moment a stale listing shows; at least one, if any was."""
        with self._lock:
            n_missed = self._chance.randint(1, max(len(self._recent), 1))
            return set(list(self._recent)[-n_missed:])

    def _possible_reads(self, key: str) -> tuple[FaultKind, ...]:
        """Only what was just written can be missing, once; the rest can befall any read."""
        is_fresh = key in self._recent and key not in self._missed
        return of.OF_READ if is_fresh else of.OF_READ[1:]

    def _read_another(self, key: str, start: int, stop: int | None) -> bytes:
        """The same range of some other object; of the same one, if it is alone."""
        others = [info.key for info in self._store.list("") if info.key != key]
        wrong = others[self._below(len(others))] if others else key
        return self._store.read(wrong, start, stop)

    def _read_beside(self, key: str, start: int, stop: int | None) -> bytes:
        """A range that starts and stops some bytes later."""
        n_off = 1 + self._below(8)
        return self._store.read(key, start + n_off, None if stop is None else stop + n_off)

    def _spoilt(self, fault: FaultKind | None, data: bytes) -> bytes:
        """The bytes of a read, with what went wrong on the way."""
        if fault is FaultKind.EMPTY_READ:
            return b""
        if fault is FaultKind.TORN_READ:
            return data[: self._below(max(len(data), 1))]
        if fault is FaultKind.FLIPPED_BIT and data:
            position = self._below(len(data))
            flipped = data[position] ^ (1 << self._below(8))
            return data[:position] + bytes([flipped]) + data[position + 1 :]
        return data

    def _below(self, n: int) -> int:
        """A number from 0 to n - 1."""
        with self._lock:
            return self._chance.randrange(n)


def _no_answer(verb: str, key: str) -> StoreUnavailable:
    """What a caller sees of most faults."""
    return StoreUnavailable(f"cannot {verb} {key}: no answer (injected)")
