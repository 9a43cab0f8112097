"""``weightwire merge``: a chain of patches in, their net patch out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from weightwire.cli.optional_base import open_base
from weightwire.cli.options import AsJson, CodecName, Overwrite, PatchOut
from weightwire.cli.patch_output import open_patch_output
from weightwire.cli.summary import patch_fields, patch_text
from weightwire.cli.terminal import open_terminal
from weightwire.codec.merge import merge_states
from weightwire.codec.patch import Patch


def merge_command(
    context: typer.Context,
    patches: Annotated[
        list[Path], typer.Argument(metavar="PATCH...", help="Patch folders, in order.")
    ],
    output: PatchOut,
    base: Annotated[
        Path | None, typer.Option(help="The first patch's base; plain patches do without.")
    ] = None,
    codec: Annotated[
        CodecName | None, typer.Option(help="Of the output; the last patch's by default.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write the net patch over a chain: changes that were undone disappear."""
    if base is None and codec is CodecName.compact:
        raise typer.BadParameter("a compact patch is coded against its base: give --base")
    with open_terminal(context, as_json=as_json) as terminal, open_base(base) as state:
        began = time.perf_counter()
        chain = [Patch.load(path) for path in patches]
        n_bytes = sum(spec.n_bytes for spec in state.specs.values()) if state else 0
        progress = terminal.display.stage("merge", n_bytes)
        with open_patch_output(output, overwrite=overwrite) as folder:
            name = codec.value if codec else None
            index = merge_states(state, chain, folder, name, progress=progress)
            folder.commit(index)
        seconds = time.perf_counter() - began
        fields = patch_fields(index, output, n_full_bytes=None, seconds=seconds)
        terminal.show(fields, patch_text(fields))
