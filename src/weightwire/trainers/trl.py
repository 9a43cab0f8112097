"""TRL's ``AsyncGRPOTrainer``: weights to its vLLM servers as patches, with a pause only to write them.

    AsyncGRPOTrainer(…, weight_transfer=WeightwireTransfer("s3://bucket/run-7", "http://engine:8000"))

TRL asks for a pause, then for the transfer, then for an end of the pause. Here the pause is put off:

    pause()        remembers                                            ┐
    send_weights() compares, uploads, commits; servers fetch and prove  │ the engines generate
    resume()       pause ─▶ write what changed ─▶ resume                ┘ and stop only here
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightwire.clock import Clock, SystemClock
from weightwire.diff.cast import cast
from weightwire.diff.state import StateReader
from weightwire.errors import ResyncError, RetryError, StopError
from weightwire.events import Published
from weightwire.model import DType, TensorSpec
from weightwire.publisher import Publisher
from weightwire.store.contract import ObjectStore
from weightwire.trainers.hf_checkpoint import HfCheckpoint, architecture
from weightwire.trainers.tensor_stream import PassingState, SpooledState, Streamed, streamed
from weightwire.trainers.trl_servers import Outcome, Servers
from weightwire.trust.keys import SigningKey
from weightwire.workers import threads

log = logging.getLogger("weightwire.trainers")

Pairs = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Sync:
    """One sync, as the trainer saw it."""

    published: Published
    servers: tuple[Outcome, ...]
    send_s: float
    """Comparing, uploading and staging: the engines generated all the while."""

    @property
    def pause_s(self) -> float:
        """The longest time a server generated nothing."""
        return max((each.pause.total_s for each in self.servers if each.pause), default=0.0)


class WeightwireTransfer:
    """Implements TRL's ``WeightTransferProtocol`` for any number of vLLM servers."""

    def __init__(
        self,
        store: str | os.PathLike[str] | ObjectStore,
        servers: str | Sequence[str],
        *,
        model: str | os.PathLike[str] | None = None,
        dtype: str | None = "bf16",
        key: SigningKey | None = None,
        server_store: str | os.PathLike[str] | None = None,
        ready_timeout_s: float = 240.0,
        on_synced: Callable[[Sync], None] = lambda _: None,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        """Remember what to do; store and servers are opened when training begins.

        Args:
            servers: URLs of vLLM servers, started as ``VllmServer`` says.
            model: what the trainer was given as its model: a folder or a name. Its config says how
                stacked experts are called in a checkpoint; its other files go beside the anchors.
            dtype: what floats are rounded to; None publishes them as they are.
            server_store: the store as the servers see it, where that is another path.
            ready_timeout_s: how long to wait for the first server to come up.
            options: for ``Publisher``: ``mode``, ``baseline``, ``anchors``, …

        Raises:
            StopError: ``server_store`` is needed and missing, or there is no such ``dtype``.
            NotACheckpoint: ``model`` has no config to read.
        """
        self._clock = clock or SystemClock()
        self._store, self._key, self._options = store, key, options
        self._dtype = cast({}, dtype).dtype if dtype else None
        self._ready_timeout_s, self._on_synced = ready_timeout_s, on_synced
        self._names: HfCheckpoint | None = architecture(model) if model else None
        self._wide = self._names.keeps_wide(dtype) if self._names and dtype else ()
        if model is not None and Path(model).is_dir():
            self._options.setdefault("companions", Path(model))
        urls = [servers] if isinstance(servers, str) else list(servers)
        seen_store = _path_of(server_store or store)
        self._servers = Servers(urls, seen_store, str(key.public) if key else None, self._clock)
        self._reader: StateReader | None = None
        self._specs: Mapping[str, TensorSpec] | None = None
        self._publisher: Publisher | None = None
        self._publishing = threads(1, "publish")
        self._staged: tuple[Published, tuple[Outcome, ...], float] | None = None
        self.syncs: list[Sync] = []
        """The latest ones, newest last."""

    def init_weight_transfer(self) -> None:
        """Open the run and wait for a server; called when training begins.

        Raises:
            EngineUnavailable: no server came up in time.
            StoreUnavailable, StoreRefused, NotARun: the store's own errors.
        """
        self._publisher = Publisher(
            self._store, lambda: self._reader, key=self._key, **self._options
        )
        self._servers.wait_until_up(self._ready_timeout_s)

    def pause(self) -> None:
        """Nothing yet: the servers generate until there is something to write."""

    def send_weights(self, iterator: Pairs) -> None:
        """Publish a version and have every server stage it; they generate meanwhile.

        The stream is taken to its end whatever happens, because other ranks gather along with it. A
        store that is away, or a server, does not stop training: the next sync covers it.

        Raises:
            StopError: the store refuses, or the weights cannot be published.
            WeightwireError: not one server can take the first version.
        """
        self._staged = None
        began = self._clock.monotonic()
        try:
            published = self._publish(iterator)
        except (RetryError, ResyncError) as error:
            self._specs = None  # whatever went wrong, the next stream is taken as it comes
            log.warning(
                "training goes on without a new version; the next sync covers it: %s", error
            )
            return
        finally:
            for _ in iterator:
                pass
        outcomes = self._servers.stage(published.version) if published.version >= 0 else ()
        self._require_one(outcomes)
        self._staged = (published, outcomes, self._clock.monotonic() - began)

    def resume(self) -> None:
        """Pause each server that has staged the version, write it, and let the server go on.

        Raises:
            WeightwireError: not one server can take the first version.
        """
        if self._staged is None:
            return
        published, staged, send_s = self._staged
        self._staged = None
        sync = Sync(published, self._servers.activate(staged), send_s)
        self._require_one(sync.servers)
        self.syncs = [*self.syncs[-63:], sync]
        log.info("%s", _told(sync))
        self._on_synced(sync)

    def destroy(self) -> None:
        """Finish what is under way and let go; the servers go on with the version they have."""
        if self._publisher is not None:
            self._publisher.close()
            self._servers.wait_checked()
        self._publisher, self._specs = None, None
        self._publishing.shutdown(wait=True)
        self._servers.close()

    def _publish(self, iterator: Pairs) -> Published:
        stream = streamed(iterator, self._pieces, self._dtype_of)
        if self._specs is None or self._options.get("mode") == "validate":
            return self._publish_spooled(stream)
        return self._publish_passing(stream, self._specs)

    def _publish_spooled(self, stream: Iterable[Streamed]) -> Published:
        """Nothing is known of the stream, or it must be read twice: by way of a file."""
        with closing(SpooledState(stream)) as spooled:
            published = self._start(spooled).result()
        self._specs = spooled.specs
        return published

    def _publish_passing(
        self, stream: Iterable[Streamed], specs: Mapping[str, TensorSpec]
    ) -> Published:
        """The caller's thread walks the stream, because it may gather; another one compares."""
        passing = PassingState(specs)
        reading = self._publishing.submit(self._start, passing)
        reading.add_done_callback(lambda _: passing.abandon())
        passing.feed(stream)
        published = reading.result().result()
        if passing.has_more:
            log.warning("the stream of weights has new tensors; the next sync publishes them too")
            self._specs = None
        return published

    def _start(self, reader: StateReader) -> Future[Published]:
        if self._publisher is None:
            raise StopError("init_weight_transfer() comes before the first transfer")
        self._reader = reader
        try:
            return self._publisher.publish()
        finally:
            self._reader = None

    def _pieces(self, name: str, tensor: Any) -> Iterable[tuple[str, Any]]:
        return self._names.pieces(name, tensor) if self._names else [(name, tensor)]

    def _dtype_of(self, name: str) -> DType | None:
        return None if any(part in name for part in self._wide) else self._dtype

    def _require_one(self, outcomes: tuple[Outcome, ...]) -> None:
        """Without an engine at all there is nothing to train on: say so before the first step.

        Raises:
            WeightwireError: the first server's.
        """
        errors = [each.error for each in outcomes if each.error is not None]
        if not self.syncs and errors and len(errors) == len(outcomes):
            raise errors[0]


def _path_of(store: str | os.PathLike[str] | ObjectStore) -> str | os.PathLike[str]:
    if isinstance(store, (str, os.PathLike)):
        return store
    raise StopError("the servers open the store themselves: say where with server_store=")


def _told(sync: Sync) -> str:
    behind = [each.url for each in sync.servers if not each.is_current]
    return (
        f"version {sync.published.version}: {sync.published.n_bytes:,} bytes,"
        f" {sync.published.density:.2%} changed, sent in {sync.send_s:.2f} s,"
        f" paused {sync.pause_s * 1000:.1f} ms"
        + (f", not on {', '.join(behind)}" if behind else "")
    )
