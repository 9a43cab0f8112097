"""One rank fails, at every point: nothing is published, everyone says who it was, and it heals."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import spread_states
from spread_states import Cluster, State, received

import weightwire as ww
from sample_training import bits_of, inline, train, weights
from weightwire.diff.frozen import Frozen
from weightwire.errors import (
    CommitUnknown,
    DiskTrouble,
    FencedWriter,
    RankFailed,
    RankLost,
    StopError,
    StoreUnavailable,
    UnsupportedLayout,
)
from weightwire.store.memory import MemoryStore


class Killed(BaseException):
    """What no code survives."""


class OneRanksStore:
    """The store as one rank reaches it: its n-th write fails, before or after it happened."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.n_writes = 0
        self.fails_at = -1
        self.error: BaseException = StoreUnavailable("the network of this rank is down")
        self.is_late = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: Any) -> None:
        self._write(lambda: self._store.put(key, data))

    def create(self, key: str, data: bytes) -> bool:
        return bool(self._write(lambda: self._store.create(key, data)))

    def _write(self, write: Any) -> Any:
        self.n_writes += 1
        if self.n_writes != self.fails_at:
            return write()
        if self.is_late:
            write()
        raise self.error


class Troubled:
    """A cluster whose ranks reach one store, each on its own way."""

    def __init__(self, n_ranks: int = 3, **options: Any) -> None:
        self.store, self.state = MemoryStore(), weights()
        self.ways = [OneRanksStore(self.store) for _ in range(n_ranks)]
        self.cluster = Cluster(lambda rank: self.ways[rank], self.state, n_ranks, **options)

    def fail(self, rank: int, at: int, **how: Any) -> None:
        way = self.ways[rank]
        way.n_writes, way.fails_at = 0, at
        vars(way).update(how)

    def n_commits(self) -> int:
        return sum("commit" in info.key for info in self.store.list("log/"))


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("at", [1, 2])
def test_upload_that_fails_on_one_rank_publishes_nothing_and_names_the_rank(
    rank: int, at: int
) -> None:
    world = Troubled()
    world.cluster.published()
    train(world.state, 1)
    world.fail(rank, at)
    answers = world.cluster.publish()
    if at == 2 and rank:
        assert world.ways[rank].n_writes == 1  # it has one bucket only: there was no second write
        assert [each.version for each in answers] == [1, 1, 1]
        return
    assert {type(each) for each in answers} <= {RankFailed, StoreUnavailable}
    assert all(f"rank {rank}" in str(each) for each in answers if isinstance(each, RankFailed))
    assert len({str(each) for each in answers}) == 1
    assert world.n_commits() == 1
    train(world.state, 2)
    done = world.cluster.published()
    assert done.version == 1
    assert done.digest == ww.digest(world.state)
    assert received(world.store) == bits_of(world.state)


@pytest.mark.parametrize("is_late", [False, True])
def test_commit_that_nobody_answered_is_settled_on_every_rank(is_late: bool) -> None:
    world = Troubled()
    world.cluster.published()
    train(world.state, 1)
    world.fail(0, 3, is_late=is_late)  # its bucket, the index, the commit
    answers = world.cluster.publish()
    assert {type(each) for each in answers} == {CommitUnknown}
    assert world.n_commits() == 1 + is_late
    train(world.state, 2)
    done = world.cluster.published()
    assert done.version == 2
    assert done.digest == ww.digest(world.state)
    assert received(world.store) == bits_of(world.state)


def test_anchor_that_could_not_be_sent_is_sent_by_the_next_publish() -> None:
    world = Troubled()
    world.fail(0, 1)
    assert {type(each) for each in world.cluster.publish()} == {RankFailed}
    assert world.n_commits() == 0
    assert world.cluster.published().version == 0
    assert received(world.store) == bits_of(world.state)


def test_every_rank_of_a_fenced_publisher_is_fenced() -> None:
    world = Troubled()
    world.cluster.published()
    with ww.Publisher(world.store, world.state, background=inline):
        train(world.state, 1)
        assert {type(each) for each in world.cluster.publish()} == {FencedWriter}
        assert all(publisher.is_fenced for publisher in world.cluster.publishers)
        assert {type(each) for each in world.cluster.publish()} == {FencedWriter}


@pytest.mark.parametrize("rank", range(3))
def test_rank_that_is_killed_while_it_uploads_leaves_no_version_and_a_restart_goes_on(
    rank: int,
) -> None:
    world = Troubled()
    world.cluster.published()
    train(world.state, 1)
    world.fail(rank, 1, error=Killed())
    answers = world.cluster.publish()
    assert isinstance(answers[rank], Killed)
    assert {type(each) for n, each in enumerate(answers) if n != rank} == {RankLost}
    assert world.n_commits() == 1
    again = Cluster(world.store, world.state, 2)
    assert again.published().version == 2  # 1 is the claim
    train(world.state, 2)
    assert again.published().n_changed < 500
    assert received(world.store) == bits_of(world.state)


