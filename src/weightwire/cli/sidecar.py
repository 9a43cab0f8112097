"""``weightwire sidecar``: keep running inference servers at the newest version."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from enum import Enum
from typing import Annotated, Any

import typer

from weightwire.cli.numbers import bytes_text
from weightwire.cli.options import PinnedKey, StoreIn
from weightwire.cli.quantities import duration
from weightwire.cli.signals import Signals
from weightwire.cli.terminal import Terminal, open_terminal, warnings_as_notes
from weightwire.engines.remote.server_status import Pause
from weightwire.engines.remote.sidecar import EngineServer, Followed, follow


class EngineName(str, Enum):
    """Servers we can talk to."""

    vllm = "vllm"
    sglang = "sglang"


def sidecar_command(
    context: typer.Context,
    store: StoreIn,
    urls: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Servers, e.g. http://127.0.0.1:8000.")
    ],
    engine: Annotated[EngineName, typer.Option(help="What they run.")] = EngineName.vllm,
    until: Annotated[
        int | None, typer.Option("--until", min=0, metavar="N", help="Stop at version N or later.")
    ] = None,
    key: PinnedKey = None,
    poll: Annotated[
        float,
        typer.Option("--poll", parser=duration, metavar="S", help="Mean pause between looks."),
    ] = "1s",  # type: ignore[assignment]
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per server and version.")
    ] = False,
) -> None:
    """Keep the servers at URL... at the newest version of the run in STORE.

    The servers fetch and decode while they serve, and pause only to overwrite what changed. STORE
    must mean the same run here and where they run. They must have been started for Weightwire: see
    docs/integrations. This process holds no weights; it may be killed and started again.
    """
    with (
        open_terminal(context, as_json=as_json) as terminal,
        warnings_as_notes(context, terminal.note),
        Signals(),
        ExitStack() as stack,
    ):
        servers = open_servers(engine, urls)
        for server in servers:
            stack.callback(server.close)
        for followed in follow(store, servers, key=key, until=until, poll_s=poll):
            _show(terminal, followed)


def open_servers(engine: EngineName, urls: Sequence[str]) -> list[EngineServer]:
    """The servers behind the URLs; nothing is asked of them yet."""
    if engine is EngineName.sglang:
        from weightwire.engines.sglang.server import SglangServer

        return [SglangServer(url) for url in urls]
    from weightwire.engines.vllm.server import VllmServer

    return [VllmServer(url) for url in urls]


def _show(terminal: Terminal, followed: Followed) -> None:
    for fields, text in _lines(followed):
        typer.echo(json.dumps(fields) if terminal.as_json else text)


def _lines(followed: Followed) -> Iterator[tuple[dict[str, Any], str]]:
    for url, pause in followed.pauses.items():
        yield (
            _fields(url, pause),
            (
                f"version {pause.version}  {url}  paused {1000 * pause.total_s:.0f} ms,"
                f" {1000 * pause.activate_s:.1f} ms of it writing {pause.n_changed:,} elements,"
                f" {bytes_text(pause.n_bytes)} fetched before"
            ),
        )
    for url, error in followed.failures.items():
        kind = type(error).__name__
        fields = {"url": url, "version": followed.version, "error": kind, "message": str(error)}
        yield fields, f"version {followed.version}  {url}  not yet: {kind}: {error}"


def _fields(url: str, pause: Pause) -> dict[str, Any]:
    return {
        "url": url,
        "version": pause.version,
        "n_ranks": pause.n_ranks,
        "pause_s": pause.total_s,
        "drain_s": pause.drain_s,
        "activate_s": pause.activate_s,
        "stage_s": pause.stage_s,
        "n_bytes": pause.n_bytes,
        "n_changed": pause.n_changed,
    }
