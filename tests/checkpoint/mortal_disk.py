"""A disk that dies at a chosen effect and forgets what was never made durable."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from weightwire.checkpoint.disk import LocalDisk

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


class MortalDisk(LocalDisk):
    """Lets ``n_effects`` happen; the next one is torn in half, and every later one fails."""

    def __init__(self, n_effects: float = float("inf")) -> None:
        self.n_left = n_effects
        self.n_done = 0
        self._volatile: list[Effect] = []
        self._copies: list[int] = []

    def create(self, path: Path) -> int:
        self._live()
        descriptor = super().create(path)
        self._remember(inode(path.parent), False, path.unlink)
        return descriptor

    def pwrite(self, file_descriptor: int, data: memoryview, offset: int) -> None:
        copy = os.dup(file_descriptor)
        self._copies.append(copy)
        old = os.pread(copy, data.nbytes, offset).ljust(data.nbytes, b"\0")
        self._remember(os.fstat(copy).st_ino, True, lambda: os.pwrite(copy, old, offset))
        if self.n_left == 0:
            super().pwrite(file_descriptor, data[: data.nbytes // 2], offset)
        self._live()
        super().pwrite(file_descriptor, data, offset)

    def fsync(self, file_descriptor: int) -> None:
        self._live()
        synced = os.fstat(file_descriptor).st_ino
        self._volatile = [each for each in self._volatile if each.durable_with != synced]

    def rename(self, source: Path, target: Path) -> None:
        self._live()
        super().rename(source, target)
        self._remember(inode(target.parent), False, lambda: target.rename(source))

    def unlink(self, path: Path) -> None:
        self._live()
        content = path.read_bytes()
        super().unlink(path)
        self._remember(inode(path.parent), False, lambda: path.write_bytes(content))

    def cut_power(self, loss: Loss, seed: int) -> None:
        """Undo what the crash may undo: nothing, a random part of the data, or all of it."""
        rng = np.random.default_rng(seed)
        for effect in reversed(self._volatile):
            if loss == "everything" or (
                loss == "some data" and effect.is_data and rng.random() < 0.5
            ):
                effect.undo()
        for copy in self._copies:
            os.close(copy)

    def _live(self) -> None:
        if self.n_left <= 0:
            self.n_left = -1
            raise Crash
        self.n_left -= 1
        self.n_done += 1

    def _remember(self, durable_with: int, is_data: bool, undo: Callable[[], object]) -> None:
        self._volatile.append(Effect(durable_with, is_data, undo))


class CommitOnlyDisk(MortalDisk):
    """Dies right after a journal is committed, before any weight is overwritten."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.n_left = 0


def inode(path: Path) -> int:
    return path.stat().st_ino
