"""What ``follow`` shows: a live table on a terminal, lines in a log, objects for programs."""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightwire.cli.numbers import bytes_text
from weightwire.cli.terminal import Terminal
from weightwire.events import Updated

_N_ROWS = 12
_COLUMNS = ("version", "way", "changed", "fetched", "stage", "activate", "verify", "lag")


class View:
    """Lines on stdout, one per version; a context manager."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def updated(self, updated: Updated, n_heals: int) -> None:
        """Show a version that is active now."""
        del n_heals
        cells = dict(zip(_COLUMNS, _cells(updated), strict=True))
        typer.echo(
            f"version {cells['version']}: {cells['way']}, {cells['changed']} changed,"
            f" {cells['fetched']}, staged in {cells['stage']}, activated in {cells['activate']},"
            f" verified in {cells['verify']}, lag {cells['lag']}"
        )
        sys.stdout.flush()

    def fetched(self, n_bytes: int) -> None:
        """Show that bytes came."""

    def note(self, text: str) -> None:
        """Say something that is not a version."""
        self._terminal.note(text)

    def __enter__(self) -> View:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave everything as it was shown."""


class JsonView(View):
    """One JSON object per version, each on a line of its own."""

    def updated(self, updated: Updated, n_heals: int) -> None:
        """Print it, at once."""
        fields: dict[str, Any] = {**asdict(updated), "n_heals": n_heals}
        typer.echo(json.dumps(fields))
        sys.stdout.flush()


class LiveView(View):
    """The last versions in a table that is redrawn in place."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(terminal)
        self._rows: deque[Updated] = deque(maxlen=_N_ROWS)
        self._n_fetched = 0
        self._live = Live(console=Console(), refresh_per_second=4, get_renderable=self._table)

    def updated(self, updated: Updated, n_heals: int) -> None:
        """Add a row."""
        del n_heals
        self._rows.append(updated)
        self._n_fetched = 0

    def fetched(self, n_bytes: int) -> None:
        """Count up in the last line."""
        self._n_fetched += n_bytes

    def note(self, text: str) -> None:
        """Print above the table."""
        self._live.console.print(Text(text))

    def __enter__(self) -> View:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _table(self) -> Table:
        coming = (
            f"fetching, {bytes_text(self._n_fetched)} so far" if self._n_fetched else "watching"
        )
        table = Table(box=None, caption=coming, caption_justify="left", pad_edge=False)
        for column in _COLUMNS:
            table.add_column(column, justify="right")
        for updated in self._rows:
            table.add_row(*_cells(updated))
        return table


def choose_view(terminal: Terminal, *, quiet: bool) -> View:
    """Objects if so asked, a table where someone is watching, lines elsewhere."""
    if terminal.as_json:
        return JsonView(terminal)
    return LiveView(terminal) if sys.stdout.isatty() and not quiet else View(terminal)


def _cells(updated: Updated) -> tuple[str, ...]:
    return (
        str(updated.version),
        _way(updated),
        f"{updated.n_changed:,}",
        bytes_text(updated.n_bytes),
        f"{updated.stage_s:.2f} s",
        f"{1000 * updated.activate_s:.1f} ms",
        f"{1000 * updated.verify_s:.1f} ms",
        str(updated.lag),
    )


def _way(updated: Updated) -> str:
    n_patches = updated.n_steps - updated.was_whole
    patches = "1 patch" if n_patches == 1 else f"{n_patches} patches"
    if updated.was_whole:
        return "anchor" if n_patches == 0 else f"anchor, {patches}"
    return patches if n_patches else "held already"
