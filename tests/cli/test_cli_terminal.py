"""What goes where: results, progress, errors, exit codes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sample_runs import make_pair, run, save

import weightwire
from weightwire.cli import app, digest
from weightwire.cli.numbers import bytes_text, share_text
from weightwire.cli.progress import Lines
from weightwire.errors import RetryError, StopError

COMMANDS = (
    "diff",
    "apply",
    "inspect",
    "verify",
    "merge",
    "digest",
    "publish",
    "follow",
    "log",
    "gc",
)


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process."""
    command = [sys.executable, "-m", "weightwire", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_process_prints_its_version() -> None:
    done = start("--version")
    assert done.stdout == f"weightwire {weightwire.__version__}\n"
    assert done.returncode == 0


def test_a_process_keeps_results_and_progress_apart(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    done = start("verify", pair.target, pair.patch, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["is_target"]
    assert "verify: 100%" in done.stderr


def test_a_process_fails_with_lines_not_a_traceback(tmp_path: Path) -> None:
    done = start("digest", tmp_path / "nowhere")
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("what to do: stop")
    assert len(lines) == 2


def test_quiet_says_nothing_but_the_result(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    outcome = run("--quiet", "digest", pair.base)
    assert outcome.stderr == ""
    assert outcome.stdout


def test_verbose_shows_where_an_error_arose(tmp_path: Path) -> None:
    outcome = run("--verbose", "digest", tmp_path / "nowhere")
    assert "Traceback" in outcome.stderr
    assert "error: " in outcome.stderr


def test_bars_are_drawn_on_a_terminal(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "weightwire", "digest", str(pair.base)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # Linux answers EIO once the other end is closed.
        pass
    finally:
        os.close(ours)
        stdout, _ = process.communicate()
    assert "━".encode() in shown
    assert len(stdout.strip()) == 32


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_teaches_with_an_example(command: str) -> None:
    assert f"Example: weightwire {command}" in " ".join(run(command, "--help").stdout.split())


@pytest.mark.parametrize(("kind", "remedy"), [(RetryError, "retry"), (StopError, "stop")])
def test_every_error_class_has_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], remedy: str
) -> None:
    def fail(path: Path) -> None:
        raise kind(f"{path}: \x1b[31m[red]no")

    monkeypatch.setattr(digest.Checkpoint, "open", fail)
    outcome = run("digest", tmp_path, "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["remedy"] == remedy
    assert "\x1b" not in outcome.stderr
    assert "\\x1b[31m[red]no" in outcome.stderr


def test_a_refusal_of_the_operating_system_is_one_error(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    (tmp_path / "file").write_text("")
    outcome = run("diff", pair.base, pair.target, "-o", tmp_path / "file" / "patch", "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["remedy"] == "stop"


def test_an_interrupt_exits_with_130_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(tmp_path)

    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("weightwire.cli.diff.diff_states", interrupt)
    # Shells have what they start in the background ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = run("diff", pair.base, pair.target, "-o", tmp_path / "again")
    finally:
        signal.signal(signal.SIGINT, before)
    assert outcome.code == 130
    assert {path.name for path in tmp_path.iterdir()} == {"base", "target", "patch"}


def test_names_from_files_cannot_style_the_terminal(tmp_path: Path) -> None:
    path = save(tmp_path / "x", "file", {"[bold]\x1b[2Jw[/bold]": np.ones(3, np.float32)})
    text = run("digest", path, "--tensors").stdout
    assert "\x1b" not in text
    assert "[bold]\\x1b[2Jw[/bold]" in text


def test_lines_come_every_tenth_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    advance = Lines(lambda: now[0]).stage("diff", 1000)
    for _ in range(100):
        now[0] += 0.1
        advance(10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "diff: 10%, 100 B of 1.00 kB, 100 B/s"
    assert lines[-1].startswith("diff: 100%")


def test_lines_do_not_flood_a_fast_run(capsys: pytest.CaptureFixture[str]) -> None:
    advance = Lines(lambda: 0.0).stage("diff", 1000)
    for _ in range(100):
        advance(10)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_lines_come_every_few_seconds_of_a_slow_run(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    advance = Lines(lambda: now[0]).stage("diff", 1 << 40)
    for _ in range(20):
        now[0] += 1.0
        advance(1)
    assert len(capsys.readouterr().err.splitlines()) == 4


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_600, "1.00 MB"), (4.2e9, "4.20 GB")],
)
def test_sizes_read_well(n_bytes: float, text: str) -> None:
    assert bytes_text(n_bytes) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0.0, "0.00%"), (0.0123, "1.23%"), (0.000012, "0.0012%"), (1.0, "100.00%")]
)
def test_shares_read_well(share: float, text: str) -> None:
    assert share_text(share) == text


def test_the_app_has_a_name() -> None:
    assert app.info.name == "weightwire"
