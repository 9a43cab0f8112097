"""What happened, for whoever watches: events as JSON lines in a file, or as Prometheus metrics.

    sink = each(JsonLines("events.jsonl"), prometheus := Prometheus())
    prometheus.serve(9400)
    Publisher(…, on_published=sink)        Subscriber(…, on_updated=sink)

A sink is called after a version was committed or activated. Measuring is never worth a failure:
what a sink cannot write, it logs.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from weightwire.clock import Clock, SystemClock
from weightwire.errors import ExtraMissing
from weightwire.events import Published, Updated
from weightwire.store.counting import CountingStore

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily

log = logging.getLogger("weightwire.metrics")

Event: TypeAlias = Published | Updated
Sink: TypeAlias = Callable[[Event], None]

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Bucket borders: a pause of milliseconds and a first download of minutes, in equal steps."""


def each(*sinks: Sink) -> Sink:
    """One sink that tells all of them."""

    def tell(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return tell


def event_fields(event: Event, now: float) -> dict[str, Any]:
    """An event as one flat object: its type, its time, and all of its fields."""
    kind = "published" if isinstance(event, Published) else "updated"
    fields = {"event": kind, "time": now, **asdict(event)}
    if isinstance(event, Published):
        fields["density"] = event.density
    return fields


class JsonLines:
    """Appends one line per event to a file; several processes may share it."""

    def __init__(self, path: str | os.PathLike[str], clock: Clock | None = None) -> None:
        """Nothing is opened yet; the file is made with the first event."""
        self._path, self._clock = Path(path), clock or SystemClock()

    def __call__(self, event: Event) -> None:
        """Write one line, in one piece: lines of two processes do not mix."""
        fields = event_fields(event, self._clock.now())
        line = json.dumps(fields, ensure_ascii=False, separators=(",", ":")) + "\n"
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o644)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            log.warning("an event is not recorded: %s", error)


