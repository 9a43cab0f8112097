"""Writing a new checkpoint: same form, same neighbours, complete or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from sample_checkpoints import (
    FORMS,
    INDEX,
    SHARDS,
    Arrays,
    bits_of,
    changed,
    files_under,
    read_state,
    sample_arrays,
    state_of,
    write_sample,
    write_sharded,
)

from weightwire import limits
from weightwire.checkpoint import Checkpoint, rename, write_checkpoint
from weightwire.errors import (
    InterruptedApply,
    MalformedRecord,
    NotACheckpoint,
    OutputExists,
    WeightwireError,
)
from weightwire.model import Bits, TensorSpec, dtype_named


def rewrite(
    base_path: Path, out: Path, arrays: Arrays | None = None, *, overwrite: bool = False
) -> None:
    """Write ``arrays``, or the base's own bits, as a new checkpoint."""
    with Checkpoint.open(base_path) as base:
        specs = dict(base.specs) if arrays is None else specs_of(arrays)

        def resolve(name: str, start: int, stop: int) -> Bits:
            if arrays is None:
                return base.read(name, start, stop)
            return bits_of(arrays[name])[start:stop]

        write_checkpoint(out, base, specs, resolve, overwrite=overwrite)


def specs_of(arrays: Arrays) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(
            name, dtype_named(f"{array.dtype.kind.upper()}{8 * array.itemsize}"), array.shape
        )
        for name, array in arrays.items()
    }


def interrupted_after(n_good: int, base: Checkpoint) -> Callable[[str, int, int], Bits]:
    left = iter(range(n_good))

    def resolve(name: str, start: int, stop: int) -> Bits:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return base.read(name, start, stop)

    return resolve


def out_path(root: Path, form: str) -> Path:
    return root / ("out.safetensors" if form == "file" else "out")


def own_leftovers(root: Path) -> list[str]:
    return [path.name for path in root.rglob("*") if "weightwire" in path.name]


@pytest.mark.parametrize("form", FORMS)
def test_an_unchanged_state_is_written_byte_for_byte(tmp_path: Path, form: str) -> None:
    base, out = write_sample(tmp_path, form, sample_arrays()), out_path(tmp_path, form)
    rewrite(base, out)
    if form == "file":
        assert out.read_bytes() == base.read_bytes()
    else:
        assert files_under(out) == files_under(base)
    assert own_leftovers(tmp_path) == []


