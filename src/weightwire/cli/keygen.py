"""``weightwire keygen``: the key a publisher signs with, and the line its readers pin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from weightwire.cli.options import AsJson
from weightwire.cli.terminal import open_terminal
from weightwire.trust.keys import SigningKey


def keygen_command(
    context: typer.Context,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="KEY", help="Private key file to write."),
    ] = None,
    show: Annotated[
        Path | None,
        typer.Option("--show", metavar="KEY", help="Make none; print this one's public key."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a signing key, and print the public key that readers of the run should pin."""
    if (output is None) == (show is None):
        raise typer.BadParameter("give either --output, for a new key, or --show", context)
    with open_terminal(context, as_json=as_json) as terminal:
        if show is not None:
            key = SigningKey.load(show)
        else:
            key = SigningKey.generate()
            key.save(output or "")
            terminal.note(f"private key: {output}: for the publisher only; keep a copy elsewhere")
            terminal.note("public key, for every reader's configuration:")
        fields = {
            "public_key": str(key.public),
            "fingerprint": key.public.fingerprint,
            "private_key_file": str(show or output),
        }
        terminal.show(fields, Text(str(key.public)))
