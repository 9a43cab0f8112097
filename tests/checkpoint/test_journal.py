"""In-place overwriting: all or nothing, whatever dies, and whenever."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mortal_disk import LOSSES, CommitOnlyDisk, Crash, Loss, MortalDisk
from safetensors.numpy import save_file
from sample_checkpoints import (
    FORMS,
    SHARDS,
    Arrays,
    changed,
    changes_between,
    files_under,
    read_state,
    sample_arrays,
    state_of,
    write_sample,
)

from weightwire.checkpoint import Checkpoint, journal_file, overwrite_in_place, recover, replay
from weightwire.container import build_header
from weightwire.errors import (
    HashMismatch,
    InterruptedApply,
    LimitExceeded,
    MalformedRecord,
    MissingTensor,
    TruncatedFile,
    UnsupportedLayout,
    WeightwireError,
)
from weightwire.model import Changes, TensorSpec, dtype_named

OLD = sample_arrays()
NEW = changed(OLD)
CHANGES = changes_between(OLD, NEW)
JOURNALS = {"file": ".base.safetensors.weightwire-journal"}
IN_FOLDER = ".weightwire-journal"


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many records and many windows, so that there are many places to die."""
    monkeypatch.setattr(journal_file, "RECORD_CHANGES", 150)
    monkeypatch.setattr(replay, "WINDOW_BYTES", 512)


def die(path: Path, n_effects: float, loss: Loss = "nothing") -> int:
    """Apply OLD → NEW on a disk that dies; return how many effects happened."""
    disk = MortalDisk(n_effects)
    with contextlib.suppress(Crash):
        overwrite_in_place(path, CHANGES, proof="NEW", disk=disk)
    disk.cut_power(loss, seed=int(min(n_effects, 1 << 20)))
    return disk.n_done


def commit_only(path: Path, changes: list[tuple[str, Changes]], proof: str = "NEW") -> Path:
    """Leave a committed journal behind, with nothing replayed yet."""
    disk = CommitOnlyDisk()
    before = set(path.parent.rglob("*"))
    with pytest.raises(Crash):
        overwrite_in_place(path, changes, proof=proof, disk=disk)
    disk.cut_power("nothing", 0)
    (journal,) = set(path.parent.rglob("*")) - before
    return journal


def state_if_readable(path: Path) -> dict[str, bytes] | None:
    try:
        return read_state(path)
    except InterruptedApply:
        return None


@pytest.mark.parametrize("form", FORMS)
def test_changed_elements_and_nothing_else_are_overwritten(tmp_path: Path, form: str) -> None:
    path = write_sample(tmp_path, form, OLD)
    (tmp_path / "expected").mkdir()
    expected = files_under(write_sample(tmp_path / "expected", form, NEW).parent)
    overwrite_in_place(path, CHANGES, proof="NEW")
    found = files_under(tmp_path)
    assert {name: found[name] for name in expected} == expected
    assert len(found) == 2 * len(expected)


@pytest.mark.parametrize("form", FORMS)
def test_small_records_and_windows_give_the_same_bytes(
    tmp_path: Path, form: str, small_steps: None
) -> None:
    path = write_sample(tmp_path, form, OLD)
    overwrite_in_place(path, CHANGES, proof="NEW")
    assert read_state(path) == state_of(NEW)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("form", FORMS)
def test_a_crash_at_any_effect_recovers_to_the_old_or_the_new_state(
    tmp_path: Path, form: str, loss: Loss, small_steps: None
) -> None:
    old, new = state_of(OLD), state_of(NEW)
    (tmp_path / "whole").mkdir()
    n_effects = die(write_sample(tmp_path / "whole", form, OLD), float("inf"))
    was_new = False
    for n_good in range(n_effects):
        (tmp_path / str(n_good)).mkdir()
        path = write_sample(tmp_path / str(n_good), form, OLD)
        names = set(files_under(tmp_path / str(n_good)))
        die(path, n_good, loss)
        assert state_if_readable(path) in (None, old, new)
        done = recover(path)
        state = read_state(path)
        assert state in (old, new)
        assert not done or (state == new and done[0].proof == "NEW")
        assert set(files_under(tmp_path / str(n_good))) == names
        assert not (was_new and state == old), "committed, then lost by dying later"
        was_new = state == new
    assert was_new


