"""A disk that can be filled up: a tmpfs of its own, or where that is not allowed, a limit on file sizes."""

from __future__ import annotations

import resource
import subprocess
from contextlib import suppress
from pathlib import Path

N_BYTES = 2 << 20


class SmallDisk:
    """Fills up when told to, and is freed again; a context manager."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        command = ["mount", "-t", "tmpfs", "-o", f"size={N_BYTES}", "weightwire-test", str(path)]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        self._is_mounted = mounted.returncode == 0
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not self._is_mounted:
            print(f"no tmpfs ({mounted.stderr.strip()}): file sizes are limited instead")

    def fill(self) -> None:
        """No room for one more block."""
        if not self._is_mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64, self._limits[1]))
            return
        with (self.path / "filler").open("wb", buffering=0) as filler, suppress(OSError):
            while filler.write(bytes(4096)):
                pass

    def free(self) -> None:
        """Room again."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
        (self.path / "filler").unlink(missing_ok=True)

    def __enter__(self) -> SmallDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()
        if self._is_mounted:
            subprocess.run(["umount", "-l", str(self.path)], check=True)
