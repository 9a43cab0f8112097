"""``weightwire diff``: two checkpoints in, one patch out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from weightwire.checkpoint import Checkpoint
from weightwire.cli.options import STATE_HELP, AsJson, CodecName, Overwrite, PatchOut, Threads
from weightwire.cli.patch_output import open_patch_output
from weightwire.cli.summary import patch_fields, patch_text
from weightwire.cli.terminal import open_terminal
from weightwire.diff.compare import diff_states


def diff_command(
    context: typer.Context,
    base: Annotated[Path, typer.Argument(metavar="BASE", help=STATE_HELP)],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Its next version.")],
    output: PatchOut,
    codec: Annotated[
        CodecName, typer.Option(help="compact: smallest. plain: readable without the base.")
    ] = CodecName.compact,
    threads: Threads = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write the patch that turns BASE into TARGET, bit for bit."""
    with (
        open_terminal(context, as_json=as_json) as terminal,
        Checkpoint.open(base) as old,
        Checkpoint.open(target) as new,
    ):
        began = time.perf_counter()
        n_full_bytes = sum(spec.n_bytes for spec in new.specs.values())
        progress = terminal.display.stage("diff", n_full_bytes)
        with open_patch_output(output, overwrite=overwrite) as folder:
            index = diff_states(old, new, folder, codec.value, n_threads=threads, progress=progress)
            folder.commit(index)
        seconds = time.perf_counter() - began
        fields = patch_fields(index, output, n_full_bytes=n_full_bytes, seconds=seconds)
        terminal.show(fields, patch_text(fields))
