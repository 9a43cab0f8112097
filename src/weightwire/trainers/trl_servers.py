"""The vLLM servers that generate for a trainer: each follows, and none can hold the trainer up for good."""

from __future__ import annotations

import logging
import os
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from weightwire.clock import Clock
from weightwire.engines.remote.server_status import Pause
from weightwire.engines.vllm.server import VllmServer
from weightwire.errors import EngineUnavailable, WeightwireError

log = logging.getLogger("weightwire.trainers")

_LOOK_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """What became of one version on one server."""

    url: str
    version: int
    pause: Pause | None = None
    """How long it generated nothing; None where it did not get so far, or held the version already."""
    error: WeightwireError | None = None
    """Why it did not; it is tried again with the next version."""

    @property
    def is_current(self) -> bool:
        """Whether the server generates with this version now."""
        return self.error is None


@dataclass
class _Engine:
    server: VllmServer
    is_connected: bool = False


class Servers:
    """Several servers of one run; what is done, is done to all at once."""

    def __init__(
        self,
        urls: Sequence[str],
        store: str | os.PathLike[str],
        key: str | None,
        clock: Clock,
        connect: Callable[[str], VllmServer] = VllmServer,
    ) -> None:
        self._engines = [_Engine(connect(url)) for url in urls]
        self._store, self._key, self._clock = store, key, clock
        self._workers = ThreadPoolExecutor(max(1, len(urls)), "weightwire-server")

    def wait_until_up(self, timeout_s: float) -> None:
        """Wait until at least one server answers; the others may come later.

        Raises:
            EngineUnavailable: none does, in time.
        """
        ends = self._clock.monotonic() + timeout_s
        while not any(_is_up(each.server.url) for each in self._engines):
            if self._clock.monotonic() > ends:
                urls = ", ".join(each.server.url for each in self._engines)
                raise EngineUnavailable(f"no vLLM server answered in {timeout_s:.0f} s: {urls}")
            self._clock.sleep(_LOOK_S)

    def stage(self, version: int) -> tuple[Outcome, ...]:
        """Have every server fetch, decode and prove a version; all of them generate meanwhile."""
        return self._each(self._stage_one, [Outcome(e.server.url, version) for e in self._engines])

    def activate(self, staged: tuple[Outcome, ...]) -> tuple[Outcome, ...]:
        """Pause those that have staged it, for as long as it takes to write what changed."""
        return self._each(self._activate_one, staged)

    def wait_checked(self) -> None:
        """Wait until those that answer have read back what they wrote."""
        for engine in self._engines:
            try:
                engine.server.wait_checked()
            except WeightwireError as error:
                log.warning("%s: what it holds was not read back: %s", engine.server.url, error)

    def close(self) -> None:
        """Let go of connections; the servers go on."""
        self._workers.shutdown(wait=True)
        for engine in self._engines:
            engine.server.close()

    def _each(
        self, act: Callable[[_Engine, Outcome], Outcome], before: Sequence[Outcome]
    ) -> tuple[Outcome, ...]:
        return tuple(self._workers.map(partial(_guarded, act), self._engines, before))

    def _stage_one(self, engine: _Engine, outcome: Outcome) -> Outcome:
        self._require_connected(engine)
        engine.server.stage(outcome.version)
        engine.server.wait_staged(outcome.version)
        return outcome

    def _activate_one(self, engine: _Engine, staged: Outcome) -> Outcome:
        if staged.error is not None:
            return staged
        pause = engine.server.activate(staged.version)
        return Outcome(staged.url, staged.version, pause)

    def _require_connected(self, engine: _Engine) -> None:
        """A server that was restarted has forgotten which run it follows."""
        if engine.is_connected:
            engine.is_connected = all(rank.store for rank in engine.server.status().ranks)
        if not engine.is_connected:
            engine.server.connect(self._store, key=self._key, update=False)
            engine.is_connected = True


def _guarded(
    act: Callable[[_Engine, Outcome], Outcome], engine: _Engine, before: Outcome
) -> Outcome:
    """One server's trouble is that server's."""
    try:
        return act(engine, before)
    except WeightwireError as error:
        log.warning("%s stays at the version it has: %s", before.url, error)
        return Outcome(before.url, before.version, error=error)


def _is_up(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True
