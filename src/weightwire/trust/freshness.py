"""An alarm for silence: someone who can hide new records cannot hide that there are none.

A signature says who wrote a record, not that it is the last one: whoever controls the store can go
on serving an old, validly signed log. The newest record's signed time bounds for how long.
"""

from __future__ import annotations

from weightwire.errors import FrozenHistory
from weightwire.store.records import Commit

MAX_CLOCK_SKEW_S = 300.0
"""How far the publisher's clock may be ahead of ours; beyond it the record's time proves nothing."""


def check_fresh(newest: Commit, now: float, max_silence_s: float) -> None:
    """Refuse a history whose newest record is older than is allowed.

    A record from the far future is refused by the same error, because it is the same alarm:
    nobody can tell how old the history is, and it would keep this check silent until then.

    Raises:
        FrozenHistory: too old, or from the future.
    """
    age_s = now - newest.time_ms / 1000
    # Asked this way round, a time or limit that is no number fails too.
    if not age_s >= -MAX_CLOCK_SKEW_S:
        raise FrozenHistory(
            f"version {newest.version} says it was committed {-age_s:.0f} s from now: the publisher's"
            " clock or this one is wrong, so nobody can tell how old this history is"
        )
    if not age_s <= max_silence_s:
        raise FrozenHistory(
            f"no new version since version {newest.version}, {age_s:.0f} s ago, and {max_silence_s:g} s"
            " are allowed: the publisher stopped, or someone hides its work"
        )
