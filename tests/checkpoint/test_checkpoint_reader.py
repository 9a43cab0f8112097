"""Opening and reading checkpoints, and every way a folder can lie about its shards."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from sample_checkpoints import (
    FORMS,
    INDEX,
    SHARDS,
    Arrays,
    read_state,
    sample_arrays,
    state_of,
    write_index,
    write_sample,
    write_sharded,
)

from weightwire.checkpoint import Checkpoint
from weightwire.diff.state import StateReader
from weightwire.errors import (
    DuplicateTensor,
    InterruptedApply,
    MalformedHeader,
    MalformedRecord,
    MissingTensor,
    NotACheckpoint,
    TruncatedFile,
)


def n_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_is_read_back_in_every_form(tmp_path: Path, form: str) -> None:
    arrays = sample_arrays()
    assert read_state(write_sample(tmp_path, form, arrays)) == state_of(arrays)


def test_a_checkpoint_is_a_state_reader(tmp_path: Path) -> None:
    state: StateReader = Checkpoint.open(write_sample(tmp_path, "file", sample_arrays()))
    assert state.ties == {}
    assert state.specs["b.scalar"].shape == ()
    assert state.read("b.empty", 0, 0).size == 0


def test_a_folder_with_one_weights_file_of_any_name_opens(tmp_path: Path) -> None:
    save_file({"w": np.ones(2)}, tmp_path / "weights.safetensors")
    save_file({"v": np.ones(2)}, tmp_path / ".hidden.safetensors")
    assert read_state(tmp_path) == {"w": np.ones(2).tobytes()}


def test_ranges_are_read_as_little_endian_unsigned_integers(tmp_path: Path) -> None:
    array = np.array([1.0, -0.0, np.nan, np.inf], np.float32)
    save_file({"w": array}, tmp_path / "a.safetensors")
    with Checkpoint.open(tmp_path / "a.safetensors") as checkpoint:
        bits = checkpoint.read("w", 1, 3)
    assert bits.dtype == np.dtype("<u4")
    assert bits.tobytes() == array[1:3].tobytes()


def test_specs_are_ordered_by_shard_and_then_by_offset(tmp_path: Path) -> None:
    shards: list[Arrays] = [
        {"z": np.ones(3, np.float32)},
        {"a": np.ones(3, np.float32), "b": np.ones(3)},
    ]
    with Checkpoint.open(write_sharded(tmp_path, shards)) as checkpoint:
        places = [checkpoint.location(name) for name in checkpoint.specs]
        assert next(iter(checkpoint.specs)) == "z"
        assert places == sorted(places)
        assert [file.path.name for file in checkpoint.files] == list(SHARDS)


def test_location_points_at_the_first_byte(tmp_path: Path) -> None:
    arrays = sample_arrays()
    with Checkpoint.open(write_sample(tmp_path, "sharded", arrays)) as checkpoint:
        for name, array in arrays.items():
            path, offset = checkpoint.location(name)
            assert path.read_bytes()[offset : offset + array.nbytes] == array.tobytes()


def test_threads_may_share_a_checkpoint(tmp_path: Path) -> None:
    array = np.arange(1 << 16, dtype=np.uint32)
    save_file({"w": array}, tmp_path / "a.safetensors")
    with Checkpoint.open(tmp_path / "a.safetensors") as checkpoint, ThreadPoolExecutor(4) as pool:
        parts = pool.map(
            lambda start: checkpoint.read("w", start, start + 256), range(0, 1 << 16, 256)
        )
        assert b"".join(part.tobytes() for part in parts) == array.tobytes()


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = sample_arrays()
    path = write_sample(tmp_path, "file", arrays)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:5]], at))
    assert read_state(path) == state_of(arrays)


def test_a_file_that_shrinks_after_opening_is_truncation(tmp_path: Path) -> None:
    path = write_sample(tmp_path, "file", sample_arrays())
    with Checkpoint.open(path) as checkpoint:
        os.truncate(path, 400)
        with pytest.raises(TruncatedFile, match=r"base\.safetensors"):
            checkpoint.read("a.weight", 0, 1000)


def test_reads_outside_a_tensor_or_of_an_unknown_one_are_refused(tmp_path: Path) -> None:
    with Checkpoint.open(write_sample(tmp_path, "file", sample_arrays())) as checkpoint:
        for start, stop in [(-1, 1), (0, 8), (3, 2)]:
            with pytest.raises(MalformedRecord, match=r"a\.scale"):
                checkpoint.read("a.scale", start, stop)
        with pytest.raises(MissingTensor, match="nope"):
            checkpoint.read("nope", 0, 1)


def test_a_closed_checkpoint_gives_its_files_back_and_refuses_to_read(tmp_path: Path) -> None:
    n_before = n_open_files()
    with Checkpoint.open(write_sample(tmp_path, "sharded", sample_arrays())) as checkpoint:
        assert n_open_files() == n_before + 2
    assert n_open_files() == n_before
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read("a.scale", 0, 1)


def test_a_failed_open_leaves_no_descriptor(tmp_path: Path) -> None:
    folder = write_sample(tmp_path, "sharded", sample_arrays())
    os.truncate(folder / SHARDS[1], 50)
    n_before = n_open_files()
    with pytest.raises(TruncatedFile, match=SHARDS[1]):
        Checkpoint.open(folder)
    assert n_open_files() == n_before


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "found 0"),
        (["a.safetensors", "b.safetensors"], "found 2"),
        (["pytorch_model.bin"], r"looked for model\.safetensors"),
    ],
)
def test_a_folder_without_a_checkpoint_says_what_was_looked_for(
    tmp_path: Path, names: list[str], message: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(NotACheckpoint, match=message):
        Checkpoint.open(tmp_path)


def test_paths_that_are_no_checkpoint_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ["missing", "a.bin", "pipe.safetensors"]:
        with pytest.raises(NotACheckpoint, match=name):
            Checkpoint.open(tmp_path / name)


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "sub\\x.safetensors",
        "..",
        "",
        ".x.safetensors",
        "x.bin",
        "x\0.safetensors",
        "x" * 300 + ".safetensors",
        3,
        None,
    ],
)
def test_an_index_cannot_name_a_file_outside_its_folder(tmp_path: Path, shard: object) -> None:
    write_index(tmp_path, {"w": shard})
    with pytest.raises(MalformedHeader, match=r"index\.json.*'w'"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map":[]}', '{"weight_map":{"a":1,"a":2}}'])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(MalformedHeader, match=r"index\.json"):
        Checkpoint.open(tmp_path)


def test_a_shard_may_not_be_a_link_out_of_its_folder(tmp_path: Path) -> None:
    folder = write_sample(tmp_path, "sharded", sample_arrays())
    (folder / SHARDS[0]).rename(tmp_path / "elsewhere.safetensors")
    (folder / SHARDS[0]).symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(MalformedHeader, match="outside its folder"):
        Checkpoint.open(folder)


def test_a_shard_that_links_to_itself_is_refused(tmp_path: Path) -> None:
    folder = write_sample(tmp_path, "sharded", sample_arrays())
    (folder / SHARDS[0]).unlink()
    (folder / SHARDS[0]).symlink_to(SHARDS[0])
    with pytest.raises(MalformedHeader, match=SHARDS[0]):
        Checkpoint.open(folder)


def test_a_hugging_face_cache_snapshot_opens_through_its_links(tmp_path: Path) -> None:
    arrays = sample_arrays()
    written = write_sample(tmp_path, "sharded", arrays)
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "r1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(written.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert read_state(snapshot) == state_of(arrays)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = write_sample(tmp_path, "sharded", sample_arrays())
    (folder / SHARDS[1]).unlink()
    with pytest.raises(MalformedHeader, match=f"{SHARDS[1]}.*missing"):
        Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"w": SHARDS[0], "v": SHARDS[1], "ghost": SHARDS[1]}, "'ghost'.*no shard"),
        ({"w": SHARDS[0], "v": SHARDS[0]}, "'v'.*no shard"),
        ({"w": SHARDS[1], "v": SHARDS[0]}, r"'v' is in model-00001.*it is in model-00002"),
        ({"w": SHARDS[0], "v": SHARDS[1]}, "'hidden'.*does not list"),
    ],
)
def test_index_and_shards_must_agree_both_ways(
    tmp_path: Path, weight_map: dict[str, str], message: str
) -> None:
    extra = {"hidden": np.ones(1)} if "hidden" in message else {}
    write_sharded(tmp_path, [{"w": np.ones(1)}, {"v": np.ones(2), **extra}])
    write_index(tmp_path, weight_map)
    with pytest.raises(MalformedHeader, match=message):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path, [{"w": np.ones(1)}, {"w": np.ones(2)}])
    write_index(tmp_path, {"w": SHARDS[0], "v": SHARDS[1]})
    with pytest.raises(DuplicateTensor, match="'w'"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("journal", [".weightwire-journal", f".{SHARDS[1]}.weightwire-journal"])
def test_a_committed_journal_keeps_folder_and_shard_closed(tmp_path: Path, journal: str) -> None:
    folder = write_sample(tmp_path, "sharded", sample_arrays())
    (folder / journal).touch()
    for path in [folder, folder / SHARDS[1]]:
        with pytest.raises(InterruptedApply, match="recover"):
            Checkpoint.open(path)


def test_a_journal_is_found_through_a_link_to_the_file(tmp_path: Path) -> None:
    path = write_sample(tmp_path, "file", sample_arrays())
    (tmp_path / ".base.safetensors.weightwire-journal").touch()
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "latest.safetensors").symlink_to(path)
    with pytest.raises(InterruptedApply, match=r"base\.safetensors"):
        Checkpoint.open(tmp_path / "links" / "latest.safetensors")


def test_a_journal_that_was_never_committed_is_no_obstacle(tmp_path: Path) -> None:
    arrays = sample_arrays()
    path = write_sample(tmp_path, "file", arrays)
    (tmp_path / ".base.safetensors.weightwire-journal.partial").touch()
    assert read_state(path) == state_of(arrays)