class Prometheus:
    """Keeps metrics of the events it is told, in a registry of its own."""

    def __init__(
        self,
        *,
        store: CountingStore | None = None,
        n_heals: Callable[[], int] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Begin with nothing counted.

        Args:
            store: also count its requests and bytes; put it under the publisher or subscriber.
            n_heals: gives a subscriber's ``n_heals``.
            labels: constant labels for every metric, such as ``{"run": "run-7"}``.

        Raises:
            ExtraMissing: prometheus_client is not installed.
        """
        _need_prometheus()
        from prometheus_client import CollectorRegistry

        self.registry: CollectorRegistry = CollectorRegistry()
        self._labels = dict(labels or {})
        self._store, self._n_heals = store, n_heals
        self._server: Any = None
        self._is_publisher = self._is_subscriber = False
        self.registry.register(_Pulled(self))

    def __call__(self, event: Event) -> None:
        """Count one event."""
        if isinstance(event, Published):
            self._count_published(event)
        else:
            self._count_updated(event)

    def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Answer scrapes over HTTP from a thread of its own; gives the port, chosen if 0 was asked for.

        Raises:
            OSError: the port is taken.
        """
        from prometheus_client import start_http_server

        server, _ = start_http_server(port, addr=host, registry=self.registry)
        self._server = server
        return int(server.server_port)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a text file for the node exporter's textfile collector, replaced in one rename."""
        from prometheus_client import write_to_textfile

        try:
            write_to_textfile(os.fspath(path), self.registry)
        except OSError as error:
            log.warning("metrics are not written: %s", error)

    def close(self) -> None:
        """Stop answering; may be called twice."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _make_publisher_metrics(self) -> None:
        """Only when there is something to say: a receiver has published no version 0."""
        self._is_publisher = True
        self._published = self._gauge("published_version", "Newest version committed here.")
        self._epoch = self._gauge("publisher_epoch", "Epoch of this publisher.")
        self._changed = self._gauge("changed_ratio", "Share of elements changed by the newest one.")
        self._state = self._gauge("state_bytes", "Size of the full state.")
        self._patch_bytes = self._counter("patch_bytes", "Bytes of patches and anchors published.")
        self._versions = self._counter("published_versions", "Versions committed here.")
        self._read = self._histogram("read_seconds", "What the trainer waited for.")
        self._commit = self._histogram("commit_seconds", "From then until the version existed.")

    def _make_subscriber_metrics(self) -> None:
        self._is_subscriber = True
        self._active = self._gauge("active_version", "Version that is active here.")
        self._lag = self._gauge("lag_versions", "Versions still ahead when it was activated.")
        self._fetched = self._counter("fetched_bytes", "Bytes downloaded.")
        self._updates = self._counter("updates", "Versions activated here.")
        self._whole = self._counter("whole_loads", "Those of them loaded from an anchor.")
        self._detours = self._counter("detours", "Ways to a version that turned out bad.")
        self._stage = self._histogram("stage_seconds", "Everything before the pause.")
        self._fetch = self._histogram("fetch_seconds", "Of that, waiting for bytes.")
        self._activate = self._histogram("activate_seconds", "The pause: weights are written.")
        self._verify = self._histogram("verify_seconds", "Reading back what was written.")

    def _count_published(self, event: Published) -> None:
        if not self._is_publisher:
            self._make_publisher_metrics()
        if event.version >= 0:
            self._published.set(event.version)
            self._versions.inc()
            self._patch_bytes.inc(event.n_bytes)
        self._epoch.set(event.epoch)
        self._changed.set(event.density)
        self._state.set(event.n_state_bytes)
        self._read.observe(event.read_s)
        self._commit.observe(event.commit_s)

    def _count_updated(self, event: Updated) -> None:
        if not self._is_subscriber:
            self._make_subscriber_metrics()
        self._active.set(event.version)
        self._lag.set(event.lag)
        self._fetched.inc(event.n_bytes)
        self._updates.inc()
        self._whole.inc(event.was_whole)
        self._detours.inc(event.n_detours)
        self._stage.observe(event.stage_s)
        self._fetch.observe(event.fetch_s)
        self._activate.observe(event.activate_s)
        self._verify.observe(event.verify_s)

    def _gauge(self, name: str, text: str) -> Any:
        from prometheus_client import Gauge

        return self._labelled(
            Gauge(f"weightwire_{name}", text, [*self._labels], registry=self.registry)
        )

    def _counter(self, name: str, text: str) -> Any:
        from prometheus_client import Counter

        made = Counter(f"weightwire_{name}", text, [*self._labels], registry=self.registry)
        return self._labelled(made)

    def _histogram(self, name: str, text: str) -> Any:
        from prometheus_client import Histogram

        name, names = f"weightwire_{name}", [*self._labels]
        made = Histogram(name, text, names, registry=self.registry, buckets=_SECONDS)
        return self._labelled(made)

    def _labelled(self, metric: Any) -> Any:
        return metric.labels(**self._labels) if self._labels else metric

    def _pull(self) -> Iterator[CounterMetricFamily]:
        """What others count, read at the moment of a scrape."""
        if self._n_heals is not None:
            heals = self._family("heals", "Times damage was found and repaired.", [])
            heals.add_metric([*self._labels.values()], self._n_heals())
            yield heals
        if self._store is not None:
            yield from self._store_counts(self._store)

    def _store_counts(self, store: CountingStore) -> Iterator[CounterMetricFamily]:
        counts, values = store.snapshot(), [*self._labels.values()]
        requests = self._family("store_requests", "Calls to the store.", ["verb"])
        for verb in ("put", "create", "read", "list", "delete"):
            requests.add_metric([*values, verb], getattr(counts, f"n_{verb}"))
        n_bytes = self._family("store_bytes", "Bytes to and from the store.", ["direction"])
        n_bytes.add_metric([*values, "up"], counts.n_bytes_up)
        n_bytes.add_metric([*values, "down"], counts.n_bytes_down)
        yield from (requests, n_bytes)

    def _family(self, name: str, text: str, more: list[str]) -> CounterMetricFamily:
        from prometheus_client.core import CounterMetricFamily

        return CounterMetricFamily(f"weightwire_{name}", text, labels=[*self._labels, *more])


class _Pulled:
    """What a registry asks at every scrape."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Counters that live elsewhere."""
        yield from self._prometheus._pull()


def _need_prometheus() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise ExtraMissing(
            "Prometheus metrics need prometheus_client: pip install 'weightwire[metrics]'"
        ) from None
