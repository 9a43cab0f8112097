"""The engine's story: watch → plan → fetch → decode → verify → activate → receipt.

    empty ──stage──▶ staging ──▶ staged ──activate──▶ activating ──▶ checking ──▶ idle ──stage──▶ …
      ▲                 │           │                     │             │
      └── idle ◀─abort──┴───abort───┘                     └───▶ dirty ◀─┘
                                                                  └──stage (from an anchor)──▶ …

``stage`` does everything that takes time, while the engine serves: it reads live weights and
writes none. ``activate`` overwrites, and is all that the engine has to pause for; it is safe to
repeat. What was written is then read back behind the engine's back, and only then a receipt says
that the version is held. An interrupted activation or a failed check leaves the subscriber
*dirty*: activating again, or the next update, repairs it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from weightwire.apply.targets import Ready, Target, as_target, prepare
from weightwire.clock import Clock, SystemClock
from weightwire.digest import TensorDigest
from weightwire.errors import Dirty, DiskTrouble, NoWay, StopError, TargetMismatch, WeightwireError
from weightwire.events import Updated
from weightwire.kernels.devices import typed_memory_errors
from weightwire.store.cache import Cache
from weightwire.store.contract import ObjectStore
from weightwire.store.fetch import Fetcher
from weightwire.store.history import History, HistoryReader
from weightwire.store.holding import Holding
from weightwire.store.open import open_store
from weightwire.store.plan import Held, Plan, plan
from weightwire.store.receipts import default_worker, receipt_of, write_receipt
from weightwire.store.retry import RetryingStore, RetryPolicy
from weightwire.store.route import Reached, Start, reach
from weightwire.store.run import Run, require_identity
from weightwire.trust.freshness import check_fresh
from weightwire.trust.keys import PublicKey
from weightwire.trust.verify import require
from weightwire.workers import threads

log = logging.getLogger("weightwire.subscriber")


class State(Enum):
    """Where a subscriber stands."""

    EMPTY = "empty"
    IDLE = "idle"
    STAGING = "staging"
    STAGED = "staged"
    ACTIVATING = "activating"
    CHECKING = "checking"
    DIRTY = "dirty"
    CLOSED = "closed"


@dataclass(frozen=True)
class Polling:
    """How often an idle subscriber looks: soon after something happened, then ever more seldom."""

    first_s: float = 0.2
    max_s: float = 5.0
    factor: float = 1.5


@dataclass
class _Staged:
    """A version ready to be written, and what must stay open until then."""

    held: Held
    ready: Ready
    is_moved: bool
    """Other bits than before: not only a version that changed nothing."""
    updated: Updated
    resources: ExitStack


class Subscriber:
    """Keeps a target at the newest version of a run; a context manager.

    One thread may stage while another lets the engine run; ``activate`` is called when the engine
    pauses. All methods may be called from any thread, one at a time.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | ObjectStore,
        target: Any,
        *,
        key: PublicKey | str | None = None,
        worker: str | None = None,
        cache: Path | None = None,
        scrub_versions: int = 8,
        polling: Polling | None = None,
        max_silence_s: float | None = None,
        receipts: bool = True,
        double_buffer: bool = False,
        n_threads: int | None = None,
        on_updated: Callable[[Updated], None] = lambda _: None,
        progress: Callable[[int], None] = lambda _: None,
        retry: RetryPolicy | None = None,
        clock: Clock | None = None,
        background: Callable[[int, str], Executor] = threads,
    ) -> None:
        """Open the run in ``store``; nothing is fetched and nothing written yet.

        Args:
            target: a torch module, a mapping of names to tensors, or the path of a checkpoint folder.
                Tensors on a GPU are staged, written and read back there.
            key: follow only what this public key signed.
            worker: the name on this receiver's receipts; by default host and process.
            cache: keep anchors and patches there, so that a restart need not fetch them again.
            scrub_versions: every tensor is read and compared with its digest at least once in so
                many versions, changed or not.
            double_buffer: keep the tensors twice, so that activation only exchanges them.
            max_silence_s: raise ``FrozenHistory`` when the newest record is older than that.
            on_updated: called when a version was read back, by the thread that did: it must not call
                this subscriber, which would wait for that thread.

        Raises:
            NotARun: nothing was published there.
            StoreUnavailable, StoreRefused: the store's own errors.
        """
        self._clock = clock or SystemClock()
        self._target: Target = as_target(target, n_threads, double_buffer=double_buffer)
        self._fetches = background(8, "fetch")
        self._checks = background(1, "check")
        self._checking: Future[Updated] | None = None
        objects = RetryingStore(open_store(store), self._clock, retry or RetryPolicy())
        pinned = PublicKey.parse(key) if isinstance(key, str) else key
        self._run = Run(
            objects,
            require_identity(objects),
            verify=require(pinned) if pinned else None,
            executor=self._fetches,
        )
        self._worker = worker or default_worker()
        self._cache = Cache(cache)
        self._log = HistoryReader(self._run)
        self._polling = polling or Polling()
        self._pause_s, self._look_at = self._polling.first_s, -math.inf
        self._max_silence_s, self._writes_receipts = max_silence_s, receipts
        self._on_updated, self._progress = on_updated, progress
        self._wake = threading.Event()
        self._lock = threading.RLock()
        self._holding = Holding(self._target, scrub_versions)
        self._staged: _Staged | None = None
        self._state = State.EMPTY
        self._remember_seen()

    @property
    def state(self) -> State:
        """Where this subscriber stands."""
        return self._state

    @property
    def is_dirty(self) -> bool:
        """Whether the target may be a mixture of versions, or damaged: it must not be served."""
        return self._holding.is_dirty

    @property
    def version(self) -> int:
        """The version the target holds, proven; -1 if none."""
        return self._holding.version

    @property
    def digest(self) -> str:
        """The digest of that version; "" if none."""
        held = self._holding.held
        return held.digest if held else ""

    @property
    def tensor_digests(self) -> Mapping[str, TensorDigest]:
        """The digest of every tensor in that version: what live memory can be compared with."""
        return self._holding.digests

    @property
    def n_heals(self) -> int:
        """How often damage was found and repaired."""
        return self._holding.n_heals

    def notify(self) -> None:
        """Wake a waiting ``watch``: something was published. For transports that push."""
        self._wake.set()

    def poll(self) -> int:
        """Look at the log once; gives the newest version, -1 before the first.

        Raises:
            UntrustedHistory: a history that must not be followed.
            RetryError: the log cannot be read now.
        """
        newest = self._look().newest
        return newest.version if newest else -1

    def watch(self, timeout_s: float | None = None) -> bool:
        """Wait until there is a version newer than the target's; False if none came in time.

        Raises:
            the same as ``poll``.
        """
        deadline = math.inf if timeout_s is None else self._clock.monotonic() + timeout_s
        while not self._is_behind():
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return False
            self._clock.sleep(min(left, self._look_at - self._clock.monotonic()), self._wake)
        return True

    def _is_behind(self) -> bool:
        """Look, if it is time to or something was pushed; each look in vain puts off the next."""
        if self._clock.monotonic() < self._look_at and not self._wake.is_set():
            return False
        self._wake.clear()
        if self.poll() > self.version or self._holding.is_dirty:
            self._pause_s = self._polling.first_s
            return True
        pause_s = self._pause_s * (0.5 + 0.5 * self._clock.jitter())
        self._look_at = self._clock.monotonic() + pause_s
        self._pause_s = min(self._pause_s * self._polling.factor, self._polling.max_s)
        return False

    def stage(self, version: int | None = None) -> bool:
        """Fetch, decode and prove a version, writing nothing; False if it is held already.

        By default that is the newest one that can be reached. Ranks that serve together, and
        receivers that must lag by a fixed number of versions, name the one they want; a version
        older than the one held is never staged.

        Raises:
            NoWay: nothing leads to a newer version, or not to this one.
            UntrustedHistory: a history that must not be followed.
            RetryError: the store cannot be reached; try again.
            UnsupportedLayout: the target cannot take this run's tensors.
            DeviceFull: a GPU has no memory left to work in; try again.
        """
        self._await_check()
        with self._lock:
            self._require_open()
            self._drop_staged()
            self._state = State.STAGING
            try:
                self._staged = self._stage_version(version)
            finally:
                self._state = State.STAGED if self._staged else self._resting()
            return self._staged is not None

    def activate(self) -> Updated:
        """Write the staged version; the engine must not run meanwhile. Safe to repeat.

        Raises:
            StopError: nothing is staged.
            DiskTrouble: a folder target could not be written; the target is dirty.
        """
        with self._lock:
            staged = self._staged
            if staged is None:
                raise StopError("nothing is staged; call stage() first")
            self._state = State.ACTIVATING
            began = self._clock.monotonic()
            try:
                self._target.activate(staged.ready)
            except BaseException:
                self._state, self._holding.is_dirty = State.DIRTY, True
                raise
            activated = replace(staged.updated, activate_s=self._clock.monotonic() - began)
            before = self._holding.held
            self._take(staged)
            self._checking = self._checks.submit(self._check, staged, activated, before)
            return activated

    def wait(self) -> Updated | None:
        """Wait until the last activation was read back; gives what it was, None if there was none.

        Raises:
            TargetMismatch: what was written does not read back; the target is dirty.
        """
        return None if self._checking is None else self._checking.result()

    def abort(self) -> None:
        """Forget what is staged; the target stays as it is."""
        self._await_check()
        with self._lock:
            self._drop_staged()
            self._state = self._resting()

    def update(self) -> Updated | None:
        """Bring the target to the newest version, repairing it if need be; None if nothing was to do.

        Raises:
            the same as ``stage``, and TargetMismatch if memory does not hold what is written to it.
        """
        if not self.stage():
            return None
        try:
            self.activate()
            return self.wait()
        except (TargetMismatch, DiskTrouble, OSError) as error:
            log.error("version %d did not arrive, loading it anew: %s", self.version, error)
        self._holding.found_damage()
        self.stage()
        self.activate()
        return self.wait()

    def follow(self, stop: threading.Event | None = None) -> Iterator[Updated]:
        """Every version from now on, as it is activated; what can be tried again is."""
        while stop is None or not stop.is_set():
            try:
                if not self.watch(timeout_s=1.0):
                    continue
                updated = self.update()
            except StopError:
                raise
            except WeightwireError as error:
                log.warning("not updated, trying again: %s", error)
                self._clock.sleep(self._polling.max_s * self._clock.jitter(), self._wake)
                continue
            if updated is not None:
                yield updated

    def close(self) -> None:
        """Let go of files and threads; the target stays as it is."""
        self._await_check()
        with self._lock:
            self._drop_staged()
            self._state = State.CLOSED
        for executor in (self._fetches, self._checks):
            executor.shutdown(wait=True)
        self._cache.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await_check(self) -> None:
        """What a failed check found is in the state: dirty."""
        if self._checking is not None:
            self._checking.exception()

    def _require_open(self) -> None:
        if self._state is State.CLOSED:
            raise StopError("this subscriber was closed; make a new one")

    def _drop_staged(self) -> None:
        """Forget a staged version."""
        if self._staged is not None:
            self._staged.resources.close()
            self._staged = None

    def _resting(self) -> State:
        """The state while nothing is staged. Dirty stays dirty until a version was written whole."""
        if self._state is State.CLOSED:
            return State.CLOSED
        if self._holding.is_dirty:
            return State.DIRTY
        return State.IDLE if self._holding.held else State.EMPTY

    def _look(self) -> History:
        is_sound = self._holding.held is not None and not self._holding.is_dirty
        history = self._log.refresh(self.version - 1 if is_sound else -1)
        newest = history.newest
        if newest is not None:
            if self._max_silence_s is not None:
                check_fresh(newest, self._clock.now(), self._max_silence_s)
            self._log.remember(newest.version, history.hashes[newest.version])
            self._cache.remember_seen(
                self._run.name, newest.version, history.hashes[newest.version]
            )
        return history

    def _remember_seen(self) -> None:
        seen = self._cache.seen()
        if seen is not None and seen[0] == self._run.name:
            self._log.remember(seen[1], seen[2])

    def _stage_version(self, version: int | None) -> _Staged | None:
        began = self._clock.monotonic()
        with ExitStack() as stack, typed_memory_errors():
            start = self._holding.start(stack, self._look)
            history = self._look()
            wanted = self._wanted(history, start.held.version if start else -1, version)
            if not wanted:
                return None
            fetcher = Fetcher(self._run.store, self._cache, self._fetches, self._clock)
            reached = self._reach(wanted, history, start, fetcher)
            stack.callback(reached.close)
            return self._prepare(reached, history, fetcher, began, stack)

    def _wanted(self, history: History, held: int, version: int | None) -> Collection[int]:
        """The versions after the one held that will do.

        Raises:
            NoWay: the one that was named does not exist, or its record cannot be read.
        """
        if version is None:
            return [each for each in history.commits if each > held]
        if version <= held:
            return ()
        if version not in history.commits:
            newest = history.newest.version if history.newest else -1
            raise NoWay(f"there is no version {version} to stage; the newest is {newest}")
        return (version,)

    def _reach(
        self, wanted: Collection[int], history: History, start: Start | None, fetcher: Fetcher
    ) -> Reached:
        """The newest version there is a way to; an older one rather than none, but never one before
        the version that was held: a dirty receiver waits for an anchor rather than go back."""
        floor = start.held.version if start else self.version - 1
        bad: set[str] = set()
        for version in sorted(wanted, reverse=True):
            if version <= floor:
                break
            try:
                return reach(
                    history,
                    start,
                    version,
                    fetcher,
                    self._cache,
                    self._progress,
                    bad=bad,
                    on_bad_start=self._holding.found_damage,
                    needs=getattr(self._target, "needs", None),
                )
            except NoWay as error:
                log.warning("version %d cannot be reached: %s", version, error)
        raise NoWay(f"no way from version {floor} to any newer one: wait for the next anchor")

    def _prepare(
        self,
        reached: Reached,
        history: History,
        fetcher: Fetcher,
        began: float,
        stack: ExitStack,
    ) -> _Staged:
        step, staging = reached.step, reached.staging
        is_moved = reached.is_whole or bool(reached.plan.patches)
        ready = prepare(self._target, staging, step.digest, reached.folder)
        newest = history.newest.version if history.newest else step.version
        record = history.commits.get(step.version)
        updated = Updated(
            version=step.version,
            previous=self.version,
            digest=step.digest,
            n_bytes=fetcher.n_bytes,
            n_changed=staging.n_changed,
            n_steps=len(reached.plan.steps),
            lag=newest - step.version,
            was_whole=reached.is_whole,
            n_detours=reached.n_detours,
            stage_s=self._clock.monotonic() - began,
            fetch_s=fetcher.wait_s,
            step=record.step if record else None,
        )
        return _Staged(
            held=Held(step.version, step.digest),
            ready=ready,
            is_moved=is_moved,
            updated=updated,
            resources=stack.pop_all(),
        )

    def _take(self, staged: _Staged) -> None:
        self._holding.take(staged.held, staged.ready.staging if staged.is_moved else None)
        self._staged, self._state = None, State.CHECKING

    def _check(self, staged: _Staged, updated: Updated, before: Held | None) -> Updated:
        """Read back what was written; only then is the version held, and said to be."""
        began = self._clock.monotonic()
        try:
            with typed_memory_errors():
                self._target.check(staged.ready)
        except BaseException as error:
            # Nothing proves the new version: the last one that was proven is reported, as dirty.
            self._holding.held, self._state = before, State.DIRTY
            self._holding.found_damage()
            # The error is kept for whoever asks; what was staged need not be.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            staged.resources.close()
            del staged
        self._state = State.IDLE
        updated = replace(updated, verify_s=self._clock.monotonic() - began)
        self._tidy_cache()
        self._write_receipt(updated)
        self._on_updated(updated)
        return updated

    def _tidy_cache(self) -> None:
        """Keep on disk what a restart would need, and no more."""
        try:
            way: Plan = plan(self._log.history, None, self.version, at_hand=self._cache.at_hand())
        except NoWay:
            return
        self._cache.keep_only(step.folder for step in way.steps)

    def _write_receipt(self, updated: Updated) -> None:
        """Tell the store what is held; a receipt that does not get through is not worth a failure."""
        if not self._writes_receipts:
            return
        record = self._log.history.commits.get(updated.version)
        receipt = receipt_of(
            updated,
            worker=self._worker,
            run=self._run.name,
            epoch=record.epoch if record else 0,
            state=self._state.value,
            time_ms=int(self._clock.now() * 1000),
            n_heals=self._holding.n_heals,
        )
        try:
            write_receipt(self._run.store, receipt)
        except WeightwireError as error:
            log.warning("no receipt of version %d: %s", receipt.version, error)


def require_sound(subscriber: Subscriber) -> None:
    """Refuse to serve from a target that may be a mixture of versions.

    Raises:
        Dirty: an activation was interrupted, damage was found and not repaired yet, or nothing was
            ever loaded.
    """
    is_writing = subscriber.state is State.ACTIVATING
    if subscriber.is_dirty or is_writing or subscriber.version < 0:
        is_empty = subscriber.version < 0
        what = "empty" if is_empty else "dirty" if subscriber.is_dirty else "being written"
        raise Dirty(f"the weights are {what}: call update() before serving")
