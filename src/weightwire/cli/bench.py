"""``weightwire bench``: how small and how fast, here and now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from weightwire.cli.options import AsJson, Threads
from weightwire.cli.terminal import open_terminal

if TYPE_CHECKING:
    from weightwire.bench import BenchReport

bench_app = typer.Typer(help="Measure sizes and speeds on this machine.", no_args_is_help=True)
_DEFAULT_ELEMENTS = 1 << 24


@bench_app.callback()
def _bench() -> None:
    """Measure sizes and speeds on this machine."""


@bench_app.command("codec", epilog="Example: weightwire bench codec --quick")
def codec_command(
    context: typer.Context,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="A recorded chain of versions.")
    ] = None,
    elements: Annotated[
        int, typer.Option(min=1, help="Elements of each generated case.")
    ] = _DEFAULT_ELEMENTS,
    threads: Threads = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes, one repetition.")] = False,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the tables here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw them: .png, .svg, .pdf.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Race Weightwire's codecs against six published encodings on the same tensors."""
    from weightwire.bench import run_codec_bench, to_json, to_markdown

    with open_terminal(context, as_json=as_json) as terminal:
        report = run_codec_bench(data, elements, threads, quick, progress=terminal.note)
        _save(report, markdown, plot)
        terminal.show(json.loads(to_json(report)), Text(to_markdown(report)))


def _save(report: BenchReport, markdown: Path | None, plot: Path | None) -> None:
    from weightwire.bench import save_plot, to_markdown

    if markdown is not None:
        markdown.write_text(to_markdown(report), encoding="utf-8")
    if plot is not None:
        save_plot(report, plot)
