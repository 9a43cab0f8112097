"""What a diff found, kept until its version is committed: only then may the baseline move."""

from __future__ import annotations

from collections.abc import Iterator

from weightwire.codec.record import RecordHead
from weightwire.diff.spill import Spill
from weightwire.model import Changes


class RedoLog:
    """Implements ``ChangeLog``; replays what it was told, as often as asked."""

    def __init__(self) -> None:
        self._entries: list[tuple[RecordHead, Changes]] = []
        self._spill = Spill()

    def add(self, head: RecordHead, changes: Changes) -> None:
        """Keep the changes of one piece; those without any are passed over."""
        if len(changes) or head.is_fresh:
            self._entries.append((head, self._spill.keep(changes)))

    def __iter__(self) -> Iterator[tuple[RecordHead, Changes]]:
        return iter(self._entries)

    def close(self) -> None:
        """Give back memory and disk."""
        self._entries.clear()
        self._spill = Spill()
