"""Sixty-four subscribers behind one publisher: all exact, and each asks the store for little."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from actor_states import first_state, sha256_of, train
from crowd_actor import N_ELEMENTS
from supervision import Actor, place_in

import weightwire as ww
from weightwire.testing.seaweed import S3Server

N_PROCESSES, N_PER_PROCESS, N_VERSIONS = 8, 8, 10
MAX_REQUESTS = 12
"""Per version and subscriber, beside one for each bucket: look, record, index, receipt."""


def test_sixty_four_subscribers_are_exact_and_ask_for_little(
    s3_server: S3Server, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    state, rng = first_state(N_ELEMENTS), np.random.default_rng(3)
    requests: list[int] = []
    with ExitStack() as stack:
        publisher = stack.enter_context(ww.Publisher(s3_server.open("crowd"), state))
        publisher.publish().result()
        crowd = [stack.enter_context(actor) for actor in _crowd(s3_server, tmp_path)]
        _ask(crowd, state, publisher.version)
        for _ in range(N_VERSIONS):
            train(state, rng)
            published = publisher.publish().result()
            answers = _ask(crowd, state, published.version)
            requests += [answer["n_requests"] for answer in answers]
    n_mean, n_most = float(np.mean(requests)), max(requests)
    record_property("requests_per_version_per_subscriber", n_mean)
    print(f"crowd: {n_mean:.2f} requests per version and subscriber, at most {n_most}")
    assert len(requests) == N_PROCESSES * N_PER_PROCESS * N_VERSIONS
    assert n_most <= MAX_REQUESTS + 1


def _crowd(server: S3Server, folder: Path) -> list[Actor]:
    store = place_in(server, "crowd")
    return [
        Actor(
            "crowd_actor.py", f"crowd{n}", N_PER_PROCESS, store=store, log=folder / f"crowd{n}.err"
        )
        for n in range(N_PROCESSES)
    ]


def _ask(crowd: list[Actor], state: dict[str, Any], version: int) -> list[dict[str, Any]]:
    """Let everyone update once, and see that everyone holds exactly the publisher's bits."""
    for actor in crowd:
        actor.tell("go")
    answers: list[dict[str, Any]] = []
    for actor in crowd:
        line = actor.hear()
        assert line, actor.errors()
        answers += json.loads(line)
    assert {answer["version"] for answer in answers} == {version}
    assert {answer["sha256"] for answer in answers} == {sha256_of(state)}
    return answers