@pytest.mark.parametrize("loss", ["some data", "everything"])
def test_a_crash_at_any_effect_of_the_recovery_is_recovered_too(
    tmp_path: Path, loss: Loss, small_steps: None
) -> None:
    path = write_sample(tmp_path, "sharded", OLD)
    commit_only(path, CHANGES)
    start = files_under(tmp_path)
    for n_good in range(1000):
        for name, content in start.items():
            (tmp_path / name).write_bytes(content)
        disk = MortalDisk(n_good)
        try:
            recover(path, disk=disk)
            break
        except Crash:
            disk.cut_power(loss, n_good)
        recover(path)
        assert read_state(path) == state_of(NEW)
    assert n_good > 10


@pytest.mark.parametrize("n_effects", [3, 14, 16, 18])
def test_kill_9_is_survived(tmp_path: Path, n_effects: int) -> None:
    path = write_sample(tmp_path, "sharded", OLD)
    script = (
        "import os, signal, sys\n"
        "import test_journal, mortal_disk\n"
        "def kill(self): os.kill(os.getpid(), signal.SIGKILL)\n"
        "mortal_disk.Crash.__init__ = kill\n"
        f"test_journal.die(test_journal.Path({str(path)!r}), {n_effects})\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    died = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    recover(path)
    assert read_state(path) in (state_of(OLD), state_of(NEW))


def test_changes_may_be_decoded_lazily_from_the_same_checkpoint(tmp_path: Path) -> None:
    path = write_sample(tmp_path, "sharded", OLD)

    def increments(checkpoint: Checkpoint) -> Iterator[tuple[str, Changes]]:
        for name, spec in checkpoint.specs.items():
            bits = checkpoint.read(name, 0, spec.n_elements)
            yield name, Changes(np.arange(len(bits), dtype=np.uint64), bits + bits.dtype.type(1))

    with Checkpoint.open(path) as checkpoint:
        overwrite_in_place(path, increments(checkpoint), proof="")
    assert read_state(path) == state_of({name: array + 1 for name, array in OLD.items()})


@pytest.mark.parametrize("form", FORMS)
def test_what_the_source_of_changes_raises_leaves_no_trace(tmp_path: Path, form: str) -> None:
    path = write_sample(tmp_path, form, OLD)
    before = files_under(tmp_path)

    def failing() -> Iterator[tuple[str, Changes]]:
        yield CHANGES[0]
        raise WeightwireError("from the codec")

    with pytest.raises(WeightwireError, match="codec"):
        overwrite_in_place(path, failing(), proof="NEW")
    assert files_under(tmp_path) == before


def some(positions: list[int], bits: list[int], dtype: str = "u4") -> Changes:
    return Changes(np.array(positions, np.uint32), np.array(bits, dtype))


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [
        ("ghost", some([0], [1]), MissingTensor),
        ("a.scale", some([7], [1]), MalformedRecord),
        ("a.scale", some([2, 1], [1, 1]), MalformedRecord),
        ("a.scale", some([2, 2], [1, 1]), MalformedRecord),
        ("a.scale", some([1, 2], [1]), MalformedRecord),
        ("a.scale", some([1], [1], "u2"), MalformedRecord),
        ("a.scale", some([1], [1], "f4"), MalformedRecord),
        ("a.scale", Changes(np.array([-1]), np.array([1], np.uint32)), MalformedRecord),
        ("b.empty", some([0], [1], "u2"), MalformedRecord),
    ],
)
def test_changes_that_do_not_fit_are_refused_and_nothing_is_written(
    tmp_path: Path, name: str, changes: Changes, error: type[Exception]
) -> None:
    path = write_sample(tmp_path, "sharded", OLD)
    before = files_under(tmp_path)
    with pytest.raises(error, match=name):
        overwrite_in_place(path, [CHANGES[0], (name, changes)], proof="NEW")
    assert files_under(tmp_path) == before


def test_a_proof_beyond_the_cap_is_refused(tmp_path: Path) -> None:
    path = write_sample(tmp_path, "file", OLD)
    with pytest.raises(LimitExceeded, match="proof"):
        overwrite_in_place(path, [], proof="x" * 5000)
    assert sorted(files_under(tmp_path)) == ["base.safetensors"]


@pytest.mark.parametrize("form", FORMS)
def test_a_second_apply_waits_for_recovery(tmp_path: Path, form: str) -> None:
    path = write_sample(tmp_path, form, OLD)
    journal = commit_only(path, CHANGES)
    assert journal.name == JOURNALS.get(form, IN_FOLDER)
    with pytest.raises(InterruptedApply, match="recover"):
        overwrite_in_place(path, CHANGES, proof="NEW")
    assert [each.proof for each in recover(path)] == ["NEW"]
    assert recover(path) == ()
    assert read_state(path) == state_of(NEW)


