"""Receivers that want one version and no other: ranks that serve together, and fixed staleness."""

from __future__ import annotations

import pytest
from sample_following import Training

import weightwire as ww
from sample_training import zeros_like
from weightwire.errors import NoWay


def test_named_version_is_staged_and_no_newer_one(training: Training) -> None:
    training.publish(3)
    live = zeros_like(training.state)
    subscriber = training.subscriber(live)
    assert subscriber.stage(1)
    assert subscriber.activate().version == 1
    training.publish(2)
    assert subscriber.stage(3)
    assert subscriber.activate().version == 3
    assert subscriber.stage()
    assert subscriber.activate().version == 5
    assert ww.digest(live) == ww.digest(training.state)


def test_receivers_of_one_version_hold_the_same_bits_whatever_came_after(
    training: Training,
) -> None:
    training.publish(2)
    early, late = zeros_like(training.state), zeros_like(training.state)
    first = training.subscriber(early)
    first.stage(2)
    first.activate()
    training.publish(4)
    second = training.subscriber(late)
    second.stage(2)
    second.activate()
    assert ww.digest(early) == ww.digest(late) != ww.digest(training.state)


def test_version_that_is_held_or_older_is_not_staged(training: Training) -> None:
    training.publish(2)
    subscriber = training.subscriber(zeros_like(training.state))
    subscriber.update()
    assert not subscriber.stage(2)
    assert not subscriber.stage(0)
    assert subscriber.version == 2


def test_version_that_does_not_exist_is_refused_by_number(training: Training) -> None:
    subscriber = training.subscriber(zeros_like(training.state))
    subscriber.update()
    with pytest.raises(NoWay, match="no version 7 to stage; the newest is 0"):
        subscriber.stage(7)
    assert subscriber.version == 0


def test_step_of_the_trainer_travels_with_the_version(training: Training) -> None:
    training.n_steps += 1
    published = training.pub.publish(step=1200).result()
    subscriber = training.subscriber(zeros_like(training.state))
    updated = subscriber.update()
    assert updated is not None
    assert (published.step, updated.step) == (1200, 1200)
    assert subscriber.version == published.version != 1200


def test_version_without_a_step_says_so(training: Training) -> None:
    training.publish()
    updated = training.subscriber(zeros_like(training.state)).update()
    assert updated is not None
    assert updated.step is None
