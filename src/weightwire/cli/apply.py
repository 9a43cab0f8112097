"""``weightwire apply``: a checkpoint and a patch in, the next checkpoint out, or in place."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from weightwire.apply.files import FilesApplied, apply_in_place, apply_to_new
from weightwire.cli.options import STATE_HELP, AsJson, Overwrite, PatchIn
from weightwire.cli.terminal import Terminal, open_terminal
from weightwire.codec.patch import Patch


def apply_command(
    context: typer.Context,
    base: Annotated[Path, typer.Argument(metavar="BASE", help=STATE_HELP)],
    patch: PatchIn,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT", help="Checkpoint to write.")
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Overwrite BASE; a crash can be finished later.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Apply PATCH to BASE: into a new checkpoint (-o OUT) or in place.

    Every bit is proven by digest. OUT appears whole or not at all. With --in-place, run the
    same command again after a crash: it finishes what was begun.
    """
    if (output is None) != in_place or (in_place and overwrite):
        raise typer.BadParameter("give exactly one of -o OUT [--overwrite] and --in-place")
    with open_terminal(context, as_json=as_json) as terminal:
        began = time.perf_counter()
        done = _apply(terminal, base, Patch.load(patch), output, overwrite=overwrite)
        _show(terminal, done, time.perf_counter() - began)


def _apply(
    terminal: Terminal, base: Path, patch: Patch, output: Path | None, *, overwrite: bool
) -> FilesApplied:
    stage = terminal.display.stage
    if output is None:
        return apply_in_place(base, patch, stage=stage)
    return apply_to_new(base, patch, output, overwrite=overwrite, stage=stage)


def _show(terminal: Terminal, done: FilesApplied, seconds: float) -> None:
    if done.n_recovered:
        terminal.note("an apply that was interrupted has been finished")
    fields: dict[str, Any] = {
        "path": str(done.path),
        "digest": done.digest,
        "n_changed": 0 if done.was_target else done.n_changed,
        "was_target": done.was_target,
        "n_recovered": done.n_recovered,
        "seconds": seconds,
    }
    terminal.show(fields, _text(done, seconds))


def _text(done: FilesApplied, seconds: float) -> Text:
    if done.was_target:
        return Text(f"{done.path} is the target already  {done.digest}")
    return Text(
        f"{done.path}: {done.n_changed:,} elements changed in {seconds:.2f} s  {done.digest}"
    )
