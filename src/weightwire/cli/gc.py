"""``weightwire gc``: remove old versions that nobody needs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from weightwire.cli.numbers import bytes_text
from weightwire.cli.options import AsJson, PinnedKey, StoreIn
from weightwire.cli.quantities import duration, size
from weightwire.cli.run_opening import open_run
from weightwire.cli.terminal import open_terminal, printable, warnings_as_notes
from weightwire.clock import SystemClock
from weightwire.store.retention import Collected, Retention, collect


def gc_command(
    context: typer.Context,
    store: StoreIn,
    keep: Annotated[
        int, typer.Option("--keep", min=1, metavar="N", help="Newest versions that stay.")
    ] = Retention.keep_versions,
    keep_age: Annotated[
        float | None,
        typer.Option(
            "--keep-age", parser=duration, metavar="AGE", help="Younger ones stay too: 15m, 2h, 7d."
        ),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            "--max-bytes",
            parser=size,
            metavar="SIZE",
            help="Remove more than that if it is safe, until so much is left: 10GB.",
        ),
    ] = None,
    keep_anchors: Annotated[
        int, typer.Option("--keep-anchors", min=1, metavar="N", help="Newest anchors that stay.")
    ] = Retention.keep_anchors,
    grace: Annotated[
        float,
        typer.Option(
            "--grace",
            parser=duration,
            metavar="AGE",
            help="Workers heard of, and data written, since then are spared.",
        ),
    ] = "1h",  # type: ignore[assignment]
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")
    ] = False,
    key: PinnedKey = None,
    as_json: AsJson = False,
) -> None:
    """Delete old versions of the run in STORE, and leftovers of publishers that died.

    The newest complete anchor stays, whatever is asked for, and so does every version from the one
    a live worker holds on. Safe beside publishers, readers and other collectors, and after a crash.
    """
    policy = Retention(
        keep_versions=keep,
        keep_s=keep_age,
        max_bytes=max_bytes,
        keep_anchors=keep_anchors,
        receipt_grace_s=grace,
        orphan_grace_s=grace,
    )
    with (
        open_terminal(context, as_json=as_json) as terminal,
        warnings_as_notes(context, terminal.note),
        open_run(store, key) as run,
    ):
        done = collect(run, policy, SystemClock(), dry_run=dry_run)
        terminal.show(_fields(done, dry_run), _text(done, dry_run))


def _fields(done: Collected, dry_run: bool) -> dict[str, Any]:
    return {
        "dry_run": dry_run,
        "boundary_before": done.boundary_before,
        "boundary": done.boundary,
        "versions": list(done.versions),
        "n_objects": dict(done.n_objects),
        "n_bytes": dict(done.n_bytes),
        "n_total_bytes": sum(done.n_bytes.values()),
        "keys": list(done.keys),
        "kept": [{"boundary": bound.boundary, "why": bound.why} for bound in done.kept],
    }


def _text(done: Collected, dry_run: bool) -> Text:
    lines = [_gone_text(done, "would be deleted" if dry_run else "deleted")]
    for kind, n_objects in done.n_objects.items():
        lines.append(f"  {n_objects:,} {kind} objects, {bytes_text(done.n_bytes[kind])}")
    lines.append(f"versions from {done.boundary} on stay")
    shown = Text("\n".join(lines))
    for bound in done.kept:
        shown.append("\n  ").append_text(printable(f"from {bound.boundary}: {bound.why}"))
    return shown


def _gone_text(done: Collected, verb: str) -> str:
    if not done.keys:
        return f"nothing {verb}"
    total = bytes_text(sum(done.n_bytes.values()))
    n_versions = len(done.versions)
    versions = "1 version" if n_versions == 1 else f"{n_versions:,} versions"
    if done.versions:
        versions += f" ({min(done.versions)} to {max(done.versions)})"
    return f"{verb}: {versions}, {len(done.keys):,} objects, {total}"
