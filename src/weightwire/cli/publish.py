"""``weightwire publish``: a checkpoint on disk becomes the next version of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from weightwire.checkpoint import Checkpoint
from weightwire.cli.baseline_folder import default_folder, open_baseline
from weightwire.cli.event_sinks import MetricsFile, open_sinks
from weightwire.cli.metered import MeteredState, MeteredStore
from weightwire.cli.numbers import bytes_text, ratio, share_text
from weightwire.cli.options import STATE_HELP, AsJson, CodecName, StoreIn, Threads
from weightwire.cli.summary import two_columns
from weightwire.cli.terminal import Terminal, open_terminal, warnings_as_notes
from weightwire.events import Published
from weightwire.publisher import Publisher
from weightwire.store.counting import CountingStore
from weightwire.store.extras import AnchorPolicy
from weightwire.store.open import open_store
from weightwire.trust.keys import SigningKey


def publish_command(
    context: typer.Context,
    store: StoreIn,
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help=STATE_HELP)],
    key: Annotated[
        Path | None, typer.Option("--key", metavar="FILE", help="Sign with this private key.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline", metavar="DIR", help="Where the last version is kept; a cache by default."
        ),
    ] = None,
    codec: Annotated[
        CodecName, typer.Option(help="compact: smallest. plain: readable without the base.")
    ] = CodecName.compact,
    anchor_every: Annotated[
        int, typer.Option("--anchor-every", min=1, metavar="N", help="Versions between anchors.")
    ] = AnchorPolicy.every,
    step: Annotated[
        int | None, typer.Option("--step", min=0, metavar="N", help="The training step it is of.")
    ] = None,
    threads: Threads = None,
    metrics_file: MetricsFile = None,
    as_json: AsJson = False,
) -> None:
    """Publish CHECKPOINT as the next version of the run in STORE, and begin the run if there is none.

    The first version is sent whole, with the files beside the weights; later ones as patches
    against a local copy of the last version. If that copy is missing or old, it is rebuilt from
    the store. Whoever published before is fenced by this version.
    """
    with (
        open_terminal(context, as_json=as_json) as terminal,
        warnings_as_notes(context, terminal.note),
        Checkpoint.open(checkpoint) as state,
        open_baseline(baseline or default_folder(store), checkpoint, terminal.note) as folder,
    ):
        began = time.perf_counter()
        counted = CountingStore(open_store(store))
        with open_sinks(counted, metrics_file) as sink:
            published = _publish(
                terminal,
                state,
                counted,
                step,
                key=SigningKey.load(key) if key else None,
                baseline=folder,
                companions=state.place.folder,
                codec=codec.value,
                anchors=AnchorPolicy(every=anchor_every),
                n_threads=threads,
                on_published=sink,
            )
        fields = _fields(published, store, time.perf_counter() - began)
        terminal.show(fields, _text(fields))


def _publish(
    terminal: Terminal, state: Checkpoint, store: CountingStore, step: int | None, **options: Any
) -> Published:
    n_bytes = sum(spec.n_bytes for spec in state.specs.values())
    metered = MeteredStore(store, terminal.display.stage, n_bytes)
    live = MeteredState(state, terminal.display.stage("read", n_bytes))
    # Skip patches start from versions an earlier call published: nothing is kept of those here.
    with Publisher(metered, live, claim="with the first version", skips=(), **options) as publisher:
        published = publisher.publish(step=step).result()
        publisher.wait()
    return published


def _fields(published: Published, store: str, seconds: float) -> dict[str, Any]:
    return {
        "store": store,
        "version": published.version,
        "step": published.step,
        "epoch": published.epoch,
        "digest": published.digest,
        "n_elements": published.n_elements,
        "n_changed": published.n_changed,
        "density": published.density,
        "n_bytes": published.n_bytes,
        "n_full_bytes": published.n_state_bytes,
        "times_smaller": ratio(published.n_state_bytes, published.n_bytes),
        "read_s": published.read_s,
        "commit_s": published.commit_s,
        "seconds": seconds,
    }


def _text(fields: dict[str, Any]) -> Table:
    return two_columns(
        {
            "version": f"{fields['version']} (epoch {fields['epoch']})",
            "changed": f"{fields['n_changed']:,} of {fields['n_elements']:,}"
            f" ({share_text(fields['density'])})",
            "size": _size_text(fields),
            "digest": fields["digest"],
            "time": f"{fields['seconds']:.2f} s: {fields['read_s']:.2f} s reading and comparing,"
            f" {fields['commit_s']:.2f} s until it existed",
        }
    )


def _size_text(fields: dict[str, Any]) -> str:
    size, smaller = bytes_text(fields["n_bytes"]), fields["times_smaller"]
    if smaller is None:
        return size
    if smaller <= 1:
        return f"{size}, the full state"
    return f"{size}, {smaller:,.1f}× smaller than full ({bytes_text(fields['n_full_bytes'])})"
