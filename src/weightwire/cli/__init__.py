"""The command line: one file per command, results on stdout, everything else on stderr."""

from __future__ import annotations

from typing import Annotated

import typer

from weightwire.cli.apply import apply_command
from weightwire.cli.bench import bench_app
from weightwire.cli.demo import demo_command
from weightwire.cli.diff import diff_command
from weightwire.cli.digest import digest_command
from weightwire.cli.follow import follow_command
from weightwire.cli.gc import gc_command
from weightwire.cli.inspect import inspect_command
from weightwire.cli.keygen import keygen_command
from weightwire.cli.log import log_command
from weightwire.cli.merge import merge_command
from weightwire.cli.publish import publish_command
from weightwire.cli.sidecar import sidecar_command
from weightwire.cli.terminal import Settings, show_log
from weightwire.cli.verify import verify_command

__all__ = ["app", "main"]

_ABOUT = """Bit-exact sparse patches between versions of a model's weights.

A state is a Hugging Face checkpoint folder or one .safetensors file; a patch is a folder."""

app = typer.Typer(
    name="weightwire",
    help=_ABOUT,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def main() -> None:
    """Run the command line."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        from weightwire import __version__

        typer.echo(f"weightwire {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: weightwire diff step-1/ step-2/ -o step-2.patch")
def _global_options(
    context: typer.Context,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log to stderr; show where errors arose.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version
    context.obj = Settings(quiet=quiet, verbose=verbose)
    if verbose:
        show_log()


def _add(command: object, name: str, example: str) -> None:
    app.command(name, epilog=f"Example: {example}")(command)  # type: ignore[type-var]


_add(diff_command, "diff", "weightwire diff step-1/ step-2/ -o step-2.patch")
_add(apply_command, "apply", "weightwire apply step-1/ step-2.patch -o step-2/")
_add(verify_command, "verify", "weightwire verify step-2/ step-2.patch")
_add(inspect_command, "inspect", "weightwire inspect step-2.patch --by-class")
_add(merge_command, "merge", "weightwire merge --base step-1/ 2.patch 3.patch -o 1-to-3.patch")
_add(digest_command, "digest", "weightwire digest step-2/")
_add(publish_command, "publish", "weightwire publish s3://bucket/run-7 step-2/ --key run.key")
_add(follow_command, "follow", "weightwire follow s3://bucket/run-7 -o current/ --once")
_add(sidecar_command, "sidecar", "weightwire sidecar s3://bucket/run-7 http://127.0.0.1:8000")
_add(log_command, "log", "weightwire log s3://bucket/run-7 --limit 20")
_add(gc_command, "gc", "weightwire gc s3://bucket/run-7 --keep 32 --keep-age 2d --dry-run")
_add(keygen_command, "keygen", "weightwire keygen -o run.key")
_add(demo_command, "demo", "weightwire demo --steps 30 --link 100mbit,80ms")
app.add_typer(bench_app, name="bench")
