"""One rank's subscriber, which stages in a thread of its own while the rank generates.

    begin_staging ──▶ staging ──▶ staged ──activate──▶ held
                         └─▶ failure in ``status``; the rank serves on with what it has

Everything that touches the subscriber runs in one thread, one after the other. On CPUs an engine
may pin a worker to few processors, and threads inherit that; this thread and those it starts may use what
the worker's parent may.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from weightwire.apply.layouts.target import LayoutTarget
from weightwire.engines.remote.failures import failure_of
from weightwire.engines.remote.proof import RankProof, proof_of
from weightwire.engines.remote.status import RankStatus
from weightwire.errors import EngineRefused
from weightwire.subscriber import Subscriber
from weightwire.workers import on_this_gpu, threads

log = logging.getLogger("weightwire.engines")

_LONGEST_PAUSE_S = 1.0
"""Reading back begins so long after writing, even if nobody says that the server runs again."""


class AfterPause(ThreadPoolExecutor):
    """One thread that waits for the end of the pause: reading back must not make it longer."""

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="weightwire-check")
        self.is_over = threading.Event()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Do it when the server runs again, or soon."""
        self.is_over.clear()

        def later() -> Any:
            self.is_over.wait(_LONGEST_PAUSE_S)
            return fn(*args, **kwargs)

        return super().submit(on_this_gpu(later))


class RankReceiver:
    """Stages behind a rank's back; activates when the rank has paused.

    ``checks`` is what the subscriber reads back with, where somebody says when a pause is over.
    """

    def __init__(
        self, subscriber: Subscriber, target: LayoutTarget, checks: AfterPause | None = None
    ) -> None:
        self._subscriber, self._target, self._checks = subscriber, target, checks
        self._thread = threads(1, "rank", _leave_pinned_processors)
        self._lock = threading.Lock()
        self._staging: Future[None] | None = None
        self._proof: Future[RankProof] | None = None
        self._wanted = -1
        self._last = RankStatus(rank=0, n_ranks=1, store="", state="empty")

    def begin_staging(self, version: int) -> None:
        """Fetch, decode and prove a version in the background; ``status`` says how it goes.

        Raises:
            EngineRefused: not the number of a version.
        """
        if version < 0:
            raise EngineRefused(f"{version} is not a version: they begin with 0")
        with self._lock:
            if self._staging is not None and not self._staging.done() and self._wanted == version:
                return
            if self._last.staged == version:
                return
            self._wanted = version
            self._note(staged=-1, failure=None)
            self._staging = self._thread.submit(self._stage, version)

    def stage(self, version: int) -> None:
        """The same, and wait for it; quick where it was staged before.

        Raises:
            WeightwireError: as ``Subscriber.stage``.
        """
        if self.holds(version):
            return
        self.begin_staging(version)
        if self._staging is not None:
            self._staging.result()
        if not self.holds(version):
            self.require_staged(version)

    def holds(self, version: int) -> bool:
        """Whether this version is being served, whole."""
        held = self._subscriber.version
        return held == version >= 0 and not self._subscriber.is_dirty

    def require_staged(self, version: int) -> None:
        """Refuse to go on unless this version can be activated.

        Raises:
            EngineRefused: another one is staged, or none.
            WeightwireError: what staging it ran into.
        """
        if self.holds(version) or self._last.staged == version >= 0:
            return
        staging = self._staging
        if staging is not None and staging.done() and self._wanted == version:
            staging.result()
        has = f"version {self._last.staged}" if self._last.staged >= 0 else "nothing"
        raise EngineRefused(f"version {version} is not staged, {has} is; stage it first")

    def activate(self, version: int) -> None:
        """Write a staged version; nothing to do where it is held already. Safe to repeat.

        Raises:
            EngineRefused: it is not staged; nothing was written.
        """
        self._thread.submit(self._activate, version).result()

    def end_pause(self) -> None:
        """The server runs again: what was written is read back now."""
        if self._checks is not None:
            self._checks.is_over.set()

    def begin_poll(self) -> Future[None]:
        """Look for the newest version in the background; ``status`` has it once ``n_polls`` rises."""
        return self._thread.submit(self._poll)

    def begin_proof(self) -> None:
        """Read all of live memory in the background, for ``proof``."""
        self.end_pause()
        self._proof = self._thread.submit(self._prove)

    def proof(self) -> RankProof | None:
        """This rank's part of a proof; None while it is being made.

        Raises:
            EngineRefused: nobody asked for one.
            WeightwireError: it could not be made.
        """
        if self._proof is None:
            raise EngineRefused("no proof was begun")
        return self._proof.result() if self._proof.done() else None

    def abort(self) -> None:
        """Forget what is staged, once staging comes to an end; does not wait for it."""
        with self._lock:
            self._wanted = -1
            self._note(staged=-1)
            self._thread.submit(self._abort)

    def status(self) -> RankStatus:
        """Where this rank stands; never waits."""
        subscriber = self._subscriber
        return replace(
            self._last,
            state=subscriber.state.value,
            version=subscriber.version,
            digest=subscriber.digest,
            is_dirty=subscriber.is_dirty,
        )

    def close(self) -> None:
        """Let go of threads and files once staging comes to an end; does not wait for it."""
        self.end_pause()
        self._thread.submit(self._subscriber.close)
        self._thread.shutdown(wait=False)

    def _poll(self) -> None:
        try:
            self._note(newest=self._subscriber.poll(), failure=None)
        except Exception as error:
            self._note(failure=failure_of(error))
            raise
        finally:
            self._note(n_polls=self._last.n_polls + 1)

    def _stage(self, version: int) -> None:
        try:
            has_staged = self._subscriber.stage(version)
        except Exception as error:
            # The rank goes on serving what it has; who asked reads of it in the status.
            log.warning("version %d is not staged: %s", version, error)
            self._note(failure=failure_of(error))
            raise
        if has_staged and self._wanted == version:
            self._note(staged=version)

    def _activate(self, version: int) -> None:
        if self.holds(version):
            return
        self.require_staged(version)
        updated = self._subscriber.activate()
        self._note(
            staged=-1,
            failure=None,
            stage_s=updated.stage_s,
            activate_s=updated.activate_s,
            n_bytes=updated.n_bytes,
            n_changed=updated.n_changed,
        )

    def _prove(self) -> RankProof:
        self._subscriber.wait()
        return proof_of(self._subscriber.version, self._target, self._subscriber.tensor_digests)

    def _abort(self) -> None:
        self._subscriber.abort()
        self._note(staged=-1)

    def _note(self, **changes: object) -> None:
        self._last = replace(self._last, **changes)  # type: ignore[arg-type]


def unpinned_processors() -> set[int]:
    """What a rank could run on before its engine pinned it: what its parent may run on."""
    return os.sched_getaffinity(os.getppid())


def _leave_pinned_processors() -> None:
    """For this thread alone: staging must not take turns with generation on one processor."""
    try:
        os.sched_setaffinity(0, unpinned_processors())
    except OSError as error:
        log.info("staging stays on processors %s: %s", os.sched_getaffinity(0), error)
