"""Two publishers and eight subscribers as real processes, killed and frozen at random."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from actor_states import FENCED, first_state, notes, sha256_of
from supervision import Actor, place_in, wait_for

import weightwire as ww
from weightwire.clock import SystemClock
from weightwire.errors import RetryError
from weightwire.store.retention import Retention, collect
from weightwire.store.run import Run, require_identity
from weightwire.testing.seaweed import S3Server

CHAOS_S = 30.0
N_SUBSCRIBERS = 8
EXPECTED = {0, -signal.SIGKILL}


@dataclass
class Troupe:
    """The processes of one run, restarted whenever they end."""

    server: S3Server
    folder: Path
    chance: random.Random
    actors: dict[str, Actor] = field(default_factory=dict)
    thaws: dict[str, float] = field(default_factory=dict)
    """Who is frozen, and until when."""
    later: dict[str, float] = field(default_factory=dict)
    """When a fenced publisher may try again."""
    n_starts: int = 0
    n_kills: int = 0
    n_freezes: int = 0
    n_fenced: int = 0
    n_collections: int = 0
    n_outages: int = 0

    @property
    def publishers(self) -> list[str]:
        return ["publisher-0", "publisher-1"]

    @property
    def subscribers(self) -> list[str]:
        return [f"subscriber-{n}" for n in range(N_SUBSCRIBERS)]

    def log_of(self, name: str) -> Path:
        return self.folder / f"{name}.jsonl"

    def start(self, name: str) -> None:
        self.n_starts += 1
        arguments: list[object] = ["publish", self.log_of(name), self.n_starts]
        if name in self.subscribers:
            is_folder = self.subscribers.index(name) % 2
            target = self.folder / f"{name}-target" if is_folder else "memory"
            arguments = ["follow", self.log_of(name), name, target, self.folder / f"{name}-cache"]
        store, log = place_in(self.server, "chaos"), self.folder / f"{name}.err"
        self.actors[name] = Actor("chaos_actor.py", *arguments, store=store, log=log)

    def disturb(self) -> None:
        """Kill one, or freeze one for a while."""
        name = self.chance.choice(sorted(self.actors))
        if name in self.thaws or self.actors[name].process.poll() is not None:
            return
        if self.chance.random() < 0.5:
            self.n_kills += 1
            self.actors.pop(name).kill()
        else:
            self.n_freezes += 1
            self.actors[name].signal(signal.SIGSTOP)
            self.thaws[name] = time.monotonic() + self.chance.uniform(0.2, 3.0)

    def look_after(self) -> None:
        """Thaw who slept enough, and start who is not there."""
        now = time.monotonic()
        for name in [name for name, until in self.thaws.items() if until <= now]:
            self.actors[name].signal(signal.SIGCONT)
            del self.thaws[name]
        for name in (*self.publishers, *self.subscribers):
            actor = self.actors.get(name)
            if actor is not None and actor.process.poll() is not None:
                self._ended(name, actor.end(), actor)
            if name not in self.actors and self.later.get(name, 0) <= now:
                self.start(name)

    def _ended(self, name: str, status: int, actor: Actor) -> None:
        del self.actors[name]
        self.thaws.pop(name, None)
        if status == FENCED and name in self.publishers:
            self.n_fenced += 1
            self.later[name] = time.monotonic() + self.chance.uniform(0.5, 2.5)
            return
        assert status in EXPECTED, f"{name} ended with {status}:\n{actor.errors()}"

    def collect(self) -> None:
        """Remove old versions under everyone's hands; a run that does not exist yet is left alone."""
        store = self.server.open("chaos")
        try:
            run = Run(store, require_identity(store))
            collect(run, Retention(keep_versions=4, receipt_grace_s=20.0), SystemClock())
            self.n_collections += 1
        except (RetryError, ww.errors.ObjectMissing, ww.errors.NotARun):
            pass

    def stop_the_store(self) -> None:
        """For a while nobody gets an answer."""
        os.kill(self.server.pid, signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.5, 2.0))
        os.kill(self.server.pid, signal.SIGCONT)
        self.n_outages += 1

    def stop(self, names: list[str]) -> None:
        """End politely; who is frozen wakes first."""
        for name in [name for name in names if name in self.actors]:
            self.actors[name].signal(signal.SIGCONT)
            self.thaws.pop(name, None)
            self.actors[name].signal(signal.SIGTERM)
        for name in [name for name in names if name in self.actors]:
            actor = self.actors.pop(name)
            assert actor.end() in EXPECTED | {FENCED, -signal.SIGTERM}, actor.errors()

    def close(self) -> None:
        for actor in self.actors.values():
            actor.__exit__()


