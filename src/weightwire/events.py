"""What happened, for logs, metrics and tables: one value per published and per activated version."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One version, as its publisher saw it."""

    version: int
    """-1 where nothing was sent: ``observe``, or a skipped publish without changes."""
    epoch: int
    digest: str
    n_elements: int
    n_changed: int
    n_bytes: int
    """What a receiver one version behind downloads; the estimate of it in ``observe``."""
    n_state_bytes: int
    read_s: float
    """Reading, comparing and encoding: what the trainer waited for."""
    commit_s: float = 0.0
    """From then until the version existed."""
    is_validated: bool = False
    """The full state was compared with what a receiver would decode, and was bit-identical."""
    step: int | None = None
    """The training step, where the trainer gave one."""

    @property
    def density(self) -> float:
        """The share of elements that changed."""
        return self.n_changed / max(self.n_elements, 1)


@dataclass(frozen=True)
class Updated:
    """One activated version, as its receiver saw it."""

    version: int
    previous: int
    """-1 before the first."""
    digest: str
    n_bytes: int
    """Downloaded for it."""
    n_changed: int
    n_steps: int
    lag: int
    """Versions still ahead when it was staged."""
    was_whole: bool
    """It was loaded from an anchor."""
    n_detours: int
    """Ways that turned out bad."""
    stage_s: float
    """Everything before the pause."""
    fetch_s: float
    """Of that, waiting for bytes."""
    activate_s: float = 0.0
    """The pause: while it lasts the weights are a mixture."""
    verify_s: float = 0.0
    """Reading back what was written, while the engine serves again."""
    step: int | None = None
    """The training step it was published at, where the trainer gave one."""