def test_recovery_through_a_shard_finishes_the_whole_folder(tmp_path: Path) -> None:
    path = write_sample(tmp_path, "sharded", OLD)
    commit_only(path, CHANGES)
    assert len(recover(path / SHARDS[1])) == 1
    assert read_state(path) == state_of(NEW)


def test_recovery_of_a_folder_finishes_its_shards(tmp_path: Path) -> None:
    path = write_sample(tmp_path, "sharded", OLD)
    parts = [[each for each in CHANGES if each[0].startswith(shard)] for shard in ("a", "b")]
    for shard, part in zip(SHARDS, parts, strict=True):
        commit_only(path / shard, part, proof=shard)
    assert [each.proof for each in recover(path)] == list(SHARDS)
    assert read_state(path) == state_of(NEW)


@pytest.mark.parametrize("place", [0, 9, 40, 1000, -40, -1])
def test_a_damaged_journal_is_not_replayed(tmp_path: Path, place: int) -> None:
    path = write_sample(tmp_path, "sharded", OLD)
    journal = commit_only(path, CHANGES)
    damaged = bytearray(journal.read_bytes())
    damaged[place] ^= 1
    journal.write_bytes(damaged)
    before = files_under(tmp_path)
    with pytest.raises(HashMismatch, match="rebuild"):
        recover(path)
    assert files_under(tmp_path) == before


def test_a_cut_off_journal_is_not_replayed(tmp_path: Path) -> None:
    path = write_sample(tmp_path, "file", OLD)
    journal = commit_only(path, CHANGES)
    os.truncate(journal, 20)
    with pytest.raises(TruncatedFile, match="rebuild"):
        recover(path)


@pytest.mark.parametrize(
    ("arrays", "error"),
    [
        ({**OLD, "a.weight": np.zeros((40, 25), np.int16)}, MalformedRecord),
        ({**OLD, "a.weight": np.zeros((2, 2), np.uint16)}, MalformedRecord),
        ({"other": np.zeros(2)}, MissingTensor),
    ],
)
def test_a_journal_is_not_replayed_onto_another_checkpoint(
    tmp_path: Path, arrays: Arrays, error: type[Exception]
) -> None:
    path = write_sample(tmp_path, "file", OLD)
    commit_only(path, CHANGES)
    save_file(arrays, path)
    before = files_under(tmp_path)
    with pytest.raises(error):
        recover(path)
    assert files_under(tmp_path) == before


def test_a_shard_that_is_a_link_is_not_overwritten(tmp_path: Path) -> None:
    path = write_sample(tmp_path, "file", OLD)
    (tmp_path / "link.safetensors").symlink_to(path)
    with pytest.raises(UnsupportedLayout, match="symbolic link"):
        overwrite_in_place(tmp_path / "link.safetensors", CHANGES, proof="NEW")


def test_writers_of_one_checkpoint_take_turns(tmp_path: Path) -> None:
    path = write_sample(tmp_path, "file", OLD)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        apply = threading.Thread(
            target=overwrite_in_place, args=(path, CHANGES), kwargs={"proof": ""}
        )
        apply.start()
        apply.join(0.1)
        assert apply.is_alive()
        assert read_state(path) == state_of(OLD)
    apply.join()
    assert read_state(path) == state_of(NEW)


def test_positions_beyond_four_billion_are_written(tmp_path: Path) -> None:
    n_elements = (1 << 32) + 10
    header = build_header([TensorSpec("w", dtype_named("U8"), (n_elements,))], {})
    path = tmp_path / "a.safetensors"
    path.write_bytes(header)
    os.truncate(path, len(header) + n_elements)
    positions = np.array([0, 1 << 32, n_elements - 1], np.uint64)
    bits = np.array([1, 2, 3], np.uint8)
    overwrite_in_place(path, [("w", Changes(positions, bits))], proof="")
    with Checkpoint.open(path) as checkpoint:
        found = [checkpoint.read("w", int(at), int(at) + 1)[0] for at in positions]
        assert found == [1, 2, 3]
        assert checkpoint.read("w", n_elements - 10, n_elements - 1).tobytes() == b"\2" + bytes(8)
