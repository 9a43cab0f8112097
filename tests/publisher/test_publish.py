from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import weightwire as ww
from sample_training import bits_of, inline, train, weights, zeros_like
from weightwire.checkpoint import Checkpoint
from weightwire.errors import (
    CommitUnknown,
    FencedWriter,
    PublisherClosed,
    StateMoved,
    StoreRefused,
    StoreUnavailable,
    TargetMismatch,
)
from weightwire.events import Published
from weightwire.publisher import Publisher
from weightwire.store import layout
from weightwire.store.memory import MemoryStore
from weightwire.store.retry import RetryPolicy

ONCE = RetryPolicy(n_attempts=1)


def publisher(store: object, state: object, **options: object) -> Publisher:
    return Publisher(store, state, background=inline, retry=ONCE, **options)  # type: ignore[arg-type]


def held_by_a_new_receiver(store: object) -> dict[str, bytes]:
    live: dict[str, np.ndarray] = {}
    ww.Subscriber(store, live, background=inline).update()  # type: ignore[arg-type]
    return bits_of(live)


class Broken(MemoryStore):
    """A store whose verbs can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: dict[str, Exception] = {}
        self.loses_reply_of = ""

    def put(self, key: str, data: object) -> None:
        self._fail("put", key)
        super().put(key, data)  # type: ignore[arg-type]

    def create(self, key: str, data: bytes) -> bool:
        self._fail("create", key)
        done = super().create(key, data)
        if self.loses_reply_of and self.loses_reply_of in key:
            self.loses_reply_of = ""
            raise StoreUnavailable("the reply was lost")
        return done

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._fail("read", key)
        return super().read(key, start, stop)

    def _fail(self, verb: str, key: str) -> None:
        for what, error in self.fails.items():
            if what in f"{verb} {key}":
                raise error


def test_first_version_is_an_anchor_and_the_next_ones_are_patches() -> None:
    store, state = MemoryStore(), weights()
    with publisher(store, state) as pub:
        first = pub.publish().result()
        train(state, 1)
        second = pub.publish().result()
    assert (first.version, second.version) == (0, 1)
    assert second.n_bytes < first.n_bytes / 10
    assert second.digest == ww.digest(state)
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_anchor_is_a_checkpoint_that_other_tools_load(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = torch.nn.Linear(8, 4).to(torch.bfloat16)
    with publisher(tmp_path / "store", model, companions=tmp_path / "model") as pub:
        pub.publish().result()
    [folder] = (tmp_path / "store" / "anchors").iterdir()
    assert (folder / "config.json").read_text() == "{}"
    loaded = load_file(folder / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    with Checkpoint.open(folder) as checkpoint:
        assert ww.digest(checkpoint) == ww.digest(model)


def test_any_number_of_steps_between_publishes_is_one_correct_version() -> None:
    store, state = MemoryStore(), weights()
    with publisher(store, state) as pub:
        pub.publish().result()
        for seed in range(5):
            train(state, seed)
        assert pub.publish().result().version == 1
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_failed_upload_leaves_the_baseline_and_the_next_publish_covers_everything() -> None:
    store, state = Broken(), weights()
    with publisher(store, state) as pub:
        pub.publish().result()
        train(state, 1)
        store.fails["put patches"] = StoreUnavailable("down")
        with pytest.raises(StoreUnavailable):
            pub.publish().result()
        assert pub.version == 0
        store.fails.clear()
        train(state, 2)
        assert pub.publish().result().version == 1
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_refused_upload_is_told_apart_and_does_not_poison_the_publisher() -> None:
    store, state = Broken(), weights()
    with publisher(store, state) as pub:
        pub.publish().result()
        train(state, 1)
        store.fails["put patches"] = StoreRefused("no permission")
        with pytest.raises(StoreRefused):
            pub.publish().result()
        store.fails.clear()
        pub.publish().result()
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_commit_whose_reply_was_lost_is_found_to_have_won() -> None:
    store, state = Broken(), weights()
    with Publisher(store, state, background=inline, retry=RetryPolicy(first_delay_s=0)) as pub:
        pub.publish().result()
        train(state, 1)
        store.loses_reply_of = "commit"
        assert pub.publish().result().version == 1
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_commit_nobody_answers_for_is_settled_by_the_next_publish() -> None:
    store, state = Broken(), weights()
    with publisher(store, state) as pub:
        pub.publish().result()
        train(state, 1)
        first = bits_of(state)
        store.loses_reply_of = "commit"
        store.fails["read log/000000000001"] = StoreUnavailable("down")
        with pytest.raises(CommitUnknown):
            pub.publish().result()
        assert pub.version == 0
        store.fails.clear()
        assert held_by_a_new_receiver(store) == first
        train(state, 2)
        assert pub.publish().result().version == 2
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_commit_that_never_arrived_is_sent_again_as_it_was() -> None:
    store, state = Broken(), weights()
    with publisher(store, state) as pub:
        pub.publish().result()
        train(state, 1)
        store.fails["create log"] = StoreUnavailable("down")
        with pytest.raises(CommitUnknown):
            pub.publish().result()
        store.fails.clear()
        train(state, 2)
        assert pub.publish().result().version == 2
        assert pub.version == 2
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_new_publisher_fences_the_old_one_for_good() -> None:
    store, state = MemoryStore(), weights()
    old = publisher(store, state)
    old.publish().result()
    new = publisher(store, state)
    assert new.epoch == old.epoch + 1
    train(state, 1)
    with pytest.raises(FencedWriter, match="epoch 2"):
        old.publish().result()
    with pytest.raises(FencedWriter):
        old.publish()
    assert old.is_fenced
    assert new.publish().result().version == 2
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_restarted_trainer_resumes_on_the_committed_state_not_on_its_own() -> None:
    store, state = MemoryStore(), weights()
    with publisher(store, state) as pub:
        pub.publish().result()
        train(state, 1)
        pub.publish().result()
    older = weights()  # the trainer's own checkpoint is a version behind
    train(older, 7)
    with publisher(store, older) as pub:
        assert pub.version == 2
        done = pub.publish().result()
    assert done.digest == ww.digest(older)
    assert held_by_a_new_receiver(store) == bits_of(older)


def test_restarted_trainer_uses_its_baseline_file_and_downloads_nothing(tmp_path: Path) -> None:
    store, state = Broken(), weights()
    with publisher(store, state, baseline=tmp_path / "base") as pub:
        pub.publish().result()
        train(state, 1)
        pub.publish().result()
    store.fails["read anchors"] = StoreUnavailable("must not be asked for")
    store.fails["read patches"] = StoreUnavailable("must not be asked for")
    with publisher(store, state, baseline=tmp_path / "base") as pub:
        train(state, 2)
        pub.publish().result()
    store.fails.clear()
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_damaged_baseline_file_is_noticed_and_rebuilt_from_the_store(tmp_path: Path) -> None:
    store, state = MemoryStore(), weights()
    with publisher(store, state, baseline=tmp_path / "base") as pub:
        pub.publish().result()
    file = tmp_path / "base" / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    train(state, 1)
    with publisher(store, state, baseline=tmp_path / "base") as pub:
        done = pub.publish().result()
    assert done.n_changed < done.n_elements / 10
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_baseline_that_goes_bad_in_memory_is_noticed_and_everything_is_sent() -> None:
    store, state = MemoryStore(), weights()
    with publisher(store, state) as pub:
        pub.publish().result()
        pub._baseline._held["mlp"].array[7] ^= 1
        train(state, 1)
        done = pub.publish().result()
        assert done.n_changed == done.n_elements
        train(state, 2)
        pub.publish().result()
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_no_anchor_is_offered_of_a_baseline_that_went_bad() -> None:
    store, state = MemoryStore(), weights()
    with publisher(store, state, anchors=ww.AnchorPolicy(every=2), skips=()) as pub:
        pub.publish().result()
        train(state, 1)
        pub.publish().result()
        advance = pub._baseline.advance

        def advance_badly(*arguments: object) -> None:
            advance(*arguments)  # type: ignore[arg-type]
            pub._baseline._held["norm"].array[3] ^= 1

        pub._baseline.advance = advance_badly  # type: ignore[method-assign, assignment]
        train(state, 2)
        pub.publish().result()
        pub._baseline.advance = advance  # type: ignore[method-assign]
        offers = [info.key for info in store.list(layout.LOG) if "-anchor-" in info.key]
        assert offers == []
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_nothing_changed_gives_an_empty_version_or_none_at_all() -> None:
    store, state = MemoryStore(), weights()
    with publisher(store, state) as pub:
        pub.publish().result()
        empty = pub.publish().result()
    assert (empty.version, empty.n_bytes, empty.n_changed) == (1, 0, 0)
    with publisher(store, state, skip_empty=True) as pub:
        before = pub.version
        assert pub.publish().result().version == -1
        assert pub.version == before
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_observing_measures_and_sends_nothing() -> None:
    seen: list[Published] = []
    store, state = MemoryStore(), weights()
    with publisher(store, state, mode="observe", on_published=seen.append) as pub:
        pub.publish().result()
        train(state, 1, share=0.02)
        done = pub.publish().result()
    assert done.version == -1
    assert done.n_changed == 2 * int(0.02 * 3000) + 4
    assert done.n_bytes > 0
    assert len(seen) == 2
    assert list(store.list("")) == []


def test_validating_says_bit_identical_each_time() -> None:
    store, state = MemoryStore(), weights()
    with publisher(store, state, mode="validate") as pub:
        pub.publish().result()
        train(state, 1)
        assert pub.publish().result().is_validated
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_validating_says_exactly_what_differs_and_does_not_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from weightwire.apply import staging

    store, state = MemoryStore(), weights()
    with publisher(store, state, mode="validate") as pub:
        pub.publish().result()
        train(state, 1)
        read = staging.Staging.read

        def wrong(self: staging.Staging, name: str, start: int, stop: int) -> np.ndarray:
            bits = np.array(read(self, name, start, stop))
            if name == "mlp" and pub._pending is None and not np.array_equal(bits, bits * 0):
                bits[11] ^= 1
            return bits

        monkeypatch.setattr(staging.Staging, "read", wrong)
        monkeypatch.setattr(staging, "proven_changes", lambda record, old: record.changes(old))
        with pytest.raises(TargetMismatch, match=r"'mlp' differs in \d+ elements, first at 11"):
            pub.publish().result()
        assert pub.version == 0


def test_publishing_returns_the_version_under_way_instead_of_waiting() -> None:
    store, state = Broken(), weights()
    gate = threading.Event()
    put = store.put

    def slow(key: str, data: object) -> None:
        if key.startswith(layout.PATCHES):
            gate.wait()
        put(key, data)

    store.put = slow  # type: ignore[method-assign]
    with Publisher(store, state) as pub:
        pub.publish().result()
        train(state, 1)
        first = pub.publish()
        assert not first.done()
        assert pub.publish(wait=False) is first
        gate.set()
        assert first.result().version == 1


def test_overlapping_read_refuses_a_state_that_moved_meanwhile() -> None:
    model = torch.nn.Linear(64, 64)
    with Publisher(MemoryStore(), model, overlap=True) as pub:
        pub.publish().result()
        with torch.no_grad():
            model.weight.add_(1)
        held = threading.Event()
        submit = pub._reads.submit
        pub._reads.submit = lambda job: submit(lambda: (held.wait(), job())[1])  # type: ignore[method-assign, assignment]
        future = pub.publish()
        with torch.no_grad():
            model.weight.add_(1)
        held.set()
        with pytest.raises(StateMoved, match="weight"):
            future.result()
        pub._reads.submit = submit  # type: ignore[method-assign]
        done = pub.publish()
        pub.wait_until_read()
        assert done.result().digest == ww.digest(model)


def test_callable_state_is_asked_anew_at_every_publish() -> None:
    store, state = MemoryStore(), weights()
    calls = []

    def pairs() -> object:
        calls.append(1)
        return iter(state.items())

    with publisher(store, pairs) as pub:
        pub.publish().result()
        train(state, 1)
        pub.publish().result()
    assert len(calls) == 2
    assert held_by_a_new_receiver(store) == bits_of(state)


def test_closed_publisher_refuses_to_publish() -> None:
    pub = publisher(MemoryStore(), weights())
    pub.close()
    with pytest.raises(PublisherClosed):
        pub.publish()


def test_tensors_may_come_and_go_between_versions() -> None:
    store, state = MemoryStore(), weights()
    live = zeros_like(state)
    with publisher(store, state) as pub:
        pub.publish().result()
        sub = ww.Subscriber(store, live, background=inline)
        sub.update()
        state["new"] = np.arange(5, dtype=np.int32)
        del state["norm"]
        state["embed"] = state["embed"].reshape(10, -1).copy()
        pub.publish().result()
        sub.update()
        assert bits_of(live) == bits_of(state)
        train(state, 3)
        state["new"] += 1
        pub.publish().result()
        sub.update()
    assert bits_of(live) == bits_of(state)
    assert live["embed"].shape == state["embed"].shape


def test_tied_tensors_are_sent_once_and_written_once() -> None:
    store = MemoryStore()
    shared = np.arange(1000, dtype=np.float32)
    state = {"embed": shared, "head": shared}
    live: dict[str, np.ndarray] = {}
    with publisher(store, state) as pub:
        first = pub.publish().result()
        sub = ww.Subscriber(store, live, background=inline)
        sub.update()
        shared[5] = -1
        pub.publish().result()
        sub.update()
    assert first.n_elements == 1000
    assert bits_of(live) == bits_of(state)
    assert live["embed"] is live["head"]
