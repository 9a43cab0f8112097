"""What all actors of one world share."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from weightwire.errors import (
    NotARun,
    ObjectMissing,
    StoreRefused,
    UntrustedHistory,
)
from weightwire.store import layout
from weightwire.store.retry import RetryPolicy
from weightwire.testing.faults import FaultKind
from weightwire.testing.faulty_store import FaultyStore
from weightwire.testing.world.handles import ActorStore, Chances, Life, SimClock
from weightwire.testing.world.promises import Truth, check_bounded, check_typed
from weightwire.testing.world.scheduler import Scheduler
from weightwire.testing.world.troubles import Settings, Trouble
from weightwire.testing.world.witness import Witness
from weightwire.trust.keys import SigningKey

RETRY = RetryPolicy(n_attempts=4, first_delay_s=0.2, max_delay_s=4.0, deadline_s=30.0)
MAX_OPERATIONS = 4000
"""Most store operations one publish, update or collection may need; retries included."""


@dataclass
class Stage:
    """One world's common ground."""

    settings: Settings
    chance: random.Random
    scheduler: Scheduler
    chances: Chances
    truth: Truth
    witness: Witness
    store: FaultyStore
    folder: Path
    key: SigningKey | None
    is_damaged: bool = False
    """Something stored was damaged where it lies."""
    damaged_versions: set[int] = field(default_factory=set)
    """Those whose commit records were."""
    n_forged: int = 0

    @property
    def is_log_damaged(self) -> bool:
        """Whether a commit record was damaged where it lies."""
        return bool(self.damaged_versions)

    @property
    def is_going(self) -> bool:
        """Whether there is time left."""
        return self.scheduler.time < self.settings.horizon_s

    def begin_life(self, name: str) -> tuple[Life, ActorStore, SimClock]:
        """A new process: its life, its way to the store, its clock."""
        life = Life(name, self.scheduler, self.chances)
        offset_s = 0.0
        if self.chances.strikes(Trouble.CLOCK_SKEW):
            offset_s = self.chance.uniform(-36_000.0, 36_000.0)
        clock = SimClock(self.scheduler, self.chances, life, offset_s)
        return life, ActorStore(self.store, life), clock

    def check_error(self, who: str, error: Exception) -> None:
        """Failures are typed, and stop only where something in this world calls for it."""
        self.chances.tell(f"{who}: {type(error).__name__}: {error}")
        check_typed(who, error, may_stop=self._may_stop(error))

    def check_operations(self, life: Life, n_before: int) -> None:
        """No call needs more operations than it may ever need."""
        check_bounded(life.name, "operations", life.n_operations - n_before, MAX_OPERATIONS)

    def _may_stop(self, error: Exception) -> bool:
        faults = self.settings.store_faults.odds
        if isinstance(error, StoreRefused):
            return bool(faults.get(FaultKind.PERMISSION_BLIP))
        if isinstance(error, NotARun) and not self._has_run():
            return True
        if faults.get(FaultKind.WRONG_OBJECT):
            return True
        if isinstance(error, UntrustedHistory):
            is_forged = self.n_forged > 0 and self.key is not None
            return self.settings.has_list_faults or is_forged
        is_missed = bool(faults.get(FaultKind.MISSING_ONCE))
        return isinstance(error, NotARun) and is_missed

    def _has_run(self) -> bool:
        try:
            self.witness.read(layout.RUN)
        except ObjectMissing:
            return False
        return True
