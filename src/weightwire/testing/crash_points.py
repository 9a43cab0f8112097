"""Every place where a process can die, tried one after another.

An action is run once, undisturbed, to count its effects; then once per effect, in a fresh copy of the
same world, dying just before or just after it. What must hold afterwards is the caller's business:

    for crash in enumerate_crashes(make_world, lambda world, fuse: work(CrashingStore(world.store, fuse))):
        recover_and_check(crash.world)

Work must be done in one thread (``background=lambda n, name: InlineExecutor()``): then the count is
exact, and a test that has died at every number has died everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from weightwire.errors import StopError
from weightwire.store.contract import ObjectInfo, ObjectStore

T = TypeVar("T")
World = TypeVar("World")
When = Literal["before", "after"]
WHENS: tuple[When, When] = ("before", "after")


class Crash(BaseException):
    """The process is gone; no handler may stop it, and nothing may happen after it."""


class Fuse:
    """Lets effects happen and counts them; at the chosen one the process dies, and stays dead."""

    def __init__(self, number: int | None = None, when: When = "before") -> None:
        """Never burn through, or at effect ``number``, counted from zero."""
        self._number, self._when = number, when
        self.effects: list[str] = []
        """What happened, or was about to, in order."""
        self.is_burnt = False

    def effect(self, name: str, act: Callable[[], T]) -> T:
        """Let one effect happen, unless the process dies before it, or is dead.

        Raises:
            Crash: it does, or is.
        """
        if self.is_burnt:
            raise Crash
        is_chosen = len(self.effects) == self._number
        self.effects.append(name)
        if is_chosen and self._when == "before":
            self._burn()
        try:
            return act()
        finally:
            if is_chosen:  # also where the effect itself failed
                self._burn()

    def _burn(self) -> None:
        self.is_burnt = True
        raise Crash


class CrashingStore:
    """A store whose every operation is an effect of a ``Fuse``.

    An object that is deleted is an effect by itself: no store deletes many at once. A listing happens
    when its first object is asked for, as it does in real stores.
    """

    def __init__(self, store: ObjectStore, fuse: Fuse) -> None:
        self._store, self.fuse = store, fuse

    def __repr__(self) -> str:
        return f"CrashingStore({self._store!r}, {len(self.fuse.effects)} operations)"

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Put, or die.

        Raises:
            Crash: the process is gone.
            StoreUnavailable, StoreRefused: from the store.
        """
        self.fuse.effect(f"put {key}", lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        """Create, or die.

        Raises:
            Crash: the process is gone.
            StoreUnavailable, StoreRefused: from the store.
        """
        return self.fuse.effect(f"create {key}", lambda: self._store.create(key, data))

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read, or die.

        Raises:
            Crash: the process is gone.
            ObjectMissing, StoreUnavailable, StoreRefused: from the store.
        """
        return self.fuse.effect(f"read {key}", lambda: self._store.read(key, start, stop))

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """List, or die.

        Raises:
            Crash: the process is gone.
            StoreUnavailable, StoreRefused: from the store.
        """
        yield from self.fuse.effect(f"list {prefix}", lambda: [*self._store.list(prefix, after)])

    def delete(self, keys: Iterable[str]) -> None:
        """Delete one after another, or die between two.

        Raises:
            Crash: the process is gone.
            StoreUnavailable, StoreRefused: from the store.
        """
        for key in keys:
            self._delete(key)

    def _delete(self, key: str) -> None:
        self.fuse.effect(f"delete {key}", lambda: self._store.delete([key]))


@dataclass(frozen=True)
class CrashPoint(Generic[World]):
    """A world in which a process has just died, and where it did."""

    number: int
    when: When
    effect: str
    world: World

    def __str__(self) -> str:
        return f"died {self.when} effect {self.number}, {self.effect}"


def enumerate_crashes(
    begin: Callable[[], World],
    action: Callable[[World, Fuse], object],
    whens: tuple[When, ...] = WHENS,
) -> Iterator[CrashPoint[World]]:
    """Every world the action can leave behind by dying.

    Args:
        begin: gives a fresh copy of the same world each time.
        action: does its work through the fuse; the same effects in the same order each time.

    Raises:
        StopError: the action has no effects, or not the same ones again: nothing would be tested.
    """
    undisturbed = Fuse()
    action(begin(), undisturbed)
    if not undisturbed.effects:
        raise StopError("the action has no effect that goes through the fuse")
    for number, effect in enumerate(undisturbed.effects):
        for when in whens:
            world = begin()
            _die(action, world, Fuse(number, when))
            yield CrashPoint(number, when, effect, world)


def _die(action: Callable[[World, Fuse], object], world: World, fuse: Fuse) -> None:
    try:
        action(world, fuse)
    except Crash:
        return
    raise StopError(
        f"the action ended after {len(fuse.effects)} effects and did not die: it has other effects"
        " than when it was counted; give it a clock and chance of its own, and one thread"
    )
