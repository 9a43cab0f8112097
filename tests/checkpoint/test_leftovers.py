"""What a killed writer leaves is removed by the next one, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sample_checkpoints import FORMS, read_state, sample_arrays, write_sample

from weightwire.checkpoint import Checkpoint, write_checkpoint
from weightwire.checkpoint.file_names import temporary_owner, temporary_sibling
from weightwire.checkpoint.leftovers import LEFTOVER_AGE_S, remove_leftovers

WRITTEN = 1_000_000_000.0
LONG_AFTER = WRITTEN + LEFTOVER_AGE_S + 1

KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from weightwire.checkpoint import Checkpoint, write_checkpoint

def resolve(name, start, stop):
    os.kill(os.getpid(), signal.SIGKILL)

with Checkpoint.open(Path(sys.argv[1])) as base:
    write_checkpoint(Path(sys.argv[2]), base, base.specs, resolve)
"""


def dead_process() -> int:
    """A process number that was given out and is free again."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def leftover(out: Path, owner: int, *, suffix: str = ".tmp", token: str = "0123abcd") -> Path:
    """A folder as a writer leaves it: last written at ``WRITTEN``."""
    folder = out.with_name(f".{out.name}.weightwire-{owner}-{token}{suffix}")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half")
    for path in (folder / "model.safetensors", folder):
        os.utime(path, (WRITTEN, WRITTEN))
    return folder


def rewrite(base_path: Path, out: Path, now: float) -> None:
    with Checkpoint.open(base_path) as base:
        write_checkpoint(out, base, base.specs, base.read, clock=lambda: now)


@pytest.mark.parametrize("form", FORMS)
def test_the_next_write_removes_what_kill_9_left(tmp_path: Path, form: str) -> None:
    base = write_sample(tmp_path, form, sample_arrays())
    out = tmp_path / ("out.safetensors" if form == "file" else "out")
    killed = subprocess.run([sys.executable, "-c", KILLED_WRITER, base, out], check=False)
    (left,) = tmp_path.glob(".out*.weightwire-*.tmp")
    assert killed.returncode == -9
    now = max(path.stat().st_mtime for path in (left, *left.rglob("*")))
    rewrite(base, out, now + LEFTOVER_AGE_S + 1)
    assert not left.exists()
    assert read_state(out) == read_state(base)


def test_a_leftover_is_kept_for_an_hour_after_its_last_byte(tmp_path: Path) -> None:
    left = leftover(tmp_path / "out", dead_process())
    os.utime(left / "model.safetensors", (LONG_AFTER, LONG_AFTER))
    remove_leftovers(tmp_path / "out", lambda: LONG_AFTER + LEFTOVER_AGE_S)
    assert left.exists()
    remove_leftovers(tmp_path / "out", lambda: LONG_AFTER + LEFTOVER_AGE_S + 1)
    assert not left.exists()


def test_what_a_live_process_writes_is_kept_however_old(tmp_path: Path) -> None:
    left = [leftover(tmp_path / "out", owner) for owner in (os.getpid(), 1)]
    remove_leftovers(tmp_path / "out", lambda: LONG_AFTER)
    assert all(folder.exists() for folder in left)


def test_only_leftovers_of_the_same_output_are_removed(tmp_path: Path) -> None:
    out, owner = tmp_path / "out", dead_process()
    kept = [
        leftover(tmp_path / "out2", owner),
        leftover(tmp_path / "other", owner),
        leftover(tmp_path / "ou.", owner),
        leftover(out, owner, suffix=".old"),
        leftover(out, owner, token="mine"),
    ]
    left = leftover(out, owner)
    remove_leftovers(out, lambda: LONG_AFTER)
    assert not left.exists()
    assert all(folder.exists() for folder in kept)


def test_a_leftover_that_is_a_link_goes_and_its_target_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    link = tmp_path / f".out.weightwire-{dead_process()}-0123abcd.tmp"
    link.symlink_to(tmp_path / "precious")
    remove_leftovers(tmp_path / "out", lambda: link.lstat().st_mtime + LEFTOVER_AGE_S + 1)
    assert not link.is_symlink()
    assert (tmp_path / "precious").is_dir()


def test_a_leftover_that_cannot_be_removed_does_not_stop_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_sample(tmp_path, "folder", sample_arrays())
    left = leftover(tmp_path / "out", dead_process())

    def refuse(path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr("weightwire.checkpoint.leftovers.remove", refuse)
    rewrite(base, tmp_path / "out", LONG_AFTER)
    assert left.exists()
    assert read_state(tmp_path / "out") == read_state(base)


def test_a_temporary_name_tells_its_owner_and_no_other_name_does(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert temporary_owner(temporary_sibling(out).name, out) == os.getpid()
    assert temporary_owner(temporary_sibling(out, ".old").name, out) is None
    assert temporary_owner(".out.weightwire-0-0123abcd.tmp", out) is None
    assert temporary_owner(f".out.weightwire-{10**30}-0123abcd.tmp", out) is None
