"""Everything that is known to go wrong between a program and its object store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class FaultKind(Enum):
    """One way in which a store, or the way to it, misbehaves."""

    ERROR_BEFORE = "no answer, and nothing happened"
    PUT_REPLY_LOST = "a put happened, and its answer was lost"
    CREATE_REPLY_LOST = "a create was decided, and its answer was lost"
    DELETE_REPLY_LOST = "a delete happened, and its answer was lost"
    DELAYED_EFFECT = "no answer to a write, which happens some operations later"
    DUPLICATE_DELIVERY = "a put happens twice"
    LATENCY = "an answer takes a while"
    THROTTLING = "several operations in a row are told to slow down"
    OUTAGE = "no operation is answered for a while"
    PERMISSION_BLIP = "one operation is refused for no reason"
    STALE_LIST = "a listing as it was some writes ago: newer objects are not in it"
    LIST_OMITS_ONE = "a listing without one of its objects"
    LIST_ENDS_EARLY = "a listing breaks off in the middle"
    MISSING_ONCE = "an object just written is not found, once"
    STUCK_READ = "a read hangs, then fails"
    TORN_READ = "a read gives the first part of the bytes"
    EMPTY_READ = "a read gives no bytes"
    FLIPPED_BIT = "a read gives one wrong bit"
    WRONG_OBJECT = "a read gives the bytes of another object"
    RANGE_OFF = "a read of a range gives its neighbour, some bytes off"


BEFORE_ANY = (
    FaultKind.ERROR_BEFORE,
    FaultKind.THROTTLING,
    FaultKind.OUTAGE,
    FaultKind.PERMISSION_BLIP,
)
"""What can happen to every operation, before it has an effect."""

OF_PUT = (FaultKind.PUT_REPLY_LOST, FaultKind.DELAYED_EFFECT, FaultKind.DUPLICATE_DELIVERY)
OF_CREATE = (FaultKind.CREATE_REPLY_LOST, FaultKind.DELAYED_EFFECT)
OF_DELETE = (FaultKind.DELETE_REPLY_LOST, FaultKind.DELAYED_EFFECT)
OF_LIST = (FaultKind.STALE_LIST, FaultKind.LIST_OMITS_ONE, FaultKind.LIST_ENDS_EARLY)
OF_READ = (
    FaultKind.MISSING_ONCE,
    FaultKind.STUCK_READ,
    FaultKind.TORN_READ,
    FaultKind.EMPTY_READ,
    FaultKind.FLIPPED_BIT,
    FaultKind.WRONG_OBJECT,
    FaultKind.RANGE_OFF,
)


@dataclass(frozen=True)
class FaultPlan:
    """How likely each fault is, per operation it can befall, and how bad it is when it comes."""

    odds: Mapping[FaultKind, float] = field(default_factory=dict)
    max_latency_s: float = 2.0
    stuck_s: float = 30.0
    max_outage_s: float = 20.0
    max_burst: int = 5
    """Most operations in a row that are throttled."""

    max_delay: int = 20
    """Most operations before a delayed write happens."""

    n_recent_writes: int = 16
    """How far back a stale listing can be, and what counts as just written."""

    n_faults: int | None = None
    """Stop after so many, if given: for tests that want exactly one."""


def every_fault(odds: float) -> FaultPlan:
    """All kinds, equally likely: a store from hell, for tests that must survive anything."""
    return FaultPlan(dict.fromkeys(FaultKind, odds))
