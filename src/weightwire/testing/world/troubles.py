"""What can go wrong in a world besides the store's answers, and how likely each is in this one."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from weightwire.store.retention import Retention
from weightwire.testing.faults import OF_LIST, FaultKind, FaultPlan


class Trouble(Enum):
    """One way in which processes, memory, disks, clocks or people misbehave."""

    KILLED_BEFORE = "a process is killed before an operation has its effect"
    KILLED_AFTER = "a process is killed after an operation had its effect"
    KILLED_COLLECTING = "a collector is killed half way"
    FROZEN = "a process stands still for a while"
    SLEPT_BEFORE_COMMIT = "a publisher is stopped just before its commit, for very long"
    WOKE_BELOW_BOUNDARY = "a publisher woke, and created a record that was collected long ago"
    SLOW = "one actor is much slower than the others"
    CLOCK_SKEW = "a process's clock is wrong by hours"
    CLOCK_JUMP = "a clock is set back, or forward"
    LIVE_BIT_FLIP = "a bit of live weights flips"
    LIVE_OVERWRITTEN = "someone else writes to live weights"
    BASELINE_BIT_FLIP = "a bit of the publisher's baseline flips"
    BASELINE_FILE_DAMAGED = "the baseline's file is changed between two processes"
    BUCKET_DAMAGED = "a stored bucket rots"
    INDEX_DAMAGED = "a stored patch index rots"
    ANCHOR_DAMAGED = "a stored anchor's file rots"
    OFFER_DAMAGED = "a stored offer rots"
    COMMIT_DAMAGED = "a stored commit record rots"
    DATA_LOST = "a stored object of a patch or an anchor is lost"
    OFFER_LOST = "a stored offer is lost"
    OBJECTS_SWAPPED = "two stored objects change places"
    GARBAGE = "a stranger puts random bytes into the log"
    FORGED_OFFER = "a stranger offers a way of its own, unsigned, to readers with a key"
    RECEIPT_LOST = "a receipt is lost"
    RECEIPT_FORGED = "a receipt claims what nobody holds"
    WORKER_RENAMED = "a receiver comes back under another name"
    CACHE_DAMAGED = "a file in a receiver's cache rots"
    CACHE_TRUNCATED = "a file in a receiver's cache is cut short"
    CACHE_PARTIAL = "a folder in a receiver's cache lost a file"
    FOLDER_DAMAGED = "a file of a receiver's checkpoint folder rots"
    ACTIVATION_INTERRUPTED = "an engine raises in the middle of being written to"
    ACTIVATION_FAILED = "the system refuses a write in the middle of an activation"
    WRITE_LOST = "an engine says it was written to, and was not"
    TWO_PUBLISHERS = "a second publisher takes over while the first still works"
    TWO_COLLECTORS = "two collectors work at once"
    MANY_STEPS = "several optimizer steps before one publish"
    NOTHING_CHANGED = "a publish without a change"
    EVERYTHING_CHANGED = "a publish in which every element changed"
    NAN_PAYLOAD = "a NaN becomes another NaN"
    ZERO_SIGN = "a zero changes its sign"
    STRUCTURE_CHANGED = "a tensor is added, removed, reshaped or tied"


AT_REST = (
    Trouble.BUCKET_DAMAGED,
    Trouble.INDEX_DAMAGED,
    Trouble.ANCHOR_DAMAGED,
    Trouble.OFFER_DAMAGED,
    Trouble.DATA_LOST,
    Trouble.OFFER_LOST,
    Trouble.OBJECTS_SWAPPED,
    Trouble.GARBAGE,
)
KILLED = (Trouble.KILLED_BEFORE, Trouble.KILLED_AFTER)
LIVE = (
    Trouble.LIVE_BIT_FLIP,
    Trouble.LIVE_OVERWRITTEN,
    Trouble.ACTIVATION_INTERRUPTED,
    Trouble.ACTIVATION_FAILED,
    Trouble.WRITE_LOST,
)
LOCAL = (
    Trouble.BASELINE_BIT_FLIP,
    Trouble.BASELINE_FILE_DAMAGED,
    Trouble.CACHE_DAMAGED,
    Trouble.CACHE_TRUNCATED,
    Trouble.CACHE_PARTIAL,
    Trouble.FOLDER_DAMAGED,
    Trouble.WORKER_RENAMED,
)
RECEIPTS = (Trouble.RECEIPT_LOST, Trouble.RECEIPT_FORGED)
TIME = (Trouble.FROZEN, Trouble.SLEPT_BEFORE_COMMIT, Trouble.SLOW)
CLOCKS = (Trouble.CLOCK_SKEW, Trouble.CLOCK_JUMP)
TRAINING = (
    Trouble.MANY_STEPS,
    Trouble.NOTHING_CHANGED,
    Trouble.EVERYTHING_CHANGED,
    Trouble.NAN_PAYLOAD,
    Trouble.ZERO_SIGN,
    Trouble.STRUCTURE_CHANGED,
)


@dataclass(frozen=True)
class Settings:
    """Everything about a world that is drawn before it begins."""

    seed: int
    n_versions: int
    horizon_s: float
    switching: float
    n_publishers: int
    n_engines: int
    n_collectors: int
    anchor_every: int
    skips: tuple[int, ...]
    scrub_versions: int
    retention: Retention
    is_signed: bool
    store_faults: FaultPlan
    odds: Mapping[Trouble, float]

    @property
    def has_list_faults(self) -> bool:
        """Whether listings may lie: then fencing by listing cannot be promised."""
        return any(self.store_faults.odds.get(kind) for kind in OF_LIST)

    @property
    def has_store_faults(self) -> bool:
        """Whether the store ever misbehaves."""
        return any(self.store_faults.odds.values())

    @property
    def has_rest_damage(self) -> bool:
        """Whether what is stored may be damaged where it lies."""
        return any(self.odds.get(kind) for kind in (*AT_REST, Trouble.COMMIT_DAMAGED))


def draw_settings(seed: int, chance: random.Random) -> Settings:
    """A world's settings: some worlds are calm, some are wild, most have two or three troubles."""
    return Settings(
        seed=seed,
        n_versions=chance.randint(10, 30),
        horizon_s=chance.uniform(150.0, 400.0),
        switching=chance.choice((0.02, 0.1, 0.5, 1.0)),
        n_publishers=chance.choice((1, 1, 2, 3)),
        n_engines=chance.randint(2, 4),
        n_collectors=chance.choice((1, 1, 1, 2)),
        anchor_every=chance.randint(3, 10),
        skips=chance.choice(((), (4,), (4, 8))),
        scrub_versions=chance.choice((1, 2, 4, 8)),
        retention=_draw_retention(chance),
        is_signed=chance.random() < 0.15,
        store_faults=_draw_store_faults(chance),
        odds=_draw_odds(chance),
    )


