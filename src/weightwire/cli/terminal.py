"""What a command says and where: results to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from weightwire.cli.progress import ProgressDisplay, choose_display
from weightwire.errors import ResyncError, RetryError, StopError, WeightwireError

FAILED = 2
INTERRUPTED = 130
_LOG_COLUMNS = 160

_REMEDIES: dict[type[Exception], tuple[str, str]] = {
    RetryError: ("retry", "the bytes are damaged, a fresh copy may be sound"),
    ResyncError: ("resync", "start from a full checkpoint of the version the patch needs"),
    StopError: ("stop", "trying again cannot help, change what the message names"),
    OSError: ("stop", "the operating system refused, see the message"),
}


@dataclass(frozen=True)
class Settings:
    """The options before the command's name."""

    quiet: bool = False
    verbose: bool = False


@dataclass(frozen=True)
class Terminal:
    """A running command's way to the outside."""

    as_json: bool
    display: ProgressDisplay

    def show(self, result: Mapping[str, Any], text: RenderableType) -> None:
        """Print the result, once: as one JSON object, or as text for people."""
        self.display.stop()
        if self.as_json:
            typer.echo(json.dumps(result, ensure_ascii=False, indent=2))
        else:
            _stdout().print(text, highlight=False, soft_wrap=isinstance(text, Text))

    def note(self, text: str) -> None:
        """Say something that is not the result."""
        self.display.note(text)


def settings_of(context: typer.Context) -> Settings:
    """What stood before the command's name."""
    return context.obj if isinstance(context.obj, Settings) else Settings()


@contextmanager
def open_terminal(context: typer.Context, *, as_json: bool = False) -> Iterator[Terminal]:
    """Run a command's body: watch its progress, turn its failures into lines and exit codes."""
    settings = settings_of(context)
    display = choose_display(quiet=settings.quiet)
    try:
        yield Terminal(as_json, display)
    except BrokenPipeError:
        display.stop()
        raise
    except (WeightwireError, OSError) as error:
        display.stop()
        _fail(error, settings, as_json=as_json)
    except KeyboardInterrupt:
        display.stop()
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        display.stop()


@contextmanager
def warnings_as_notes(context: typer.Context, note: Callable[[str], None]) -> Iterator[None]:
    """Show the library's warnings beside the progress; with --verbose the log has them already."""
    settings = settings_of(context)
    if settings.verbose:
        yield
        return
    handler = _NoteHandler(note)
    library = logging.getLogger("weightwire")
    library.addHandler(handler)
    try:
        yield
    finally:
        library.removeHandler(handler)


class _NoteHandler(logging.Handler):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        """One line; what a store or file is called must not style the terminal."""
        self._note(f"{record.levelname.lower()}: {_visible(record.getMessage())}")


def printable(text: str) -> Text:
    """Foreign text, such as a tensor's name, without markup or control characters in effect."""
    return Text(_visible(text))


def show_log() -> None:
    """Send the library's log to stderr."""
    logging.basicConfig(stream=sys.stderr, level=logging.DEBUG, format="%(name)s: %(message)s")


def _stdout() -> Console:
    """Tables keep their columns where there is no terminal to tell how wide it is."""
    return Console() if sys.stdout.isatty() else Console(width=_LOG_COLUMNS)


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _fail(error: Exception, settings: Settings, *, as_json: bool) -> NoReturn:
    remedy, hint = next(_REMEDIES[kind] for kind in type(error).__mro__ if kind in _REMEDIES)
    if settings.verbose:
        traceback.print_exception(error, file=sys.stderr)
    typer.echo(f"error: {_visible(str(error))}", err=True)
    typer.echo(f"what to do: {remedy}: {hint}", err=True)
    if as_json:
        fields = {"type": type(error).__name__, "message": str(error), "remedy": remedy}
        typer.echo(json.dumps({"error": fields}, ensure_ascii=False))
    raise typer.Exit(FAILED) from None
