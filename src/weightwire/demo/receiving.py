"""A worker's side of a sync: exactly the version it is told, from patches or from whole files.

``expect`` lets the next version come while the engine generates; ``take`` is the pause.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import weightwire as ww
from weightwire.clock import Clock
from weightwire.demo.sending import whole_key
from weightwire.demo.settings import Arm, Settings
from weightwire.engines.module_target import ModuleTarget
from weightwire.errors import NotARun
from weightwire.store.retry import RetryingStore, RetryPolicy

_LOOK_S = 0.02
_SLOWEST_LOOK_S = 0.2


@dataclass(frozen=True)
class Received:
    """What it took to hold a version."""

    n_bytes: int
    stage_s: float
    fetch_s: float
    pause_s: float
    was_whole: bool


class Receiver(Protocol):
    """Brings versions into a module, one after another."""

    def expect(self, version: int) -> None:
        """Begin to fetch a version, behind the caller's back, as soon as it exists."""

    def take(self, version: int) -> Received:
        """Write it into the module; nothing may be generated meanwhile."""

    def close(self) -> None:
        """Let go of threads."""


class Patience:
    """Waiting for something in a store: soon at first, then more seldom."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._look_s = clock, _LOOK_S

    def wait(self) -> None:
        """Until it is time to look again."""
        self._clock.sleep(self._look_s)
        self._look_s = min(self._look_s * 1.2, _SLOWEST_LOOK_S)


class PatchReceiver:
    """Through ``weightwire.Subscriber``, which proves what it writes."""

    def __init__(self, settings: Settings, worker: int, module: Any, clock: Clock) -> None:
        self._settings, self._worker, self._clock = settings, worker, clock
        self._target = ModuleTarget(module, settings.worker_threads)
        self._subscriber: ww.Subscriber | None = None
        self._staging = ThreadPoolExecutor(1, "stage")
        self._coming: tuple[int, Future[None]] | None = None

    def expect(self, version: int) -> None:
        """Stage a version in a thread."""
        if self._coming is None:
            self._coming = version, self._staging.submit(self._stage, version)

    def take(self, version: int) -> Received:
        """Activate what was staged, and wait until it was read back.

        Raises:
            WeightwireError: whatever staging or activating ran into.
        """
        self.expect(version)
        if self._coming is not None:
            self._coming[1].result()
        self._coming = None
        subscriber = self._open()
        subscriber.activate()
        done = subscriber.wait()
        if done is None or done.version != version:
            raise NotARun(f"version {version} was asked for, {done} came")
        return Received(done.n_bytes, done.stage_s, done.fetch_s, done.activate_s, done.was_whole)

    def close(self) -> None:
        """Let go of threads; a version that is still awaited is not."""
        self._staging.shutdown(wait=False, cancel_futures=True)
        if self._subscriber is not None:
            self._subscriber.close()

    def _stage(self, version: int) -> None:
        subscriber, patience = self._open(), Patience(self._clock)
        while subscriber.poll() < version:
            patience.wait()
        subscriber.stage(version)

    def _open(self) -> ww.Subscriber:
        """The run may not have begun yet."""
        patience = Patience(self._clock)
        while self._subscriber is None:
            try:
                self._subscriber = ww.Subscriber(
                    self._settings.open("patches", for_worker=True),
                    self._target,
                    worker=f"worker-{self._worker}",
                    n_threads=self._settings.worker_threads,
                )
            except NotARun:
                patience.wait()
        return self._subscriber


class WholeReceiver:
    """Whole files: read everything, write everything."""

    def __init__(self, settings: Settings, module: Any, clock: Clock) -> None:
        self._module, self._clock = module, clock
        store = settings.open("full", for_worker=True)
        self._store = RetryingStore(store, clock, RetryPolicy())
        self._staging = ThreadPoolExecutor(1, "stage")
        self._coming: Future[_Whole] | None = None

    def expect(self, version: int) -> None:
        """Download a version in a thread."""
        if self._coming is None:
            self._coming = self._staging.submit(self._fetch, version)

    def take(self, version: int) -> Received:
        """Copy every tensor.

        Raises:
            WeightwireError: whatever the download ran into.
        """
        self.expect(version)
        whole = self._coming.result() if self._coming else self._fetch(version)
        self._coming = None
        began = self._clock.monotonic()
        self._load(whole.tensors)
        pause_s = self._clock.monotonic() - began
        return Received(whole.n_bytes, whole.stage_s, whole.fetch_s, pause_s, was_whole=True)

    def close(self) -> None:
        """Let go of threads."""
        self._staging.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, version: int) -> _Whole:
        from safetensors.torch import load

        key, patience = whole_key(version), Patience(self._clock)
        while not any(info.key == key for info in self._store.list(key)):
            patience.wait()
        began = self._clock.monotonic()
        data = self._store.read(key)
        fetched = self._clock.monotonic()
        tensors = load(data)
        return _Whole(tensors, len(data), self._clock.monotonic() - began, fetched - began)

    def _load(self, tensors: dict[str, Any]) -> None:
        import torch

        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                parameter.copy_(tensors[name])


@dataclass(frozen=True)
class _Whole:
    """A downloaded version."""

    tensors: dict[str, Any]
    n_bytes: int
    stage_s: float
    fetch_s: float


def open_receiver(settings: Settings, arm: Arm, worker: int, module: Any, clock: Clock) -> Receiver:
    """The receiver of one arm."""
    if arm == "patches":
        return PatchReceiver(settings, worker, module, clock)
    return WholeReceiver(settings, module, clock)
