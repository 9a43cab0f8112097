"""A cache that several receivers share: what one makes or uses, another tidies away at the worst moment."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sample_logs import WEIGHTS, SampleRun

from weightwire.durable import make_folder
from weightwire.errors import DiskTrouble
from weightwire.store import in_use, layout
from weightwire.store.anchor import AnchorFile, Manifest, manifest_bytes
from weightwire.store.cache import Cache
from weightwire.store.fetch import Fetcher
from weightwire.store.memory import MemoryStore
from weightwire.store.plan import Step
from weightwire.store.records import AnchorRef, sha256

FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "tokenizer.json": b"[]"}


class Eventful(MemoryStore):
    """Something happens just before one of its reads."""

    def __init__(self) -> None:
        super().__init__()
        self.n_reads = 0
        self.at, self.event = -1, lambda: None

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self.n_reads += 1
        if self.n_reads - 1 == self.at:
            self.event()
        return super().read(key, start, stop)


def anchor_in(store: MemoryStore) -> Step:
    """An anchor of three files."""
    digest, folder = "d" * 32, layout.anchor_folder(0, "e" * 32)
    for name, data in FILES.items():
        store.put(folder + name, data)
    files = tuple(AnchorFile(n, len(data), (sha256(data),)) for n, data in FILES.items())
    raw = manifest_bytes(Manifest(digest, {}, files))
    store.put(folder + layout.ANCHOR_MANIFEST, raw)
    n_bytes = len(raw) + sum(map(len, FILES.values()))
    return Step(0, digest, anchor=AnchorRef(folder, n_bytes, len(raw), sha256(raw)))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def vanishing(monkeypatch: pytest.MonkeyPatch, n_times: int) -> list[Path]:
    """Whoever finds that a folder exists finds it gone the next moment, so many times."""
    honest, gone = os.mkdir, []

    def mkdir(path: Path, mode: int = 0o777) -> None:
        try:
            honest(path, mode)
        except FileExistsError:
            if len(gone) < n_times:
                gone.append(Path(path))
                shutil.rmtree(path)
            raise

    monkeypatch.setattr(os, "mkdir", mkdir)
    return gone


def test_a_folder_that_vanishes_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    gone = vanishing(monkeypatch, 1)
    make_folder(folder)
    assert gone == [folder]
    assert folder.is_dir()


def test_a_folder_that_always_vanishes_is_busy_not_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(path: Path, mode: int = 0o777) -> None:
        raise FileExistsError(errno.EEXIST, f"there was one of mode {mode}", str(path))

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(OSError, match="again and again") as caught:
        make_folder(tmp_path / "a")
    assert caught.value.errno == errno.EBUSY


def test_a_file_or_a_dead_link_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(NotADirectoryError):
            make_folder(tmp_path / name)


def test_folders_above_are_made_only_if_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b", parents=True)
    make_folder(tmp_path / "a" / "b", parents=True)
    assert (tmp_path / "a" / "b").is_dir()


def test_an_anchor_whose_folder_vanishes_while_it_is_made_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cache = MemoryStore(), Cache(tmp_path)
    step = anchor_in(store)
    (tmp_path / (step.folder.rstrip("/") + in_use.PARTIAL)).mkdir()
    gone = vanishing(monkeypatch, 1)
    folder, _ = Fetcher(store, cache).anchor(step)
    assert len(gone) == 1
    assert contents(folder) == FILES


@pytest.mark.parametrize("n_times", [1, 5])
def test_an_anchor_whose_folder_vanishes_before_it_is_used_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_times: int
) -> None:
    honest, gone = in_use._open, []

    def tidied_first(folder: Path) -> int:
        if len(gone) < n_times:
            gone.append(folder)
            shutil.rmtree(folder)
        return honest(folder)

    store, cache = MemoryStore(), Cache(tmp_path)
    step = anchor_in(store)
    monkeypatch.setattr(in_use, "_open", tidied_first)
    folder, _ = Fetcher(store, cache).anchor(step)
    assert len(gone) == n_times
    assert contents(folder) == FILES


def test_a_cache_that_cannot_keep_a_folder_says_so(tmp_path: Path) -> None:
    store, cache = MemoryStore(), Cache(tmp_path)
    step = anchor_in(store)
    shutil.rmtree(tmp_path / "anchors")
    with pytest.raises(DiskTrouble, match="No such file"):
        Fetcher(store, cache).anchor(step)


def finish_first(other: Cache, step: Step, store: MemoryStore) -> None:
    Fetcher(store, other).anchor(step)


def tidy(other: Cache, step: Step, store: MemoryStore) -> None:
    other.keep_only(())


def finish_then_tidy(other: Cache, step: Step, store: MemoryStore) -> None:
    finish_first(other, step, store)
    tidy(other, step, store)


def give_up(other: Cache, step: Step, store: MemoryStore) -> None:
    other.discard(step.folder)


EVENTS = [finish_first, tidy, finish_then_tidy, give_up]


@pytest.mark.parametrize("at", range(1 + len(FILES)))
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_an_anchor_is_whole_whatever_another_receiver_does_while_it_is_fetched(
    tmp_path: Path, at: int, event: Callable[[Cache, Step, MemoryStore], None]
) -> None:
    store, cache, other = Eventful(), Cache(tmp_path), Cache(tmp_path)
    step = anchor_in(store)
    store.at, store.event = at, lambda: event(other, step, store)
    folder, _ = Fetcher(store, cache).anchor(step)
    assert store.n_reads > at
    assert contents(folder) == FILES
    assert cache.at_hand() == {step.folder}


def test_what_is_used_stays_until_it_is_let_go(tmp_path: Path) -> None:
    store, cache, other = MemoryStore(), Cache(tmp_path), Cache(tmp_path)
    step = anchor_in(store)
    Fetcher(store, cache).anchor(step)
    other.keep_only(())
    assert other.at_hand() == {step.folder}
    cache.keep_only([step.folder])
    other.keep_only(())
    assert other.at_hand() == {step.folder}
    cache.close()
    other.keep_only(())
    assert list((tmp_path / "anchors").iterdir()) == []


def test_a_folder_made_anew_while_the_old_one_is_tidied_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cache, other = MemoryStore(), Cache(tmp_path), Cache(tmp_path)
    step = anchor_in(store)
    path = tmp_path / step.folder
    path.mkdir()
    honest = in_use._is_free

    def made_anew_first(descriptor: int) -> bool:
        monkeypatch.setattr(in_use, "_is_free", honest)
        path.rmdir()
        Fetcher(store, cache).anchor(step)
        return honest(descriptor)

    monkeypatch.setattr(in_use, "_is_free", made_anew_first)
    other.keep_only(())
    assert contents(path) == FILES


def test_a_receiver_that_is_gone_uses_nothing(tmp_path: Path) -> None:
    store, cache, other = MemoryStore(), Cache(tmp_path), Cache(tmp_path)
    Fetcher(store, cache).anchor(anchor_in(store))
    del cache
    other.keep_only(())
    assert list((tmp_path / "anchors").iterdir()) == []


def test_a_receivers_own_anchor_goes_when_it_is_no_longer_needed(tmp_path: Path) -> None:
    store, cache = MemoryStore(), Cache(tmp_path)
    Fetcher(store, cache).anchor(anchor_in(store))
    cache.keep_only(())
    assert list((tmp_path / "anchors").iterdir()) == []


def test_without_locks_anchors_are_fetched_and_tidied_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, f"no locks for {descriptor}: {operation}")

    monkeypatch.setattr(in_use.fcntl, "flock", refuse)
    store, cache, other = Eventful(), Cache(tmp_path), Cache(tmp_path)
    step = anchor_in(store)
    store.at, store.event = 2, lambda: tidy(other, step, store)
    folder, _ = Fetcher(store, cache).anchor(step)
    assert contents(folder) == FILES
    other.keep_only(())
    assert other.at_hand() == frozenset()


def test_a_patch_that_goes_while_it_is_opened_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SampleRun().commit_many(2)
    ref = run.commits[1].patch
    assert ref is not None
    cache, folder = Cache(tmp_path), tmp_path / ref.folder
    folder.mkdir()
    (folder / "patch.json").write_bytes(run.store.read(ref.folder + "patch.json"))
    assert cache.load_patch(ref) is not None
    honest = Path.is_file

    def gone_next(self: Path) -> bool:
        found = honest(self)
        if self.parent == folder:
            shutil.rmtree(folder)
        return found

    monkeypatch.setattr(Path, "is_file", gone_next)
    assert cache.load_patch(ref) is None
    assert cache.load_patch(replace(ref, n_bytes=1)) is None
