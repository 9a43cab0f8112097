"""A torch module that follows a run by itself: transformers, or any other ``nn.Module``.

    engine = TorchModuleEngine("s3://bucket/run-7", model)
    with engine.generation() as version:
        tokens = model.generate(**inputs)

A thread stages new versions while the module generates. They are activated between generations,
at once if there is none: inside ``generation`` the weights do not move.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from weightwire.clock import Clock, SystemClock
from weightwire.engines.gate import Gate
from weightwire.engines.module_target import ModuleTarget
from weightwire.errors import Dirty, NotARun, NoWay, StopError, WeightwireError
from weightwire.events import Updated
from weightwire.store.contract import ObjectStore
from weightwire.subscriber import Polling, Subscriber, require_sound
from weightwire.workers import on_this_gpu

log = logging.getLogger("weightwire.engines")

_LOOK_S = 0.5
"""How long one wait for a new version may last before the thread looks whether to stop."""


class TorchModuleEngine:
    """Keeps a module at the newest version of a run; a context manager.

    ``generation`` may be entered from any number of threads.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | ObjectStore,
        module: Any,
        *,
        max_lag: int | None = None,
        patience_s: float = 600.0,
        polling: Polling | None = None,
        on_updated: Callable[[Updated], None] = lambda _: None,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        """Wait for the run's first version, load the newest one, and follow from then on.

        Args:
            module: written in place. Its tensors have the run's types, or wider ones.
            max_lag: begin no generation while more versions than that are known to be missing.
            patience_s: how long to wait for the first version, and at the begin of a generation for
                weights that may be served.
            on_updated: called with every version that was activated and read back.
            options: further options of ``Subscriber``, such as ``key``, ``worker`` or ``cache``.

        Raises:
            NotARun, NoWay: nothing was published within ``patience_s``.
            UnsupportedLayout: the module cannot take this run's tensors.
            StoreUnavailable, StoreRefused, UntrustedHistory: as ``Subscriber``.
        """
        self._clock = clock or SystemClock()
        self._max_lag, self._patience_s = max_lag, patience_s
        self.on_updated = on_updated
        self._gate = Gate()
        self._stop = threading.Event()
        self._error: StopError | None = None
        self._newest = self._proven = -1
        polling = polling or (Polling() if max_lag is None else Polling(max_s=0.5))
        self._subscriber = self._open(
            lambda: Subscriber(
                store,
                ModuleTarget(module, options.get("n_threads")),
                polling=polling,
                on_updated=self._updated,
                clock=self._clock,
                **options,
            )
        )
        follow = on_this_gpu(self._follow)
        self._thread = threading.Thread(target=follow, name="weightwire-follow", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """The version the module holds; does not change inside ``generation``."""
        return self._subscriber.version

    @property
    def digest(self) -> str:
        """The digest of that version."""
        return self._subscriber.digest

    @property
    def lag(self) -> int:
        """How many versions newer than it are known to exist."""
        return max(self._newest - self.version, 0)

    @property
    def is_dirty(self) -> bool:
        """Whether the weights may be a mixture, or damaged: no generation begins until repaired."""
        return self._subscriber.is_dirty

    @property
    def error(self) -> StopError | None:
        """What ended the following, if something did: a person must act."""
        return self._error

    @contextmanager
    def generation(self) -> Iterator[int]:
        """The weights do not move in here; gives their version. Also a decorator: ``@engine.generation()``.

        Waits while a version is being activated, while damage is repaired, and while the module
        lags by more than ``max_lag`` versions.

        Raises:
            Dirty: the weights may not be served, and that did not change within ``patience_s``.
            NoWay: they lag too far behind, and that did not change either.
            StopError: following has ended; ``close`` was called, or ``error`` says why.
        """
        with self._gate.generation(self._may_serve, self._patience_s) as may_serve:
            if not may_serve:
                raise self._refusal()
            yield self.version

    def wait_for(self, version: int, timeout_s: float | None = None) -> bool:
        """Wait until the module holds this version or a newer one; False if it did not come in time.

        Raises:
            StopError: following has ended, or this is called inside a generation, which would wait
                for itself.
        """
        if self._gate.is_inside:
            raise StopError("wait_for inside generation() would wait for ever; leave it first")
        self._subscriber.notify()
        if self._gate.wait_until(lambda: self._holds(version), timeout_s):
            return True
        if self._stop.is_set():
            raise self._refusal()
        return False

    def notify(self) -> None:
        """Look for a new version now: for transports that push."""
        self._subscriber.notify()

    def close(self) -> None:
        """Stop following; the module keeps the version it has. Waits for what is being written."""
        self._stop.set()
        self._gate.close()
        self._subscriber.notify()
        self._thread.join()
        self._subscriber.close()

    def __enter__(self) -> TorchModuleEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, make: Callable[[], Subscriber]) -> Subscriber:
        """Rollout workers often start before the trainer has published anything."""
        deadline = self._clock.monotonic() + self._patience_s
        while True:
            try:
                subscriber = make()
                break
            except NotARun:
                if self._clock.monotonic() >= deadline:
                    raise
                self._clock.sleep(_LOOK_S)
        try:
            self._load_first(subscriber, deadline)
        except BaseException:
            subscriber.close()
            raise
        return subscriber

    def _load_first(self, subscriber: Subscriber, deadline: float) -> None:
        if not subscriber.watch(timeout_s=max(deadline - self._clock.monotonic(), 0.0)):
            raise NoWay(f"no version was published within {self._patience_s:.0f} s")
        subscriber.update()

    def _follow(self) -> None:
        """The thread's life: everything that goes wrong is tried again, until a person must act."""
        while not self._stop.is_set():
            try:
                if self._subscriber.watch(timeout_s=_LOOK_S):
                    self._update()
            except StopError as error:
                self._end(error)
            except WeightwireError as error:
                log.warning("not updated, trying again: %s", error)
                self._clock.sleep(_LOOK_S * (1 + self._clock.jitter()), self._stop)
            except Exception as error:  # a thread that dies unheard would leave the module behind
                # A process that ends takes thread pools down first: then nobody is left to tell.
                self._clock.sleep(_LOOK_S, self._stop)
                self._end(StopError(f"following broke off: {error!r}"))

    def _end(self, error: StopError) -> None:
        log.error("not following any more: %s", error)
        self._error = error
        self._stop.set()
        self._gate.tell()

    def _update(self) -> None:
        self._newest = self._subscriber.poll()
        if not self._subscriber.stage():
            return
        with self._gate.activation() as may_write:
            if not may_write:
                return
            self._subscriber.activate()
        self._subscriber.wait()
        self._gate.tell()

    def _updated(self, updated: Updated) -> None:
        self._proven = updated.version
        self._newest = max(self._newest, updated.version)
        self.on_updated(updated)

    def _may_serve(self) -> bool:
        """Whether a generation may begin.

        Raises:
            StopError: following has ended: nothing would ever be newer.
        """
        if self._error is not None:
            raise self._error
        try:
            require_sound(self._subscriber)
        except Dirty:
            return False
        return self._max_lag is None or self.lag <= self._max_lag

    def _holds(self, version: int) -> bool:
        if self._error is not None:
            raise self._error
        return self._proven >= version and not self.is_dirty

    def _refusal(self) -> WeightwireError:
        """Why no generation may begin."""
        if self._stop.is_set():
            return StopError("this engine was closed; make a new one")
        try:
            require_sound(self._subscriber)
        except Dirty as error:
            return error
        return NoWay(
            f"version {self.version} is {self.lag} behind; more than {self._max_lag} are not allowed"
        )
