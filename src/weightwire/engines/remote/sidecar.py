"""A sidecar: watches a run, and keeps one or many servers at its newest version.

It holds no weights and needs no engine. It may be killed at any moment and started again: what a
server holds, the server knows. A server that was restarted is connected again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from weightwire.clock import Clock, SystemClock
from weightwire.engines.remote.server_status import Mode, Pause, ServerStatus
from weightwire.errors import StopError, WeightwireError
from weightwire.store.open import open_store
from weightwire.subscriber import Subscriber

log = logging.getLogger("weightwire.engines")


class EngineServer(Protocol):
    """A running server, as a sidecar sees it: ``VllmServer``, ``SglangServer``, or another."""

    @property
    def url(self) -> str:
        """Which one it is."""

    def connect(
        self,
        store: str | os.PathLike[str],
        *,
        key: str | None = None,
        cache: str | os.PathLike[str] | None = None,
        options: Mapping[str, str] | None = None,
        update: bool = True,
    ) -> ServerStatus:
        """Tell every rank which run to follow; nothing to do where it does already."""

    def status(self) -> ServerStatus:
        """Where its ranks stand."""

    def update(self, version: int, *, mode: Mode = "keep") -> Pause:
        """Stage, pause, activate, resume."""

    def close(self) -> None:
        """Let go of connections; the server goes on."""


Server = TypeVar("Server", bound=EngineServer)


@dataclass(frozen=True)
class Followed:
    """One version on its way to the servers."""

    version: int
    pauses: Mapping[str, Pause]
    """By URL: the servers that serve it now."""
    failures: Mapping[str, WeightwireError]
    """By URL: those that do not, and why; they are tried again."""


@dataclass
class Follow:
    """What ``follow`` is told, and what it knows of each server."""

    store: str | os.PathLike[str]
    servers: Sequence[EngineServer]
    key: str | None = None
    cache: str | os.PathLike[str] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    mode: Mode = "keep"
    served: dict[str, int] = field(default_factory=dict)

    def has_all_reached(self, version: int) -> bool:
        """Whether every server serves this version or a newer one."""
        return all(self.served.get(each.url, -1) >= version for each in self.servers)

    def bring(self, server: EngineServer, version: int) -> Pause | WeightwireError | None:
        """One server to one version; None if it has it. What goes wrong is a result, not an end."""
        try:
            server.connect(
                self.store, key=self.key, cache=self.cache, options=self.options, update=False
            )
            if server.status().version == version:
                return None
            return server.update(version, mode=self.mode)
        except WeightwireError as error:
            log.warning("%s is not at version %d: %s", server.url, version, error)
            return error


def servers_at(
    servers: str | Server | Sequence[str | Server], open_server: Callable[[str], Server]
) -> list[Server]:
    """One server or many, as they are or by URL."""
    listed = (
        servers if isinstance(servers, Sequence) and not isinstance(servers, str) else [servers]
    )
    return [open_server(each) if isinstance(each, str) else each for each in listed]


def follow(
    store: str | os.PathLike[str],
    servers: Sequence[EngineServer],
    *,
    key: str | None = None,
    cache: str | os.PathLike[str] | None = None,
    options: Mapping[str, str] | None = None,
    mode: Mode = "keep",
    until: int | None = None,
    poll_s: float = 1.0,
    stop: threading.Event | None = None,
    clock: Clock | None = None,
) -> Iterator[Followed]:
    """Every version from now on, as it reaches the servers.

    Servers are staged and activated side by side; one that fails does not hold up the others.

    Args:
        store: must mean the same run to this process and to the servers.
        key, cache, options: as for ``connect`` of the servers.
        until: end when every server serves this version or a newer one.

    Raises:
        NotARun: nothing was published there.
        StopError: what no server can get over by trying again.
    """
    clock = clock or SystemClock()
    work = Follow(store, servers, key=key, cache=cache, options=dict(options or {}), mode=mode)
    stop = stop or threading.Event()
    opened = open_store(store, options=options) if options else store
    with (
        Subscriber(opened, {}, key=key, receipts=False) as run,
        ThreadPoolExecutor(len(servers), thread_name_prefix="weightwire-follow") as pool,
    ):
        while not stop.is_set():
            followed = _round(work, run, pool)
            if followed is not None:
                yield followed
            if until is not None and work.has_all_reached(until):
                return
            clock.sleep(poll_s * (0.5 + clock.jitter()), stop)


def _round(work: Follow, run: Subscriber, pool: ThreadPoolExecutor) -> Followed | None:
    """Bring every server to the newest version; None if there was nothing to do."""
    version = _newest(run)
    if version < 0:
        return None
    results = pool.map(lambda server: (server.url, work.bring(server, version)), work.servers)
    pauses: dict[str, Pause] = {}
    failures: dict[str, WeightwireError] = {}
    for url, result in results:
        if isinstance(result, WeightwireError):
            failures[url] = result
            continue
        work.served[url] = version
        if result is not None:
            pauses[url] = result
    _require_hope(work, failures)
    return Followed(version, pauses, failures) if pauses or failures else None


def _newest(run: Subscriber) -> int:
    """The newest version, -1 if the store does not say now.

    Raises:
        StopError: a history that must not be followed.
    """
    try:
        return run.poll()
    except StopError:
        raise
    except WeightwireError as error:
        log.warning("the run cannot be read, trying again: %s", error)
        return -1


def _require_hope(work: Follow, failures: Mapping[str, WeightwireError]) -> None:
    """End when no server is left that could ever follow.

    Raises:
        StopError: of the first server.
    """
    hopeless = [error for error in failures.values() if isinstance(error, StopError)]
    if hopeless and len(hopeless) == len(work.servers):
        raise hopeless[0]
