"""Where a command's events go: a file of lines, a Prometheus text file, a port."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from weightwire.metrics import Event, JsonLines, Prometheus, Sink, each
from weightwire.store.counting import CountingStore

_TEXTFILE_SUFFIX = ".prom"

MetricsFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--metrics-file",
        metavar="FILE",
        help="Append one JSON line per version; a name ending in .prom: Prometheus text.",
    ),
]
MetricsPort: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--metrics-port",
        min=0,
        max=65535,
        metavar="PORT",
        help="Answer Prometheus on 127.0.0.1:PORT.",
    ),
]


@contextmanager
def open_sinks(
    store: CountingStore,
    file: Path | None,
    port: int | None = None,
    *,
    n_heals: Callable[[], int] | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[Sink]:
    """One sink for everything that was asked for.

    Raises:
        ExtraMissing: Prometheus was asked for and its library is not installed.
        OSError: the port is taken.
    """
    wants_text = file is not None and file.suffix == _TEXTFILE_SUFFIX
    sinks: list[Sink] = [JsonLines(file)] if file is not None and not wants_text else []
    if port is None and not wants_text:
        yield each(*sinks)
        return
    prometheus = Prometheus(store=store, n_heals=n_heals)
    sinks.append(prometheus)
    if wants_text and file is not None:
        sinks.append(_writer(prometheus, file))
    try:
        if port is not None:
            note(f"metrics: http://127.0.0.1:{prometheus.serve(port)}/metrics")
        yield each(*sinks)
    finally:
        prometheus.close()


def _writer(prometheus: Prometheus, file: Path) -> Sink:
    def write(_: Event) -> None:
        prometheus.write(file)

    return write
