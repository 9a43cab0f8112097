"""What is shown while it runs: a live table on a terminal, lines in a log, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightwire.cli.numbers import bytes_text
from weightwire.demo.events import Ended, Event, Finished, Killed, Ready, Sent, Stepped, WarmedUp
from weightwire.demo.record import Record
from weightwire.demo.settings import Arm, Settings
from weightwire.testing.link import LinkShape

_N_ROWS = 14


def row_of(record: Record, settings: Settings, arm: Arm, step: int) -> list[str]:
    """The cells of one step; what is not known yet is left blank."""
    stepped, sent = record.steps[arm].get(step), record.sent[arm].get(step)
    active = record.activations(arm, step)
    newest = record.newest(arm)
    lags = [newest - record.held(arm, worker) for worker in range(settings.n_workers)]
    is_last = step == max(record.steps[arm], default=0)
    return [
        str(step),
        f"{stepped.reward:.3f}" if stepped else "",
        f"{stepped.loss:+.4f}" if stepped else "",
        f"{sent.n_changed / sent.n_elements:.2%}" if sent else "",
        bytes_text(sent.n_bytes) if sent else "",
        f"1/{sent.n_full_bytes / max(sent.n_bytes, 1):.0f}" if sent else "",
        _ms(sent.read_s) if sent else "",
        _ms(sent.commit_s) if sent else "",
        _ms(max(each.stage_s for each in active)) if active else "",
        _ms(max(each.pause_s for each in active), digits=1) if active else "",
        *(str(lag) if is_last else "" for lag in lags),
    ]


def titles_of(settings: Settings) -> list[str]:
    """The columns."""
    lags = [f"lag {worker}" for worker in range(settings.n_workers)]
    first = ["step", "reward", "loss", "changed", "sent", "of full", "read", "commit"]
    return [*first, "stage", "pause", *lags]


class LineView:
    """One line per step: for logs."""

    def __init__(self, settings: Settings, write: Callable[[str], None]) -> None:
        self._settings, self._write = settings, write

    def __enter__(self) -> LineView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave everything as it was shown."""

    def show(self, event: Event, record: Record) -> None:
        """Say what is worth a line."""
        said = sentence(event, record, self._settings)
        if said:
            self._write(said)
        if isinstance(event, Stepped) and event.step > 1:
            cells = row_of(record, self._settings, event.arm, event.step - 1)
            named = zip(titles_of(self._settings), cells, strict=True)
            self._write(f"{event.arm}: " + ", ".join(f"{n} {c}" for n, c in named if c))


class JsonView(LineView):
    """One JSON object per event, each on a line of its own."""

    def show(self, event: Event, record: Record) -> None:
        """Print it, at once."""
        del record
        fields: dict[str, Any] = {"event": type(event).__name__, **asdict(event)}
        self._write(json.dumps(fields))


class TableView(LineView):
    """The last steps in a table that is redrawn in place."""

    def __init__(self, settings: Settings, link: LinkShape | None) -> None:
        self._console = Console()
        super().__init__(settings, lambda text: self._console.print(Text(text)))
        self._link, self._record, self._arm = link, Record(), settings.arms[0]
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._picture)

    def __enter__(self) -> TableView:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, event: Event, record: Record) -> None:
        """Note it; the picture is drawn anew by itself."""
        self._record = record
        said = sentence(event, record, self._settings)
        if said:
            self._write(said)
        if isinstance(event, Sent) and event.arm != self._arm:
            self._console.print(self._table())
            self._arm = event.arm

    def _picture(self) -> Group:
        return Group(self._table(), Text(footer(self._record, self._arm, self._link), style="dim"))

    def _table(self) -> Table:
        title = {"patches": "sync by patches", "full": "sync by whole files, the same seeds"}
        table = Table(box=None, title=title[self._arm], title_justify="left", padding=(0, 1, 0, 0))
        for name in titles_of(self._settings):
            table.add_column(name, justify="right", no_wrap=True)
        newest = max(self._record.steps[self._arm], default=0)
        for step in range(max(1, newest - _N_ROWS + 1), newest + 1):
            cells = row_of(self._record, self._settings, self._arm, step)
            table.add_row(*(cell.removesuffix(" ms") for cell in cells))
        return table


def sentence(event: Event, record: Record, settings: Settings) -> str:
    """What an event means, where it is worth saying."""
    said = ""
    match event:
        case Ready():
            how = "back" if record.n_returned else "ready"
            said = f"{event.process} is {how} after {event.seconds:.1f} s"
        case WarmedUp():
            taught = f", taught for {event.n_steps} steps" if event.n_steps else ""
            said = f"policy: {event.n_parameters:,} parameters{taught} in {event.seconds:.1f} s"
        case Killed():
            said = f"worker-{event.worker} was killed at step {event.step}, and is started again"
        case Finished(process="trainer"):
            said = f"{event.arm}: {settings.n_steps} steps done"
        case Ended() if event.code:
            said = f"{event.process} ended with exit code {event.code}"
        case _:
            pass
    return said


def footer(record: Record, arm: Arm, link: LinkShape | None) -> str:
    """Sums so far; with a link, what whole files would take over it."""
    sent = [each for version, each in record.sent[arm].items() if version]
    if not sent:
        return "waiting for the first step"
    n_bytes, n_full = sum(e.n_bytes for e in sent), sum(e.n_full_bytes for e in sent)
    text = f"times in ms; {bytes_text(n_bytes)} sent, {bytes_text(n_full)} as whole files"
    staged = [each.stage_s for each in record.activated[arm] if each.version]
    if link is not None and staged:
        whole_s = link.seconds_for(n_full / len(sent))
        text += (
            f"; {link}: a version took {_ms(sum(staged) / len(staged))} to stage (measured),"
            f" a whole file would take {_ms(whole_s)} at best (computed)"
        )
    return text


def choose_view(settings: Settings, link: LinkShape | None, *, as_json: bool) -> LineView:
    """The view for where the output goes."""
    if as_json:
        return JsonView(settings, _print)
    if sys.stdout.isatty():
        return TableView(settings, link)
    return LineView(settings, _print)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _ms(seconds: float, digits: int = 0) -> str:
    return f"{seconds * 1e3:.{digits}f} ms"
