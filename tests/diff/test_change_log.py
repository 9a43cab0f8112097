"""What a diff tells its log is what it wrote: applied to the old state, it gives the new one."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire.codec import CODECS
from weightwire.codec.record import Kind, RecordHead
from weightwire.codec.writer import MemorySink
from weightwire.diff.compare import diff_states
from weightwire.diff.memory import MemoryState
from weightwire.model import Bits, Changes

State = dict[str, npt.NDArray[np.unsignedinteger]]
every_codec = pytest.mark.parametrize("codec", CODECS)


class KeptLog:
    """Remembers everything it is told."""

    def __init__(self) -> None:
        self.added: list[tuple[RecordHead, Changes]] = []
        self.threads: set[int] = set()

    def add(self, head: RecordHead, changes: Changes) -> None:
        self.added.append((head, changes))
        self.threads.add(threading.get_ident())

    def keys(self) -> list[str]:
        return [head.key for head, _ in self.added]


def logged(old: State, new: State, codec: str = "compact") -> KeptLog:
    log = KeptLog()
    diff_states(MemoryState(old.items()), MemoryState(new.items()), MemorySink(), codec, log=log)
    return log


def advanced(old: State, log: KeptLog) -> dict[str, Bits]:
    """The old state's bits, brought up to date by the log alone."""
    bits: dict[str, Bits] = {}
    for head, changes in log.added:
        spec = head.spec
        if head.start == 0 and head.kind is Kind.FULL:
            bits[spec.name] = np.zeros(spec.n_elements, spec.dtype.bits_dtype)
        elif head.start == 0:
            bits[spec.name] = old[spec.name].reshape(-1).copy()
        bits[spec.name][head.start :][changes.positions] = changes.bits
    return bits


@st.composite
def state_pairs(draw: st.DrawFn) -> tuple[State, State]:
    """Two states of the same few names: changed a little or a lot, retyped, new, removed, empty."""
    old, new = {}, {}
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True)):
        width = draw(st.sampled_from([1, 2, 4, 8]))
        source = np.random.default_rng(draw(st.integers(0, 1 << 32)))
        bits = source.integers(0, 256, width * draw(st.integers(0, 90)), np.uint8).view(
            f"<u{width}"
        )
        moved = np.where(source.random(len(bits)) < draw(st.floats(0, 1)), ~bits, bits)
        fate = draw(st.sampled_from(["kept", "kept", "kept", "new", "removed", "retyped"]))
        if fate != "new":
            old[name] = bits
        if fate != "removed":
            new[name] = moved.view(np.uint8) if fate == "retyped" else moved
    return old, new


@every_codec
@settings(max_examples=60, deadline=None)
@given(pair=state_pairs())
def test_the_log_applied_to_the_old_state_gives_the_new_one(
    codec: str, pair: tuple[State, State]
) -> None:
    old, new = pair
    found = advanced(old, logged(old, new, codec))
    assert {name: bits.tobytes() for name, bits in found.items()} == {
        name: bits.tobytes() for name, bits in new.items()
    }


@every_codec
@pytest.mark.parametrize("n_threads", [1, 4])
def test_pieces_are_told_in_state_order_from_the_calling_thread(
    codec: str, n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightwire.limits.PIECE_ELEMENTS", 1000)
    old = {"b": np.arange(2500, dtype="<u2"), "a": np.arange(10, dtype="<u4")}
    new = {"b": old["b"].copy(), "a": old["a"] + 1, "c": np.arange(1500, dtype="<u1")}
    new["b"][[5, 1999, 2000, 2499]] += 1
    log = KeptLog()
    states = MemoryState(old.items()), MemoryState(new.items())
    diff_states(*states, MemorySink(), codec, n_threads=n_threads, log=log)
    assert log.keys() == ["b", "b@1000", "b@2000", "a", "c", "c@1000"]
    assert [changes.positions.tolist() for _, changes in log.added[:3]] == [[5], [999], [0, 499]]
    assert log.threads == {threading.get_ident()}
    assert {name: bits.tobytes() for name, bits in advanced(old, log).items()} == {
        name: bits.tobytes() for name, bits in new.items()
    }


def test_pieces_without_a_change_are_told_too() -> None:
    old = {"x": np.arange(6, dtype="<u2"), "y": np.empty(0, "<u4")}
    log = logged(old, {"x": old["x"].reshape(2, 3), "y": old["y"]})
    assert log.keys() == ["x", "y"]
    assert [len(changes) for _, changes in log.added] == [0, 0]
    assert (log.added[0][0].base_shape, log.added[0][0].spec.shape) == ((6,), (2, 3))


@every_codec
def test_what_was_logged_stays_when_live_memory_moves_on(codec: str) -> None:
    old = {"x": np.arange(100, dtype="<u2")}
    new = {"x": old["x"] ^ 1, "fresh": np.arange(50, dtype="<u8")}
    expected = {name: bits.tobytes() for name, bits in new.items()}
    log = logged(old, new, codec)
    for bits in new.values():
        bits[:] = 77
    assert {name: bits.tobytes() for name, bits in advanced(old, log).items()} == expected
    assert log.added[1][0].kind is Kind.FULL
    assert log.added[1][1].positions.tolist() == list(range(50))


@every_codec
def test_a_log_changes_no_byte_of_the_patch(codec: str) -> None:
    bits = np.arange(3000, dtype="<u2")
    states = MemoryState({"x": bits}.items()), MemoryState({"x": bits ^ (bits % 3 == 0)}.items())
    silent, told = MemorySink(), MemorySink()
    one = diff_states(*states, silent, codec)
    other = diff_states(*states, told, codec, log=KeptLog())
    assert silent.files == told.files
    assert one == other
