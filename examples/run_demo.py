"""A trainer and two engines with a store between them: the second half of the demo.

The trainer is this process: fp32 masters take small steps and are published as bf16. The engines are
``weightwire follow`` processes that keep a checkpoint folder current. One of them is killed half way
and started again; nobody tells it where it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import weightwire as ww
from weightwire.bench.generate import draw_masters, draw_steps, format_of, random_source, rate_for
from weightwire.checkpoint import Checkpoint
from weightwire.model import dtype_named

N_VERSIONS = 12
N_TENSORS, N_ELEMENTS = 8, 1 << 20
KILL_AT = 5
WORKERS = ("engine-1", "engine-2")
FORM = format_of(dtype_named("BF16"))


class Trainer:
    """Masters in fp32 and what is published of them."""

    def __init__(self) -> None:
        self._sources = [random_source(11, number) for number in range(N_TENSORS)]
        self._masters = [draw_masters(source, N_ELEMENTS, FORM) for source in self._sources]
        self._rate = rate_for(FORM, 0.01, 11, N_TENSORS)
        self.published = {
            f"layers.{n}.weight": master.astype(FORM.float_type)
            for n, master in enumerate(self._masters)
        }

    def step(self) -> None:
        """One optimizer step."""
        for source, master, weight in zip(
            self._sources, self._masters, self.published.values(), strict=True
        ):
            np.add(master, draw_steps(source, len(master), self._rate), out=master)
            weight[:] = master.astype(FORM.float_type)


class Worker:
    """A ``weightwire follow`` process and what it said."""

    def __init__(self, name: str, store: Path, root: Path) -> None:
        self.name, self.folder = name, root / name
        self._log = root / f"{name}.jsonl"
        beside = Path(sys.executable).with_name("weightwire")
        self._command = [str(beside) if beside.exists() else "weightwire", "--quiet", "follow"]
        self._command += [str(store), "-o", str(self.folder), "--worker", name, "--json"]
        self._command += [
            "--until",
            str(N_VERSIONS),
            "--poll",
            "0.1",
            "--cache",
            f"{self.folder}.cache",
        ]
        self.start()

    def start(self) -> None:
        """Begin, or begin again."""
        with self._log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=log)

    def kill(self) -> None:
        """As the kernel does when memory runs out."""
        self._process.kill()
        self._process.wait()

    def wait(self) -> None:
        """Until it holds the last version."""
        if self._process.wait():
            raise SystemExit(f"{self.name} failed with exit code {self._process.returncode}")

    def versions(self) -> Iterator[dict[str, float]]:
        """What it activated; a killed process may leave half a line."""
        for line in self._log.read_text().splitlines():
            if line.startswith("{") and line.endswith("}"):
                yield json.loads(line)


def show_run(console: Console, root: Path) -> int:
    """Publish, follow, kill, recover; gives the number of versions proven on every worker."""
    store = root / "run"
    trainer, digests = Trainer(), {}
    table = Table(box=None, title=None)
    for title in ("version", "changed", "patch", "of full", "read", "commit"):
        table.add_column(title, justify="right")
    with ww.Publisher(store, trainer.published) as publisher:
        publisher.publish().result()
        workers = [Worker(name, store, root) for name in WORKERS]
        for version in range(1, N_VERSIONS + 1):
            trainer.step()
            done = publisher.publish().result()
            digests[version] = done.digest
            add_row(table, done)
            if version == KILL_AT:
                workers[1].kill()
            if version == KILL_AT + 3:
                workers[1].start()
        for worker in workers:
            worker.wait()
    console.print(table)
    return show_workers(console, workers, trainer, digests)


def add_row(table: Table, done: ww.Published) -> None:
    """One version."""
    table.add_row(
        str(done.version),
        f"{done.density:.2%}",
        f"{done.n_bytes / 1e3:,.0f} kB",
        f"1/{done.n_state_bytes / max(done.n_bytes, 1):.0f}",
        f"{done.read_s * 1e3:.0f} ms",
        f"{done.commit_s * 1e3:.0f} ms",
    )


def show_workers(
    console: Console, workers: list[Worker], trainer: Trainer, digests: dict[int, str]
) -> int:
    """What every engine did, and whether it holds exactly what was published."""
    n_proven = 0
    for worker in workers:
        seen = {int(each["version"]): each for each in worker.versions()}
        wrong = [v for v, each in seen.items() if v in digests and each["digest"] != digests[v]]
        with Checkpoint.open(worker.folder) as checkpoint:
            same = all(
                checkpoint.read(name, 0, N_ELEMENTS).tobytes() == weight.view(np.uint16).tobytes()
                for name, weight in trainer.published.items()
            )
        if wrong or not same:
            raise SystemExit(f"{worker.name} does not hold what was published")
        n_proven += len(seen)
        n_bytes = sum(each["n_bytes"] for each in seen.values())
        killed = f", killed at {KILL_AT} and started again" if worker is workers[1] else ""
        console.print(
            f"{worker.name}: {len(seen)} updates to version {max(seen)}, {n_bytes / 1e6:.1f} MB"
            f" fetched{killed}; [green]bit for bit the trainer's weights[/]"
        )
    return n_proven
