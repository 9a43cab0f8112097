"""The store itself, watched: whatever comes to exist or is deleted there, the truth is told of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weightwire.store import layout
from weightwire.store.contract import ObjectInfo
from weightwire.store.memory import MemoryStore
from weightwire.store.records import parse_commit, parse_identity
from weightwire.testing.world.handles import Chances
from weightwire.testing.world.promises import (
    Committed,
    Truth,
    check_captured,
    check_commit,
    check_deleted,
    require,
)
from weightwire.testing.world.troubles import Trouble


class Witness:
    """Implements ``ObjectStore`` over memory; sees effects when they happen, however late."""

    def __init__(self, objects: MemoryStore, truth: Truth, chances: Chances) -> None:
        self.objects, self._truth, self._chances = objects, truth, chances

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Write an object; nobody may put where records must be created."""
        entry = layout.parse_entry(key)
        require(entry is None or entry.kind != "commit", "one writer", key, "was put")
        self.objects.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        """Create an object; commits and boundaries are what the truth is made of."""
        is_new = self.objects.create(key, data)
        entry, boundary = layout.parse_entry(key), layout.parse_boundary(key)
        if is_new and entry is not None and entry.kind == "commit":
            self._saw_commit(entry.version, data)
        if is_new and boundary is not None:
            self._saw_boundary(boundary)
        return is_new

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Read an object."""
        return self.objects.read(key, start, stop)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """List objects."""
        return self.objects.list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects, none of which may still be needed."""
        for key in keys:
            check_deleted(self._truth, key)
            self.objects.delete([key])

    def _saw_commit(self, version: int, data: bytes) -> None:
        truth = self._truth
        run = parse_identity(self.objects.read(layout.RUN), layout.RUN)
        record = parse_commit(data, f"version {version}", version, run.run, None)
        if version < truth.boundary:
            truth.n_zombies += 1
            self._chances.count(Trouble.WOKE_BELOW_BOUNDARY)
            return
        check_commit(truth, record)
        truth.versions[version] = Committed(record, check_captured(truth, record))
        self._chances.tell(f"version {version} of epoch {record.epoch} exists")

    def _saw_boundary(self, boundary: int) -> None:
        newest = self._truth.newest
        require(boundary <= newest, "nothing committed is lost", "boundary", boundary, "of", newest)
        self._truth.boundary = max(self._truth.boundary, boundary)
        self._chances.tell(f"versions before {boundary} are gone")