@pytest.mark.parametrize("form", FORMS)
def test_new_bits_are_what_any_loader_reads(tmp_path: Path, form: str) -> None:
    new = changed(sample_arrays())
    out = out_path(tmp_path, form)
    rewrite(write_sample(tmp_path, form, sample_arrays()), out, new)
    assert read_state(out) == state_of(new)
    loaded: Arrays = {}
    for file in [out] if form == "file" else out.glob("*.safetensors"):
        loaded |= load_file(file)
        with safe_open(file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert state_of(loaded) == state_of(new)


def test_added_tensors_join_the_last_shard_and_removed_ones_vanish(tmp_path: Path) -> None:
    base = write_sharded(
        tmp_path / "base",
        [{"a": np.ones(3, np.uint16), "b": np.ones(2, np.uint16)}, {"c": np.ones(3, np.uint8)}],
    )
    new: Arrays = {
        "new": np.arange(4, dtype=np.uint64),
        "c": np.full(5, 7, np.uint8),
        "a": np.zeros(3, np.uint16),
    }
    rewrite(base, tmp_path / "out", new)
    assert read_state(tmp_path / "out") == state_of(new)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"] == {"a": SHARDS[0], "c": SHARDS[1], "new": SHARDS[1]}
    assert index["metadata"] == {"total_size": 43}


def test_no_tensor_is_left_astride_its_own_width(tmp_path: Path) -> None:
    save_file({"odd": np.ones(3, np.uint8)}, tmp_path / "base.safetensors")
    new: Arrays = {"odd": np.ones(3, np.uint8), "wide": np.ones(2, np.uint32)}
    rewrite(tmp_path / "base.safetensors", tmp_path / "out.safetensors", new)
    with Checkpoint.open(tmp_path / "out.safetensors") as checkpoint:
        assert checkpoint.location("wide")[1] % 4 == 0
    assert read_state(tmp_path / "out.safetensors") == state_of(new)


def test_a_shard_without_tensors_is_dropped_and_the_way_back_works(tmp_path: Path) -> None:
    arrays: Arrays = {"a": np.ones(3, np.uint16), "b": np.ones(2, np.uint16)}
    base = write_sharded(tmp_path / "base", [{"a": arrays["a"]}, {"b": arrays["b"]}])
    rewrite(base, tmp_path / "one", {"a": arrays["a"]})
    assert sorted(files_under(tmp_path / "one")) == [SHARDS[0], INDEX]
    rewrite(tmp_path / "one", tmp_path / "none", {})
    assert read_state(tmp_path / "none") == {}
    rewrite(tmp_path / "none", tmp_path / "both", arrays)
    assert read_state(tmp_path / "both") == state_of(arrays)


def test_a_parameter_count_is_kept_only_while_it_is_true(tmp_path: Path) -> None:
    base = write_sharded(
        tmp_path / "base", [{"a": np.ones(3, np.uint16)}, {"b": np.ones(2, np.uint16)}]
    )
    index = json.loads((base / INDEX).read_text())
    index["metadata"] |= {"total_parameters": 5, "note": "x"}
    (base / INDEX).write_text(json.dumps(index))
    rewrite(base, tmp_path / "same")
    rewrite(base, tmp_path / "less", {"a": np.ones(3, np.uint16)})
    assert json.loads((tmp_path / "same" / INDEX).read_text())["metadata"] == index["metadata"]
    assert json.loads((tmp_path / "less" / INDEX).read_text())["metadata"] == {
        "note": "x",
        "total_size": 6,
    }


def test_neighbours_are_copied_but_stale_weights_and_leftovers_are_not(tmp_path: Path) -> None:
    base = write_sample(tmp_path, "folder", sample_arrays())
    kept = [
        "config.json",
        "tokenizer.json",
        ".gitattributes",
        "sub/deep/x.txt",
        "sub/w.safetensors",
    ]
    stale = [
        "old.safetensors",
        "pytorch_model-00001-of-00002.bin",
        INDEX,
        "optimizer.pt",
        ".git/objects/x",
        ".weightwire-journal.partial",
        "sub/.weightwire-journal",
        ".x.weightwire-1-ab.tmp/model.safetensors",
        ".x.weightwire-1-ab.old",
    ]
    for name in kept + stale:
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(name)
    rewrite(base, tmp_path / "out")
    assert sorted(files_under(tmp_path / "out")) == sorted([*kept, "model.safetensors"])
    assert (tmp_path / "out" / "sub/deep/x.txt").read_text() == "sub/deep/x.txt"


def test_links_out_of_the_folder_are_kept_as_links_and_inner_ones_are_followed(
    tmp_path: Path,
) -> None:
    base = write_sample(tmp_path, "folder", sample_arrays())
    (tmp_path / "secret").write_text("secret")
    (base / "config.json").write_text("{}")
    (base / "sub").mkdir()
    for name, target in [("out", "../secret"), ("in", "config.json"), ("dir", "sub"), ("me", "me")]:
        (base / name).symlink_to(target)
    os.mkfifo(base / "pipe")
    rewrite(base, tmp_path / "out")
    assert (tmp_path / "out" / "out").readlink() == tmp_path / "secret"
    assert not (tmp_path / "out" / "in").is_symlink()
    assert (tmp_path / "out" / "in").read_text() == "{}"
    assert (tmp_path / "out" / "dir").readlink() == Path("sub")
    assert not (tmp_path / "out" / "pipe").exists()


def test_pieces_are_asked_for_in_file_order_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PIECE_ELEMENTS", 3)
    base_path = write_sharded(
        tmp_path / "base", [{"z": np.arange(7, dtype=np.uint8)}, {"a": np.ones(3, np.uint8)}]
    )
    asked: list[tuple[str, int, int]] = []
    written: list[int] = []
    with Checkpoint.open(base_path) as base:

        def resolve(name: str, start: int, stop: int) -> Bits:
            asked.append((name, start, stop))
            return base.read(name, start, stop)

        write_checkpoint(tmp_path / "out", base, base.specs, resolve, progress=written.append)
    assert asked == [("z", 0, 3), ("z", 3, 6), ("z", 6, 7), ("a", 0, 3)]
    assert written == [3, 3, 1, 3]
    assert read_state(tmp_path / "out") == read_state(base_path)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_sample(tmp_path, "file", sample_arrays())
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: whole(fd, data[:100]))
    rewrite(base, tmp_path / "out.safetensors")
    assert (tmp_path / "out.safetensors").read_bytes() == base.read_bytes()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_at_any_piece_leaves_everything_as_it_was(
    tmp_path: Path, form: str, overwrite: bool
) -> None:
    base_path, out = write_sample(tmp_path, form, sample_arrays()), out_path(tmp_path, form)
    if overwrite:
        rewrite(base_path, out)
    before = files_under(tmp_path)
    for n_good in range(4):
        with Checkpoint.open(base_path) as base, pytest.raises(KeyboardInterrupt):
            write_checkpoint(
                out, base, base.specs, interrupted_after(n_good, base), overwrite=overwrite
            )
        assert files_under(tmp_path) == before
        assert own_leftovers(tmp_path) == []