@pytest.fixture
def troupe(s3_server: S3Server, tmp_path: Path) -> Any:
    made = Troupe(s3_server, tmp_path, random.Random(20))
    yield made
    made.close()


def test_two_publishers_and_eight_subscribers_agree_after_random_kills_and_freezes(
    troupe: Troupe,
) -> None:
    _let_chaos_reign(troupe)
    troupe.stop(troupe.publishers)
    joiner = {name: np.zeros_like(tensor) for name, tensor in first_state().items()}
    with ww.Subscriber(troupe.server.open("chaos"), joiner, receipts=False) as late:
        late.update()
        newest, wanted = late.version, sha256_of(joiner)
        _wait_for_all(troupe, newest)
        assert late.poll() == newest
    troupe.stop(troupe.subscribers)
    held = {name: notes(troupe.log_of(name))[-1]["sha256"] for name in troupe.subscribers}
    assert set(held.values()) == {wanted}
    _check_logs(troupe, newest)
    print(
        f"chaos: {troupe.n_kills} kills, {troupe.n_freezes} freezes, {troupe.n_fenced} publishers"
        f" fenced, {troupe.n_collections} collections, {troupe.n_outages} outages, {newest + 1} versions"
    )
    assert troupe.n_kills > 5
    assert troupe.n_freezes > 5
    assert newest > 10


def _let_chaos_reign(troupe: Troupe) -> None:
    troupe.look_after()
    wait_for("the first version", lambda: any(troupe.log_of(n).exists() for n in troupe.publishers))
    ends, n_rounds = time.monotonic() + CHAOS_S, 0
    while time.monotonic() < ends:
        time.sleep(troupe.chance.uniform(0.1, 0.6))
        troupe.disturb()
        troupe.look_after()
        n_rounds += 1
        if n_rounds % 12 == 0:
            troupe.collect()
        if n_rounds % 20 == 0:
            troupe.stop_the_store()


def _wait_for_all(troupe: Troupe, newest: int) -> None:
    def missing() -> list[str]:
        for name in troupe.subscribers:
            if name in troupe.thaws:
                troupe.actors[name].signal(signal.SIGCONT)
                del troupe.thaws[name]
        _restart_subscribers(troupe)
        last = {name: notes(troupe.log_of(name))[-1:] for name in troupe.subscribers}
        return [n for n, line in last.items() if not line or line[0]["version"] != newest]

    wait_for(f"version {newest} everywhere", lambda: not missing(), lambda: str(missing()))


def _restart_subscribers(troupe: Troupe) -> None:
    for name in troupe.subscribers:
        actor = troupe.actors.get(name)
        if actor is not None and actor.process.poll() is not None:
            troupe._ended(name, actor.end(), actor)
        if name not in troupe.actors:
            troupe.start(name)


def _check_logs(troupe: Troupe, newest: int) -> None:
    """One digest and one set of bits per version, everywhere; versions rise in every process."""
    digests: dict[int, set[str]] = defaultdict(set)
    bits: dict[str, set[str]] = defaultdict(set)
    last: dict[int, int] = {}
    for name in (*troupe.publishers, *troupe.subscribers):
        for line in notes(troupe.log_of(name)):
            if "sha256" in line:
                bits[line["digest"]].add(line["sha256"])
            if "version" in line:
                digests[line["version"]].add(line["digest"])
                assert line["version"] > last.get(line["pid"], -1), f"{name} went back: {line}"
                last[line["pid"]] = line["version"]
    assert max(digests) <= newest
    assert {v: d for v, d in digests.items() if len(d) > 1} == {}
    assert {d: b for d, b in bits.items() if len(b) > 1} == {}
