"""``weightwire follow``, in this process and as one that is stopped or killed."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sample_runs import model, names_under, run, save, state_on_disk
from sample_stores import Chain, flip, make_chain

from weightwire.checkpoint import Checkpoint
from weightwire.cli.signals import Signals, Terminated
from weightwire.errors import StoreUnavailable
from weightwire.store.folder import FolderStore
from weightwire.store.retry import RetryPolicy


class Follower:
    """A process that follows, and says so in JSON lines."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "weightwire", "follow", *map(str, arguments), "--json"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def until(self, version: int) -> None:
        """Wait until it says that it has this version, or a later one."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if json.loads(line)["version"] >= version:
                return
        raise AssertionError(self.process.stderr.read() if self.process.stderr else "")

    def end(self, number: signal.Signals) -> int:
        """Send a signal; gives the exit code."""
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def followers() -> Iterator[list[Follower]]:
    """Processes to be ended, whatever happens."""
    started: list[Follower] = []
    yield started
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
        each.process.communicate()


def test_once_brings_the_newest_version_and_its_companions(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 3)
    outcome = run("follow", chain.store, "-o", tmp_path / "out", "--once")
    assert outcome.code == 0, outcome.stderr
    assert outcome.stdout.startswith("version 2: anchor, 2 patches")
    assert state_on_disk(tmp_path / "out") == state_on_disk(chain.checkpoints[2])
    assert "config.json" in names_under(tmp_path / "out")


def test_once_again_fetches_only_what_is_new(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 2)
    out = tmp_path / "out"
    run("follow", chain.store, "-o", out, "--once")
    chain.publish_next()
    said = run("follow", chain.store, "-o", out, "--once", "--json").json
    assert (said["previous"], said["version"], said["was_whole"]) == (1, 2, False)
    again = run("follow", chain.store, "-o", out, "--once", "--json").json
    assert (again["version"], again["n_bytes"], again["n_steps"]) == (2, 0, 0)


def test_until_stops_there_also_where_it_is_there_already(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 3)
    for _ in range(2):
        said = run("follow", chain.store, "-o", tmp_path / "out", "--until", 2, "--json").json
        assert said["version"] == 2


def test_a_second_follower_of_the_same_folder_has_the_same_name(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    for _ in range(2):
        run("follow", chain.store, "-o", tmp_path / "out", "--once")
        chain.publish_next()
    assert len(list(chain.store.glob("receipts/*"))) == 1
    run("follow", chain.store, "-o", tmp_path / "out", "--once", "--worker", "gpu-7")
    assert (chain.store / "receipts" / "gpu-7.json").exists()


@pytest.mark.parametrize("is_begun", [False, True])
def test_once_without_a_version_is_a_clear_error(tmp_path: Path, is_begun: bool) -> None:
    chain = make_chain(tmp_path, 1)
    if is_begun:
        shutil.rmtree(chain.store / "log")
    store = chain.store if is_begun else tmp_path / "nothing"
    outcome = run("follow", store, "-o", tmp_path / "out", "--once", "--json")
    assert (outcome.code, outcome.json["error"]["type"]) == (2, "NotARun")
    assert not (tmp_path / "out").exists()


def test_a_run_that_does_not_exist_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(tmp_path / "run", [])
    n_looks = [0]

    class Late(FolderStore):
        def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            n_looks[0] += 1
            if n_looks[0] == 3:
                chain.publish_beside()
            return super().read(key, start, stop)

    monkeypatch.setattr("weightwire.cli.follow.open_store", lambda url: Late(Path(url)))
    outcome = run("follow", chain.store, "-o", tmp_path / "out", "--until", 0, "--poll", "0.01s")
    assert outcome.code == 0
    assert outcome.stderr.count("waiting") == 1
    assert state_on_disk(tmp_path / "out") == state_on_disk(chain.checkpoints[0])


def test_a_checkpoint_that_is_not_of_the_run_is_not_overwritten(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 2)
    other = save(tmp_path / "other", "sharded", model(9))
    before = state_on_disk(other)
    refused = run("follow", chain.store, "-o", other, "--once", "--json")
    assert (refused.code, refused.json["error"]["type"]) == (2, "OutputExists")
    assert state_on_disk(other) == before
    assert run("follow", chain.store, "-o", other, "--once", "--overwrite").code == 0
    assert state_on_disk(other) == state_on_disk(chain.checkpoints[1])


def test_a_folder_of_something_else_is_not_overwritten_at_all(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "thesis.txt").write_text("all of it")
    for options in ([], ["--overwrite"]):
        outcome = run("follow", chain.store, "-o", tmp_path / "docs", "--once", "--json", *options)
        assert outcome.json["error"]["type"] == "OutputExists"
    assert names_under(tmp_path / "docs") == {"thesis.txt"}


def test_a_cache_saves_the_download(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 2)
    for out in ("one", "two"):
        outcome = run(
            *("follow", chain.store, "-o", tmp_path / out, "--once", "--json"),
            *("--cache", tmp_path / "cache"),
        )
        assert outcome.code == 0, outcome.stderr
    assert outcome.json["n_bytes"] < 3000
    assert state_on_disk(tmp_path / "two") == state_on_disk(chain.checkpoints[1])


def test_a_store_that_was_rolled_back_is_refused_with_a_cache(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 3)
    options = ("--once", "--cache", tmp_path / "cache", "--json")
    run("follow", chain.store, "-o", tmp_path / "out", *options)
    max(chain.store.glob("log/*-commit.json")).unlink()
    outcome = run("follow", chain.store, "-o", tmp_path / "out", *options)
    assert outcome.json["error"]["type"] == "RolledBack"


def test_an_outage_is_noted_once_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(tmp_path, 1)
    n_left = [6]

    class Sometimes(FolderStore):
        def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
            if "commit" in key and n_left[0]:
                n_left[0] -= 1
                raise StoreUnavailable("the line is dead")
            return super().read(key, start, stop)

    monkeypatch.setattr("weightwire.cli.follow.open_store", lambda url: Sometimes(Path(url)))
    monkeypatch.setattr("weightwire.subscriber.RetryPolicy", lambda: RetryPolicy(n_attempts=1))
    outcome = run("follow", chain.store, "-o", tmp_path / "out", "--until", 0, "--poll", "0.01s")
    assert outcome.code == 0, outcome.stderr
    assert n_left == [0]
    assert outcome.stderr.count("the line is dead") == 1
    assert "going on" in outcome.stderr


def test_a_store_that_refuses_ends_it(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    outcome = run("follow", tmp_path / "run", "-o", tmp_path / "out", "--json")
    assert (outcome.code, outcome.json["error"]["type"]) == (2, "NotARun")


def test_a_disk_that_refuses_is_a_typed_error(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 1)
    (tmp_path / "file").write_text("")
    outcome = run("follow", chain.store, "-o", tmp_path / "file" / "out", "--once", "--json")
    assert (outcome.code, outcome.json["error"]["type"]) == (2, "DiskTrouble")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_it_cleanly(
    tmp_path: Path, followers: list[Follower], number: signal.Signals, code: int
) -> None:
    chain = make_chain(tmp_path, 2)
    followers.append(Follower(chain.store, "-o", tmp_path / "out", "--poll", "0.1s"))
    followers[0].until(1)
    assert followers[0].end(number) == code
    assert state_on_disk(tmp_path / "out") == state_on_disk(chain.checkpoints[1])


def test_a_signal_ends_the_wait_for_a_run(tmp_path: Path, followers: list[Follower]) -> None:
    followers.append(Follower(tmp_path / "run", "-o", tmp_path / "out"))
    stderr = followers[0].process.stderr
    assert stderr is not None
    assert "waiting" in stderr.readline()
    assert followers[0].end(signal.SIGTERM) == 0


def test_killed_again_and_again_it_converges(tmp_path: Path, followers: list[Follower]) -> None:
    chain = make_chain(tmp_path, 1)
    out = tmp_path / "out"
    for number in range(3):
        followers.append(Follower(chain.store, "-o", out, "--poll", "0.01s"))
        followers[-1].until(number)
        # It is about to fetch, decode or write this one when it dies.
        chain.publish_next()
        assert followers[-1].end(signal.SIGKILL) == -signal.SIGKILL
    said = run("follow", chain.store, "-o", out, "--once", "--json").json
    assert said["version"] == 3
    assert state_on_disk(out) == state_on_disk(chain.checkpoints[3])


def test_a_signal_waits_for_the_end_of_a_write() -> None:
    steps = []
    with Signals() as signals:
        with signals.deferred():
            signal.raise_signal(signal.SIGTERM)
            steps.append("written")
        steps.append("after")
        signals.check()
        steps.append("never")
    assert steps == ["written", "after"]


def test_a_signal_outside_a_write_comes_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Signals():
        signal.raise_signal(signal.SIGINT)
    with Signals():
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("SIGTERM did not end the block")
    assert signal.getsignal(signal.SIGINT) is before
    assert issubclass(Terminated, BaseException)
    assert not issubclass(Terminated, Exception)


def test_damage_in_the_folder_is_repaired_and_counted(
    tmp_path: Path, followers: list[Follower]
) -> None:
    chain = make_chain(tmp_path, 1)
    out = tmp_path / "out"
    followers.append(Follower(chain.store, "-o", out, "--poll", "0.01s", "--metrics-port", 0))
    process = followers[0].process
    assert process.stderr is not None
    address = process.stderr.readline().removeprefix("metrics: ").strip()
    followers[0].until(0)
    with Checkpoint.open(out) as checkpoint:
        file, offset = checkpoint.location("layer.scale")
    flip(file, offset)
    for number in range(1, 9):
        chain.publish_next()
        followers[0].until(number)
    with urllib.request.urlopen(address) as answer:
        text = answer.read().decode()
    assert "weightwire_heals_total 1.0" in text
    assert "weightwire_active_version 8.0" in text
    followers[0].end(signal.SIGTERM)
    assert state_on_disk(out) == state_on_disk(chain.checkpoints[8])


def test_a_terminal_shows_a_table(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 2)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "weightwire", "follow", str(chain.store), "--until", "1"]
    process = subprocess.Popen(
        [*command, "-o", str(tmp_path / "out")], stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # Linux answers EIO once the other end is closed.
        pass
    finally:
        os.close(ours)
        process.wait()
    assert process.returncode == 0
    assert b"activate" in shown
    assert b"anchor, 1 patch" in shown


def test_a_run_of_many_small_versions_ends_at_the_last(tmp_path: Path) -> None:
    chain = make_chain(tmp_path, 2)
    publisher = threading.Thread(target=lambda: [chain.publish_beside() for _ in range(4)])
    publisher.start()
    outcome = run(
        "follow", chain.store, "-o", tmp_path / "out", "--until", 5, "--poll", "0.01s", "--json"
    )
    publisher.join()
    versions = [json.loads(line)["version"] for line in outcome.stdout.splitlines()]
    assert versions == sorted(set(versions))
    assert versions[-1] == 5
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert np.array_equal(checkpoint.read("steps", 0, 1), np.array([7], np.uint64))