@pytest.mark.parametrize("bits", [np.ones(2, np.uint8), np.ones(3, np.uint16), np.ones(3, np.int8)])
def test_bits_of_the_wrong_number_or_kind_are_refused(tmp_path: Path, bits: Bits) -> None:
    save_file({"w": np.ones(3, np.uint8)}, tmp_path / "a.safetensors")
    with (
        Checkpoint.open(tmp_path / "a.safetensors") as base,
        pytest.raises(MalformedRecord, match="'w'"),
    ):
        write_checkpoint(tmp_path / "b.safetensors", base, base.specs, lambda *_: bits)
    assert sorted(files_under(tmp_path)) == ["a.safetensors"]


@pytest.mark.parametrize("form", FORMS)
def test_an_existing_output_is_refused(tmp_path: Path, form: str) -> None:
    base, out = write_sample(tmp_path, form, sample_arrays()), out_path(tmp_path, form)
    rewrite(base, out)
    with pytest.raises(OutputExists, match="ask to overwrite"):
        rewrite(base, out)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("can_exchange", [True, False])
def test_overwriting_replaces_the_whole_output(
    tmp_path: Path, form: str, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(rename, "_renameat2", lambda *_: False)
    base, out = write_sample(tmp_path, form, sample_arrays()), out_path(tmp_path, form)
    new = changed(sample_arrays())
    rewrite(base, out)
    if out.is_dir():
        (out / "stale.txt").touch()
    rewrite(base, out, new, overwrite=True)
    assert read_state(out) == state_of(new)
    assert not (out / "stale.txt").exists()
    assert own_leftovers(tmp_path) == []


@pytest.mark.parametrize("form", FORMS)
def test_a_base_may_be_replaced_by_its_own_successor(tmp_path: Path, form: str) -> None:
    base, new = write_sample(tmp_path, form, sample_arrays()), changed(sample_arrays())
    rewrite(base, base, new, overwrite=True)
    assert read_state(base) == state_of(new)


def test_a_failed_fallback_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_sample(tmp_path, "folder", sample_arrays())
    before = files_under(tmp_path)
    monkeypatch.setattr(rename, "_renameat2", lambda *_: False)
    real_rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise PermissionError
        return real_rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(PermissionError):
        rewrite(base, base, overwrite=True)
    assert files_under(tmp_path) == before


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("offered", [True, False])
def test_an_output_that_appears_meanwhile_is_not_replaced(
    tmp_path: Path, form: str, offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not offered:
        monkeypatch.setattr(rename, "_renameat2", lambda *_: False)
    base_path, out = write_sample(tmp_path, form, sample_arrays()), out_path(tmp_path, form)
    with Checkpoint.open(base_path) as base:

        def resolve(name: str, start: int, stop: int) -> Bits:
            out.mkdir(exist_ok=True)
            (out / "mine").touch()
            return base.read(name, start, stop)

        with pytest.raises(OutputExists, match="appeared"):
            write_checkpoint(out, base, base.specs, resolve)
    assert sorted(files_under(out)) == ["mine"]


def test_a_folder_of_something_else_is_never_overwritten(tmp_path: Path) -> None:
    base = write_sample(tmp_path, "folder", sample_arrays())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(OutputExists, match="checkpoint folder"):
        rewrite(base, tmp_path / "out", overwrite=True)


def test_a_file_does_not_overwrite_a_folder_nor_a_folder_a_file(tmp_path: Path) -> None:
    file = write_sample(tmp_path, "file", sample_arrays())
    folder = write_sample(tmp_path, "folder", sample_arrays())
    (tmp_path / "d.safetensors").mkdir()
    for base, out in [(file, tmp_path / "d.safetensors"), (folder, file)]:
        with pytest.raises(OutputExists, match="remove it yourself"):
            rewrite(base, out, overwrite=True)


def test_a_single_file_needs_a_name_that_readers_know(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match=r"\.safetensors"):
        rewrite(write_sample(tmp_path, "file", sample_arrays()), tmp_path / "out.bin")


def test_a_file_with_a_pending_journal_is_not_overwritten(tmp_path: Path) -> None:
    base = write_sample(tmp_path, "file", sample_arrays())
    rewrite(base, tmp_path / "out.safetensors")
    (tmp_path / ".out.safetensors.weightwire-journal").touch()
    with pytest.raises(InterruptedApply):
        rewrite(base, tmp_path / "out.safetensors", overwrite=True)


def test_missing_parent_folders_are_made(tmp_path: Path) -> None:
    base = write_sample(tmp_path, "folder", sample_arrays())
    rewrite(base, tmp_path / "x" / "y" / "out")
    assert read_state(tmp_path / "x" / "y" / "out") == read_state(base)


def test_errors_of_the_source_of_bits_pass_through(tmp_path: Path) -> None:
    base_path = write_sample(tmp_path, "sharded", sample_arrays())

    def resolve(name: str, start: int, stop: int) -> Bits:
        raise WeightwireError("from the codec")

    with Checkpoint.open(base_path) as base, pytest.raises(WeightwireError, match="codec"):
        write_checkpoint(tmp_path / "out", base, base.specs, resolve)
    assert not (tmp_path / "out").exists()
