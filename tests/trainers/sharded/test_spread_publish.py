"""Many ranks publish what one process would have published: the same bits, the same digest."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spread_states import Cluster, State, received

import weightwire as ww
from sample_training import bits_of, inline, train, weights
from weightwire.store.audit import audit
from weightwire.store.memory import MemoryStore
from weightwire.store.run import Run, require_identity

DTYPES = (ml_dtypes.bfloat16, np.float32, np.float16, np.int8)


@st.composite
def states(draw: st.DrawFn) -> State:
    """A few tensors of any shape: scalars, empty ones, fewer rows than ranks."""
    source = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    state = {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(0, 7), max_size=3))
        n_bytes = np.dtype(dtype := draw(st.sampled_from(DTYPES))).itemsize
        raw = source.integers(0, 256, (int(np.prod(shape)), n_bytes), dtype=np.uint8)
        state[f"t{number}"] = raw.reshape(-1).view(dtype).reshape(shape)
    return state


def moved(draw: st.DrawFn, state: State) -> State:
    """The next version: some bits differ, a tensor may come, go, tie, or change its shape."""
    new = {name: tensor.copy() for name, tensor in state.items()}
    for tensor in new.values():
        flat = tensor.reshape(-1).view(np.uint8)
        for place in draw(st.lists(st.integers(0, max(len(flat) - 1, 0)), max_size=3)):
            if len(flat):
                flat[place] ^= 1
    change = draw(st.sampled_from(["none", "none", "new", "gone", "tie", "reshape", "retype"]))
    name = min(new)
    if change == "new":
        new["late"] = np.arange(draw(st.integers(0, 9)), dtype=np.float32)
    elif change == "gone" and len(new) > 1:
        del new[name]
    elif change == "tie":
        new["alias"] = new[name]
    elif change == "reshape":
        new[name] = new[name].reshape(-1, 1)
    elif change == "retype":
        new[name] = np.ones(new[name].shape, np.int16)
    return new


@given(data=st.data(), first=states(), n_ranks=st.integers(1, 5))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_ranks_publish_what_one_process_would(
    data: st.DataObject, first: State, n_ranks: int
) -> None:
    store, alone = MemoryStore(), MemoryStore()
    held = dict(first)
    cluster = Cluster(store, first, n_ranks)
    single = ww.Publisher(alone, lambda: held, background=inline, n_threads=1)
    for _ in range(4):
        one, many = single.publish().result(), cluster.published()
        assert (many.version, many.digest) == (one.version, one.digest)
        assert many.n_elements == one.n_elements
        assert received(store) == bits_of(held)
        held = moved(data.draw, held)
        cluster.state, cluster.cuts = held, _cuts(data.draw, held, n_ranks)
    cluster.close()
    single.close()
    run = Run(store, require_identity(store))
    assert not audit(run, lambda *_: lambda _: None)[0].damages


def _cuts(draw: st.DrawFn, state: State, n_ranks: int) -> dict[str, list[int]]:
    """Anywhere: also through the middle of a row, and elsewhere than last time."""
    if draw(st.booleans()):
        return {
            name: [0, *sorted(draw(_places(tensor.size, n_ranks - 1))), tensor.size]
            for name, tensor in state.items()
        }
    from spread_states import even_cuts

    return even_cuts(state, n_ranks)


def _places(size: int, n: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, size), min_size=n, max_size=n)


def test_every_rank_sends_its_own_buckets_and_rank_0_one_index() -> None:
    store, state = MemoryStore(), weights()
    cluster = Cluster(store, state, 4)
    cluster.published()
    train(state, 1)
    cluster.published(step=17)
    files = [info.key.rsplit("/", 1)[1] for info in store.list("patches/")]
    assert sorted(files) == [
        "bucket-00000.safetensors",
        "bucket-2500000.safetensors",
        "bucket-5000000.safetensors",
        "bucket-7500000.safetensors",
        "patch.json",
    ]


def test_part_without_a_change_of_a_tensor_that_changed_elsewhere_is_sent_too() -> None:
    store, state = MemoryStore(), weights()
    cluster = Cluster(store, state, 3)
    cluster.published()
    state["mlp"][-1] += 1  # rank 2's alone
    done = cluster.published()
    assert done.n_changed == 1
    assert received(store) == bits_of(state)


def test_nothing_changed_is_an_empty_version_or_none() -> None:
    store, state = MemoryStore(), weights()
    cluster = Cluster(store, state, 2)
    cluster.published()
    assert cluster.published().version == 1
    assert not list(store.list("patches/"))
    cluster.close()
    frugal = Cluster(MemoryStore(), state, 2, skip_empty=True)
    assert [frugal.published().version for _ in range(3)] == [0, -1, -1]


def test_anchors_are_streamed_from_all_ranks_while_versions_go_on() -> None:
    store, state = MemoryStore(), weights()
    cluster = Cluster(store, state, 3, anchors=ww.AnchorPolicy(every=2))
    for step in range(6):
        train(state, step)
        cluster.published()
    anchors = {info.key.split("-")[0] for info in store.list("log/") if "anchor" in info.key}
    assert anchors == {f"log/{version:012d}" for version in (2, 4)}
    cluster.close()
    for key in [info.key for info in store.list("patches/000000000003-000000000002")]:
        store.delete([key])  # only the later anchor leads to the newest version now
    assert received(store) == bits_of(state)


@pytest.mark.parametrize("background", ["inline", "threads"])
def test_a_restart_with_baseline_files_goes_on_with_a_patch(
    tmp_path: object, background: str
) -> None:
    from weightwire.workers import threads

    store, state = MemoryStore(), weights()
    options = {
        "baseline": tmp_path,
        "background": inline if background == "inline" else threads,
    }
    first = Cluster(store, state, 2, **options)
    first.published()
    train(state, 1)
    first.published()
    first.close()
    train(state, 2)
    second = Cluster(store, state, 2, **options)
    done = second.published()
    second.close()
    assert done.version == 3  # 2 is the claim
    assert done.n_changed < 500
    assert received(store) == bits_of(state)


def test_observing_ranks_count_and_send_nothing() -> None:
    state = weights()
    cluster = Cluster("nowhere/at/all", state, 3, mode="observe")
    cluster.published()
    train(state, 1)
    done = cluster.published()
    alone = ww.Publisher("nowhere/at/all", state, mode="observe", background=inline)
    alone.publish()
    assert (done.version, done.digest) == (-1, alone.publish().result().digest)
    assert 0 < done.n_changed < 500
