"""``weightwire verify``: is a checkpoint a patch's base, its target, or neither? Is a run sound?"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from weightwire.apply.proof import Standing, stand
from weightwire.checkpoint import Checkpoint
from weightwire.cli.options import STATE_HELP, AsJson, PinnedKey
from weightwire.cli.terminal import Terminal, open_terminal, printable, warnings_as_notes
from weightwire.cli.verify_run import verify_run
from weightwire.codec.patch import Patch

NOT_IT = 1
_MAX_NAMES = 10


class Side(str, Enum):
    """The two ends of a patch."""

    base = "base"
    target = "target"


def verify_command(
    context: typer.Context,
    state: Annotated[
        str, typer.Argument(metavar="STATE|STORE", help=f"{STATE_HELP} Or, without PATCH, a run.")
    ],
    patch: Annotated[
        Path | None, typer.Argument(metavar="[PATCH]", help="Patch folder.", show_default=False)
    ] = None,
    wanted: Annotated[
        Side, typer.Option("--is", help="Which end of the patch counts as success.")
    ] = Side.target,
    key: PinnedKey = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Of a run: also rebuild every version and prove it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether STATE is the patch's base, its target, or neither; or check the whole run in STORE.

    Of a run, every record, index, bucket and anchor file is read and compared with its length and
    SHA-256, and all damage is listed. Exits with 0 if it is the wanted one, or sound; with 1 if
    not; with 2 on errors.
    """
    if patch is not None and (key is not None or deep):
        raise typer.BadParameter("--key and --deep are for a run: give no PATCH")
    with (
        open_terminal(context, as_json=as_json) as terminal,
        warnings_as_notes(context, terminal.note),
    ):
        if patch is None:
            is_right = verify_run(terminal, state, key, deep=deep)
        else:
            is_right = _verify_state(terminal, Path(state), patch, wanted)
    if not is_right:
        raise typer.Exit(NOT_IT)


def _verify_state(terminal: Terminal, state: Path, patch: Path, wanted: Side) -> bool:
    with Checkpoint.open(state) as checkpoint:
        n_bytes = sum(spec.n_bytes for spec in checkpoint.specs.values())
        progress = terminal.display.stage("verify", n_bytes)
        loaded = Patch.load(patch)
        standing = stand(checkpoint, loaded, progress)
        terminal.show(_fields(standing, loaded, wanted), _text(standing, wanted))
    return _is(standing, wanted)


def _is(standing: Standing, side: Side) -> bool:
    return standing.is_base if side is Side.base else standing.is_target


def _differing(standing: Standing, side: Side) -> tuple[str, ...]:
    return standing.wrong_base if side is Side.base else standing.wrong_target


def _verdict(standing: Standing) -> str:
    if standing.is_base and standing.is_target:
        return "base and target"
    if standing.is_base:
        return "base"
    return "target" if standing.is_target else "neither"


def _fields(standing: Standing, patch: Patch, wanted: Side) -> dict[str, Any]:
    return {
        "verdict": _verdict(standing),
        "is_base": standing.is_base,
        "is_target": standing.is_target,
        "is_wanted": _is(standing, wanted),
        "digest": standing.digest,
        "base_digest": patch.base_digest,
        "target_digest": patch.target_digest,
        "differs_from_base": list(standing.wrong_base),
        "differs_from_target": list(standing.wrong_target),
    }


def _text(standing: Standing, wanted: Side) -> Text:
    lines = [Text(f"{_verdict(standing)}  {standing.digest}")]
    if not _is(standing, wanted):
        names = _differing(standing, wanted)
        lines.append(Text(f"differs from the {wanted.value} in:"))
        lines += [Text.assemble("  ", printable(name)) for name in names[:_MAX_NAMES]]
        if len(names) > _MAX_NAMES:
            lines.append(Text(f"  and {len(names) - _MAX_NAMES:,} more"))
        if not names:
            lines.append(Text("  the set of tensors, types or shapes"))
    return Text("\n").join(lines)