def test_state_that_one_rank_cannot_read_stops_every_rank() -> None:
    store, state = MemoryStore(), weights()
    cluster = Cluster(store, state, 2)
    cluster.published()
    cluster.cuts = {name: [0, 0, cuts[2]] for name, cuts in cluster.cuts.items()}
    cluster.cuts["mlp"] = [0, 100, 200]
    answers = cluster.publish()
    assert {type(each) for each in answers} == {UnsupportedLayout}
    assert all("'mlp'" in str(each) for each in answers)


def test_damaged_baseline_of_one_rank_is_noticed_and_everything_is_sent_anew() -> None:
    store, state = MemoryStore(), weights()
    cluster = Cluster(store, state, 3)
    cluster.published()
    cluster.publishers[2]._baseline._held["mlp"].array[5] ^= 1
    train(state, 1)
    done = cluster.published()
    assert done.n_changed == done.n_elements
    assert received(store) == bits_of(state)


def test_mode_that_needs_the_whole_state_is_refused() -> None:
    with pytest.raises(StopError, match="validate"):
        Cluster(MemoryStore(), weights(), 1, mode="validate")


def test_ranks_that_disagree_about_the_model_are_told_which_tensor() -> None:
    store, states = MemoryStore(), [weights(), weights()]
    cluster = Cluster(store, states[0], 2)
    other: State = {**states[1], "norm": np.ones(17, np.float16)}
    from spread_states import even_cuts, shards_of

    cluster.publishers[1]._state = shards_of(other, even_cuts(other, 2), 1)
    answers = cluster.publish()
    assert {type(each) for each in answers} == {UnsupportedLayout}
    assert "'norm'" in str(answers[0])


def test_an_unknown_commit_is_settled_by_closing() -> None:
    world = Troubled(2)
    world.cluster.published()
    train(world.state, 1)
    world.fail(0, 3, error=CommitUnknown("no answer"))
    world.cluster.publish()
    world.cluster.close()
    assert received(world.store) == bits_of(world.state)


def test_baseline_that_could_not_move_on_one_rank_moves_on_all_with_the_next_publish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Troubled()
    world.cluster.published()
    train(world.state, 1)
    baseline = world.cluster.publishers[1]._baseline
    with monkeypatch.context() as patch:
        patch.setattr(baseline, "advance", _full_disk)
        assert {type(each) for each in world.cluster.publish()} == {RankFailed}
    assert world.n_commits() == 2  # it exists; only the baselines do not know yet
    train(world.state, 2)
    done = world.cluster.published()
    assert (done.version, done.digest) == (2, ww.digest(world.state))
    assert received(world.store) == bits_of(world.state)


def _full_disk(*_: object) -> None:
    raise DiskTrouble("no space left")


def test_anchor_whose_pieces_one_rank_lost_is_not_offered_and_versions_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Troubled(anchors=ww.AnchorPolicy(every=1))
    world.cluster.published()
    monkeypatch.setattr(Frozen, "read", _full_disk)
    for step in range(3):
        train(world.state, step)
        world.cluster.published()
    assert not [info.key for info in world.store.list("log/") if "anchor" in info.key]
    assert received(world.store) == bits_of(world.state)


class Mortal:
    """Ranks as one of them sees the others, until its n-th word."""

    def __init__(self, ranks: Any, dies_at: int) -> None:
        self._ranks, self.n_left = ranks, dies_at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ranks, name)
        return self._last_word(found) if name in _WORDS else found

    def _last_word(self, call: Any) -> Any:
        self.n_left -= 1
        if self.n_left == 0:
            raise Killed
        return call


_WORDS = ("gather", "broadcast", "send", "receive")


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_is_killed_at_any_word_leaves_a_whole_version_or_none(rank: int) -> None:
    for dies_at in range(1, 100):
        world = Troubled(2, anchors=ww.AnchorPolicy(every=1))
        world.cluster.published()
        train(world.state, 1)
        publisher = world.cluster.publishers[rank]
        mortal = publisher._ranks = Mortal(publisher._ranks, dies_at)
        world.cluster.publish()
        before, after = weights(), world.state
        assert received(world.store) in (bits_of(before), bits_of(after))
        again = Cluster(world.store, world.state, 2)
        train(world.state, 2)
        assert again.published().digest == ww.digest(world.state)
        assert received(world.store) == bits_of(world.state)
        if mortal.n_left > 0:
            break
    assert 10 < dies_at < 99


def test_of_a_state_that_cannot_be_opened_only_the_error_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may have been redistributed by then: as much memory as the state has."""
    cluster, held = Cluster(MemoryStore(), weights(), 2), []
    cluster.published()

    def failing(*_: Any) -> None:
        memory = np.zeros(10)
        held.append(weakref.ref(memory))
        raise UnsupportedLayout("not spread by rows")

    with monkeypatch.context() as patch:
        patch.setattr(spread_states, "shards_of", failing)
        assert all(isinstance(each, UnsupportedLayout) for each in cluster.publish())
    gc.collect()
    assert [each() is None for each in held] == [True, True]
    assert cluster.published().version == 1
