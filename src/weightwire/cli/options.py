"""Options that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer


class CodecName(str, Enum):
    """The codecs to choose from."""

    compact = "compact"
    plain = "plain"


AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Overwrite: TypeAlias = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output if it exists.")
]
PatchOut: TypeAlias = Annotated[
    Path, typer.Option("--output", "-o", metavar="PATCH", help="Patch folder to write.")
]
PatchIn: TypeAlias = Annotated[Path, typer.Argument(metavar="PATCH", help="Patch folder.")]
Threads: TypeAlias = Annotated[
    int | None, typer.Option("--threads", min=1, help="Threads; all processors by default.")
]
StoreIn: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="STORE", help="The run: a folder, s3://…, gs://…, az://… or hf://buckets/…"
    ),
]
PinnedKey: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="PUBKEY", help="Accept only what this public key, or file of it, signed."
    ),
]
STATE_HELP = "Checkpoint folder or .safetensors file."
