"""A disk under a folder store that dies at a chosen effect and forgets what was not durable."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weightwire.store.folder_disk import LocalFolderDisk

Loss = Literal["nothing", "some data", "everything"]
LOSSES: tuple[Loss, ...] = ("nothing", "some data", "everything")


class Crash(BaseException):
    """The process is gone; no handler of ours may stop it."""


@dataclass(frozen=True)
class Effect:
    """One effect that a power cut may still undo, until its file or folder is made durable."""

    durable_with: int
    is_data: bool
    undo: Callable[[], object]


class MortalFolderDisk(LocalFolderDisk):
    """Lets ``n_effects`` happen; the next one fails, a write half way, and so do all later ones.

    ``attic`` keeps files that lost their name, in case the power cut brings the name back.
    """

    def __init__(self, attic: Path, n_effects: float = float("inf")) -> None:
        self.n_left = n_effects
        self.n_done = 0
        self._attic = attic
        self._volatile: list[Effect] = []
        self._descriptors: list[int] = []
        attic.mkdir(parents=True)

    def mkdir(self, path: Path) -> None:
        self._live()
        if not path.exists():
            super().mkdir(path)
            self._remember(path.parent, lambda: shutil.rmtree(path, ignore_errors=True))

    def create(self, path: Path) -> int:
        self._live()
        descriptor = super().create(path)
        self._remember(path.parent, lambda: path.unlink(missing_ok=True))
        return descriptor

    def pwrite(self, file_descriptor: int, data: memoryview, offset: int) -> None:
        kept = os.dup(file_descriptor)
        self._descriptors.append(kept)
        undo = Effect(os.fstat(kept).st_ino, True, lambda: os.ftruncate(kept, offset))
        self._volatile.append(undo)
        if self.n_left == 0:
            super().pwrite(file_descriptor, data[: data.nbytes // 2], offset)
        self._live()
        super().pwrite(file_descriptor, data, offset)

    def fsync(self, file_descriptor: int) -> None:
        self._live()
        synced = os.fstat(file_descriptor).st_ino
        self._volatile = [each for each in self._volatile if each.durable_with != synced]

    def link(self, source: Path, target: Path) -> None:
        self._live()
        super().link(source, target)
        self._remember(target.parent, lambda: target.unlink(missing_ok=True))

    def rename(self, source: Path, target: Path) -> None:
        self._live()
        old = self._kept(target) if target.exists() else None
        super().rename(source, target)
        self._remember(target.parent, lambda: _rename_back(source, target, old))

    def unlink(self, path: Path) -> None:
        self._live()
        old = self._kept(path)
        super().unlink(path)
        self._remember(path.parent, lambda: _link_again(old, path))

    def rmdir(self, path: Path) -> None:
        self._live()
        super().rmdir(path)
        self._remember(path.parent, lambda: path.mkdir(exist_ok=True))

    def cut_power(self, loss: Loss, seed: int) -> None:
        """Undo what the crash may undo: nothing, a random part of the data, or all of it."""
        chance = random.Random(seed)
        for effect in reversed(self._volatile):
            is_unlucky = loss == "some data" and effect.is_data and chance.random() < 0.5
            if loss == "everything" or is_unlucky:
                effect.undo()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _live(self) -> None:
        if self.n_left <= 0:
            self.n_left = -1
            raise Crash
        self.n_left -= 1
        self.n_done += 1

    def _remember(self, folder: Path, undo: Callable[[], object]) -> None:
        self._volatile.append(Effect(folder.stat().st_ino, False, undo))

    def _kept(self, path: Path) -> Path:
        kept = self._attic / str(len(list(self._attic.iterdir())))
        os.link(path, kept)
        return kept


def _rename_back(source: Path, target: Path, old: Path | None) -> None:
    target.rename(source)
    if old is not None:
        os.link(old, target)


def _link_again(old: Path, path: Path) -> None:
    with suppress(FileExistsError):
        os.link(old, path)
