"""Peak memory and time of the commands that read whole checkpoints, each in a process of its own.

    python benchmarks/memory.py --megabytes 4000

generates a checkpoint and its next version, runs the commands, prints a table and cleans up. This
script imports nothing large: a child's peak includes what its parent had at the fork.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

MAKE = Path(__file__).with_name("make_checkpoint.py")


@dataclass(frozen=True)
class Run:
    """One command's peak resident memory and time."""

    command: str
    n_peak_bytes: int
    seconds: float
    n_progress_lines: int


class CommandFailed(RuntimeError):
    """A command under measurement did not exit with 0."""


def measure(name: str, *arguments: str | Path) -> Run:
    """Run ``weightwire`` with these arguments.

    Raises:
        CommandFailed: it failed; the message is what it wrote to stderr.
    """
    command = [sys.executable, "-m", "weightwire", *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as log:
        began = time.perf_counter()
        # Not waited for through Popen: only wait4 gives the peak of this one child.
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        lines = log.read().splitlines()
    if process.returncode:
        raise CommandFailed(f"{name}: exit code {process.returncode}: {' '.join(lines)}")
    return Run(name, usage.ru_maxrss * 1024, seconds, len(lines))


def measure_files(folder: Path) -> list[Run]:
    """The commands on files, on the pair in ``folder``; the base becomes the next version."""
    base, new, patch, out = (folder / name for name in ("base", "next", "patch", "out"))
    return [
        measure("digest", "digest", base),
        measure("diff", "diff", base, new, "-o", patch),
        measure("inspect --by-class", "inspect", patch, "--by-class"),
        measure("inspect --base", "inspect", patch, "--base", base),
        measure("apply -o", "apply", base, patch, "-o", out),
        measure("verify", "verify", out, patch),
        measure("apply --in-place", "apply", base, patch, "--in-place"),
        measure("diff --codec plain", "diff", out, new, "-o", folder / "p", "--codec", "plain"),
    ]


def measure_run(folder: Path) -> list[Run]:
    """The commands of a run: first version, next version, lost baseline, a newcomer, a check."""
    old, new, store, kept = (folder / name for name in ("base", "next", "run", "baseline"))
    options = ("--baseline", kept)
    runs = [
        measure("publish, first", "publish", store, old, *options),
        measure("publish, next", "publish", store, new, *options),
        measure("publish, no baseline", "publish", store, old, "--baseline", folder / "lost"),
        measure("follow --once", "follow", store, "-o", folder / "followed", "--once"),
        measure("verify STORE", "verify", store),
    ]
    return [*runs, measure("verify STORE --deep", "verify", store, "--deep")]


def print_table(runs: list[Run]) -> None:
    """The result as Markdown."""
    print("| command | peak memory, MB | seconds |")
    print("|---|---:|---:|")
    for run in runs:
        print(f"| {run.command} | {run.n_peak_bytes / 1e6:.0f} | {run.seconds:.1f} |")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--megabytes", type=int, default=4000)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--folder", type=Path, help="where to put the files; cleaned up after")
    parser.add_argument("--commands", choices=("all", "files", "run"), default="all")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        size = ["--megabytes", str(options.megabytes), "--hidden", str(options.hidden)]
        subprocess.run([sys.executable, str(MAKE), str(folder / "pair"), *size], check=True)
        runs = measure_run(folder / "pair") if options.commands != "files" else []
        runs += measure_files(folder / "pair") if options.commands != "run" else []
    if options.json:
        print(json.dumps([asdict(run) for run in runs]))
    else:
        print_table(runs)


if __name__ == "__main__":
    main()
