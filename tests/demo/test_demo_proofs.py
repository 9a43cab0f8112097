from __future__ import annotations

from collections.abc import Callable

import pytest

from demo.sample_records import (
    activated,
    record_of,
    sample_events,
    sample_record,
    sample_settings,
    sent,
    spoiled,
    stepped,
)
from weightwire.demo.events import Delivered, Event, Ready, parse_line, to_line
from weightwire.demo.proofs import judge
from weightwire.demo.record import Record
from weightwire.errors import MalformedHeader

SETTINGS = sample_settings()
Spoil = Callable[[list[Event]], list[Event]]


def refuted(events: list[Event]) -> list[str]:
    return [verdict.claim for verdict in judge(record_of(events), SETTINGS) if not verdict.holds]


def test_every_claim_holds_for_a_run_that_went_well() -> None:
    verdicts = judge(sample_record(SETTINGS), SETTINGS)
    assert [str(each) for each in verdicts if not each.holds] == []
    assert all(verdict.n_checked for verdict in verdicts)
    assert len(verdicts) == 11


SPOILS: dict[str, tuple[Spoil, str]] = {
    "a worker's live weights": (
        lambda all_: spoiled(all_, activated("patches", 1, 3), live_digest="other"),
        "patches: every version on every worker",
    ),
    "weights that are wider than published": (
        lambda all_: spoiled(all_, activated("full", 0, 2), is_exact=False),
        "full: every version on every worker",
    ),
    "a version that a worker never held": (
        lambda all_: [each for each in all_ if each != activated("patches", 0, 4)],
        "patches: every version on every worker",
    ),
    "the published digest": (
        lambda all_: spoiled(all_, sent("patches", 2), digest="other"),
        "patches: every published digest",
    ),
    "the count of changes": (
        lambda all_: spoiled(all_, sent("patches", 2), n_counted=51),
        "as many elements",
    ),
    "a loss, in its last bit": (
        lambda all_: spoiled(all_, stepped("full", 3), loss=-0.03 * (1 + 2**-52)),
        "losses",
    ),
    "the sign of a zero": (
        lambda all_: spoiled(
            spoiled(all_, stepped("full", 3), loss=0.0), stepped("patches", 3), loss=-0.0
        ),
        "losses",
    ),
    "a reward": (lambda all_: spoiled(all_, stepped("full", 3), reward=0.25), "rewards"),
    "what was generated": (
        lambda all_: spoiled(all_, stepped("full", 1), rollouts_sha256="other"),
        "rollouts",
    ),
    "a step that is missing": (
        lambda all_: [each for each in all_ if each != stepped("full", 4)],
        "losses",
    ),
    "the version that generated a batch": (
        lambda all_: spoiled(all_, Delivered("patches", 0, 3, 1, 0.1), version=0),
        "every batch was generated",
    ),
    "a killed worker that stays away": (lambda all_: all_[:-1], "a killed worker came back"),
}


@pytest.mark.parametrize("what", SPOILS)
def test_a_claim_falls_when_its_ground_does(what: str) -> None:
    spoil, claim = SPOILS[what]
    assert any(each.startswith(claim) for each in refuted(spoil(sample_events(SETTINGS))))


def test_a_run_of_which_nothing_is_known_proves_nothing() -> None:
    assert not any(verdict.holds for verdict in judge(Record(), SETTINGS))


def test_a_refuted_claim_names_where() -> None:
    events = spoiled(sample_events(SETTINGS), activated("patches", 1, 3), live_digest="other")
    (verdict,) = [each for each in judge(record_of(events), SETTINGS) if not each.holds]
    assert "worker 1, version 3: live weights have other, not digest-3" in str(verdict)


def test_events_survive_the_way_between_processes() -> None:
    events = sample_events(SETTINGS)
    assert [parse_line(to_line(event)) for event in events] == events


@pytest.mark.parametrize("line", ["", "{", '{"event": "Ready"}', '{"event": "Nobody"}', "[1]"])
def test_half_a_line_is_not_an_event(line: str) -> None:
    with pytest.raises(MalformedHeader, match="not an event"):
        parse_line(line)


def test_a_worker_that_is_ready_twice_has_come_back() -> None:
    assert record_of([Ready("worker-0", 1.0), Ready("worker-1", 1.0)]).n_returned == 0
    assert record_of([Ready("worker-0", 1.0), Ready("worker-0", 1.0)]).n_returned == 1