def _draw_retention(chance: random.Random) -> Retention:
    return Retention(
        keep_versions=chance.randint(1, 6),
        keep_anchors=chance.randint(1, 2),
        receipt_grace_s=chance.choice((5.0, 200.0, 3600.0)),
        orphan_grace_s=chance.choice((10.0, 60.0, 3600.0)),
        max_bytes=chance.choice((None, None, 50_000)),
    )


def _draw_store_faults(chance: random.Random) -> FaultPlan:
    if chance.random() < 0.35:
        return FaultPlan()
    odds = chance.choice((0.002, 0.005, 0.02))
    kinds = [kind for kind in FaultKind if kind not in OF_LIST]
    if chance.random() < 0.5:
        kinds = chance.sample(kinds, chance.randint(1, 6))
    if chance.random() < 0.3:
        kinds += OF_LIST
    return FaultPlan(dict.fromkeys(kinds, odds), stuck_s=5.0, max_outage_s=15.0)


def _draw_odds(chance: random.Random) -> dict[Trouble, float]:
    odds = dict.fromkeys(TRAINING, chance.choice((0.05, 0.2)))
    families: tuple[tuple[tuple[Trouble, ...], float, tuple[float, ...]], ...] = (
        (KILLED, 0.5, (0.003, 0.008, 0.02)),
        (LIVE, 0.4, (0.02, 0.1)),
        (LOCAL, 0.4, (0.2, 0.6)),
        (RECEIPTS, 0.3, (0.1, 0.3)),
        (TIME, 0.5, (0.005, 0.02)),
        (CLOCKS, 0.3, (0.005, 0.02)),
        (AT_REST, 0.25, (0.03, 0.1)),
        ((Trouble.COMMIT_DAMAGED,), 0.08, (0.1,)),
        ((Trouble.FORGED_OFFER,), 0.3, (0.1,)),
    )
    for kinds, share, rates in families:
        if chance.random() < share:
            odds.update(dict.fromkeys(kinds, chance.choice(rates)))
    return odds
