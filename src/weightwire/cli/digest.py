"""``weightwire digest``: the fingerprint of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from weightwire.checkpoint import Checkpoint
from weightwire.cli.options import STATE_HELP, AsJson
from weightwire.cli.terminal import open_terminal, printable
from weightwire.digest import TensorDigest, digest_state


def digest_command(
    context: typer.Context,
    state: Annotated[Path, typer.Argument(metavar="STATE", help=STATE_HELP)],
    tensors: Annotated[bool, typer.Option("--tensors", help="Also of each tensor.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the 128-bit digest of a state: names, types, shapes and bits."""
    with open_terminal(context, as_json=as_json) as terminal, Checkpoint.open(state) as checkpoint:
        n_bytes = sum(spec.n_bytes for spec in checkpoint.specs.values())
        digest, by_name = digest_state(checkpoint, terminal.display.stage("digest", n_bytes))
        fields: dict[str, object] = {
            "digest": digest,
            "n_tensors": len(by_name),
            "n_bytes": n_bytes,
        }
        if tensors:
            fields["tensors"] = {name: str(found) for name, found in by_name.items()}
        terminal.show(fields, _text(digest, by_name if tensors else {}))


def _text(digest: str, by_name: dict[str, TensorDigest]) -> Text:
    lines = [Text(digest)]
    lines += [Text.assemble(str(found), "  ", printable(name)) for name, found in by_name.items()]
    return Text("\n").join(lines)
