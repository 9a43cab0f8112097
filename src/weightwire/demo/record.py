"""Everything that was said, sorted by what it is about: one place for table, proofs and report."""

from __future__ import annotations

from collections import defaultdict

from weightwire.demo.events import (
    Activated,
    Delivered,
    Event,
    Failed,
    Finished,
    Killed,
    Ready,
    Sent,
    Stepped,
    WarmedUp,
)
from weightwire.demo.settings import Arm


class Record:
    """What has happened so far."""

    def __init__(self) -> None:
        self.ready: dict[str, Ready] = {}
        self.warmed_up: WarmedUp | None = None
        self.sent: dict[Arm, dict[int, Sent]] = defaultdict(dict)
        self.steps: dict[Arm, dict[int, Stepped]] = defaultdict(dict)
        self.activated: dict[Arm, list[Activated]] = defaultdict(list)
        self.delivered: dict[Arm, list[Delivered]] = defaultdict(list)
        self.killed: list[Killed] = []
        self.n_returned = 0
        """Workers that said they were ready again after a kill."""
        self.finished: set[tuple[str, Arm]] = set()
        self.failures: list[Failed] = []

    def add(self, event: Event) -> None:
        """Put an event where it belongs."""
        match event:
            case Ready():
                self._add_ready(event)
            case WarmedUp():
                self.warmed_up = event
            case Sent():
                self.sent[event.arm][event.version] = event
            case Stepped():
                self.steps[event.arm][event.step] = event
            case Activated():
                self.activated[event.arm].append(event)
            case Delivered():
                self.delivered[event.arm].append(event)
            case Killed():
                self.killed.append(event)
            case Finished():
                self.finished.add((event.process, event.arm))
            case Failed():
                self.failures.append(event)
            case _:
                pass

    def newest(self, arm: Arm) -> int:
        """The newest version of an arm; -1 before the first."""
        return max(self.sent[arm], default=-1)

    def held(self, arm: Arm, worker: int) -> int:
        """The version a worker holds; -1 before the first."""
        mine = (each.version for each in self.activated[arm] if each.worker == worker)
        return max(mine, default=-1)

    def activations(self, arm: Arm, version: int) -> list[Activated]:
        """What the workers said of one version."""
        return [each for each in self.activated[arm] if each.version == version]

    def _add_ready(self, event: Ready) -> None:
        if event.process in self.ready:
            self.n_returned += 1
        self.ready[event.process] = event
