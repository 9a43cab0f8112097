"""The field's further cases, each from Publisher through a store to Subscribers, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from field_worlds import Engine, Tensors, Trainer, bits_in, bits_of, first_state

import weightwire as ww
from weightwire.checkpoint import Checkpoint
from weightwire.digest import digest_state
from weightwire.store.memory import MemoryStore

NAN, OTHER_NAN, INFINITY, MINUS_ZERO, SUBNORMAL = 0x7FC0, 0x7FC5, 0x7F80, 0x8000, 0x0001


def set_bits(name: str, *patterns: int) -> Callable[[Tensors], None]:
    def change(state: Tensors) -> None:
        bits_in(state[name])[: len(patterns)] = patterns

    return change


def change_scalar(state: Tensors) -> None:
    state["step"][...] += 1


def change_ends(state: Tensors) -> None:
    """One gap that no 16-bit distance can bridge."""
    bits_in(state["long"])[[0, -1]] ^= 1


def rename(state: Tensors) -> None:
    state["renamed"] = state.pop("norm")


def remove(state: Tensors) -> None:
    del state["norm"]


def add(state: Tensors) -> None:
    state["new"] = np.linspace(-1, 1, 77, dtype=np.float16)


def reshape(state: Tensors) -> None:
    state["embed"] = state["embed"].reshape(20, 50)


def resize(state: Tensors) -> None:
    """Rows are added, as when a vocabulary grows."""
    more = np.ones((6, 20), ml_dtypes.bfloat16)
    state["embed"] = np.concatenate([state["embed"], more])


def retype(state: Tensors) -> None:
    state["norm"] = state["norm"].astype(np.float64)


def change_every_type(state: Tensors) -> None:
    for tensor in state.values():
        if tensor.size and tensor.dtype != np.bool_:
            bits_in(tensor)[-1] ^= 1
    state["flags"][3] ^= True


def change_everything(state: Tensors) -> None:
    for tensor in state.values():
        if tensor.dtype != np.bool_:
            bits_in(tensor)[...] ^= 1


def nothing(state: Tensors) -> None:
    """Not one bit."""


CASES: dict[str, Callable[[Tensors], None]] = {
    "NaN becomes another NaN": set_bits("special", OTHER_NAN, NAN),
    "infinities": set_bits("special", INFINITY, INFINITY | 0x8000),
    "zero changes its sign": set_bits("special", NAN, OTHER_NAN, MINUS_ZERO, 0),
    "subnormals": set_bits("special", SUBNORMAL, 0x8001, 0x007F),
    "0-d tensor": change_scalar,
    "gap beyond 65535": change_ends,
    "new tensor": add,
    "removed tensor": remove,
    "renamed tensor": rename,
    "reshaped tensor": reshape,
    "resized tensor": resize,
    "retyped tensor": retype,
    "every type": change_every_type,
    "nothing changed": nothing,
    "everything changed": change_everything,
}


def rich_state() -> Tensors:
    """Every element type NumPy and ml_dtypes have, special values, an empty tensor, a long one."""
    state = first_state()
    state["special"] = np.array([NAN, OTHER_NAN, 0, MINUS_ZERO, 1], "<u2").view(ml_dtypes.bfloat16)
    state["empty"] = np.empty((0, 4), np.float32)
    state["long"] = np.zeros(200_000, np.float16)
    state["flags"] = np.zeros(9, np.bool_)
    floats = ("float8_e4m3fn", "float8_e5m2", "float16", "float32", "float64", "complex64")
    for kind in (*floats, "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        dtype = getattr(ml_dtypes, kind) if "8_" in kind else kind
        state[kind] = np.arange(40).astype(dtype)
    return state


@pytest.mark.parametrize("case", CASES)
def test_a_change_arrives_bit_for_bit_in_memory_in_files_and_for_newcomers(
    tmp_path: Path, case: str
) -> None:
    store = MemoryStore()
    trainer = Trainer(store, rich_state(), mode="validate")
    first = trainer.publish()
    engine = Engine(store, trainer.state)
    folder = ww.Subscriber(store, tmp_path / "target", worker="folder")
    engine.update()
    folder.update()
    CASES[case](trainer.state)
    published = trainer.publish()
    assert published.is_validated
    assert (published.digest == first.digest) == (case == "nothing changed")
    engine.update()
    assert engine.holds(trainer.state)
    folder.update()
    with Checkpoint.open(tmp_path / "target") as checkpoint:
        assert digest_state(checkpoint)[0] == ww.digest(trainer.state)
    newcomer: Tensors = {}
    with ww.Subscriber(store, newcomer, receipts=False) as late:
        late.update()
    assert bits_of(newcomer) == bits_of(trainer.state)
    engine.close()
    folder.close()
