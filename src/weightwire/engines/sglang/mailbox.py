"""A folder that a server's ranks and its client both see: what is wanted, and where each rank stands.

SGLang's routes for weights wait until nothing runs, and carry nothing back from a rank but "done".
Staging must do neither: it goes on while requests run, and may fail. So it is asked for and
answered here. Every file is written whole and renamed, by one writer.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from weightwire.engines.remote.status import RankStatus, parse_status

_WANTED = "wanted.json"
_MAX_BYTES = 64 << 10


class Mailbox:
    """One client's folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    @property
    def is_there(self) -> bool:
        """Whether the client still wants something of anybody."""
        return self.folder.is_dir()

    def want(self, version: int, turn: int) -> None:
        """Ask every rank to stage a version; another ``turn`` asks again for the same."""
        self._write(_WANTED, {"version": version, "turn": turn})

    def wanted(self) -> tuple[int, int]:
        """The version that is wanted, and its turn; (-1, 0) if none is."""
        found = self._read(_WANTED)
        try:
            return int(found["version"]), int(found["turn"])
        except (KeyError, TypeError, ValueError):
            return -1, 0

    def report(self, status: RankStatus, turn: int) -> None:
        """Say where a rank stands, and which turn it has heard of."""
        # A client that is gone took its folder along; nobody is left to tell.
        with contextlib.suppress(FileNotFoundError):
            self._write(f"rank-{status.rank}.json", {**status.as_json(), "turn": turn})

    def reports(self, n_ranks: int, turn: int = 0) -> list[RankStatus | None]:
        """What each rank said last; None from those that have not heard of this turn.

        Raises:
            EngineRefused: a rank of another release of Weightwire.
        """
        found = [self._read(f"rank-{rank}.json") for rank in range(n_ranks)]
        return [parse_status(each) if each.get("turn", -1) >= turn else None for each in found]

    def forget(self, n_ranks: int) -> None:
        """Remove what was said before a new connection."""
        (self.folder / _WANTED).unlink(missing_ok=True)
        for rank in range(n_ranks):
            (self.folder / f"rank-{rank}.json").unlink(missing_ok=True)

    def _write(self, name: str, content: object) -> None:
        part = self.folder / f".{name}.{os.getpid()}"
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(self.folder / name)

    def _read(self, name: str) -> dict[str, Any]:
        """Empty where there is nothing, or nothing of ours."""
        try:
            with (self.folder / name).open("rb") as file:
                found = json.loads(file.read(_MAX_BYTES))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
