"""A log that is old and true is an alarm too."""

from __future__ import annotations

import pytest
from sample_logs import SampleRun

from weightwire.errors import FrozenHistory
from weightwire.trust.freshness import MAX_CLOCK_SKEW_S, check_fresh


def test_silence_is_allowed_for_so_long_and_no_longer() -> None:
    run = SampleRun()
    newest = run.commit()
    check_fresh(newest, run.clock.now(), 60)
    check_fresh(newest, run.clock.now() + 60, 60)
    with pytest.raises(FrozenHistory, match="no new version since version 0"):
        check_fresh(newest, run.clock.now() + 61, 60)


def test_a_publisher_whose_clock_is_a_little_ahead_is_fresh() -> None:
    run = SampleRun()
    newest = run.commit()
    check_fresh(newest, run.clock.now() - MAX_CLOCK_SKEW_S, 60)


def test_a_record_from_the_far_future_does_not_silence_the_alarm() -> None:
    run = SampleRun()
    newest = run.commit()
    with pytest.raises(FrozenHistory, match="clock"):
        check_fresh(newest, run.clock.now() - MAX_CLOCK_SKEW_S - 1, 60)


def test_a_limit_that_is_no_number_allows_nothing() -> None:
    run = SampleRun()
    with pytest.raises(FrozenHistory):
        check_fresh(run.commit(), run.clock.now(), float("nan"))
