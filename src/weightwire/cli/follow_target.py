"""The folder that ``follow`` keeps current: never someone else's, never left half written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weightwire.apply.staging import Staging
from weightwire.apply.targets import FolderTarget, Ready
from weightwire.cli.signals import Signals
from weightwire.errors import OutputExists


class CarefulFolder(FolderTarget):
    """A checkpoint folder; signals wait while it is written to."""

    def __init__(
        self, folder: Path, signals: Signals, version: Callable[[], int], *, may_replace: bool
    ) -> None:
        """``version`` gives what the subscriber knows the folder to hold, -1 if nothing."""
        super().__init__(folder)
        self._out, self._signals, self._version = folder, signals, version
        self._may_replace = may_replace or not (folder.exists() and any(folder.iterdir()))

    def prepare(self, staging: Staging, digest: str, *, folder: Path | None) -> Ready:
        """Refuse to replace what is no version of this run.

        Raises:
            OutputExists: nobody said that it may be lost.
        """
        self._signals.check()
        if not self._may_replace and self._version() < 0:
            raise OutputExists(
                f"{self._out}: holds something that is no version of this run, at least none it still"
                " has; choose another folder, or give --overwrite"
            )
        return super().prepare(staging, digest, folder=folder)

    def activate(self, ready: Ready) -> None:
        """Write all of it, whatever signal comes."""
        with self._signals.deferred():
            super().activate(ready)
        self._may_replace = True
