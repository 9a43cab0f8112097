from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightwire.bench.cases import chain_cases
from weightwire.bench.chain import make_chain, read_chain
from weightwire.errors import MalformedHeader, MalformedRecord, NotAPatch, OutputExists

SOUND: dict[str, Any] = {
    "w|shape": np.array([2, 2], np.int64),
    "w|base": np.array([1, 2, 3, 4], np.uint16),
    "w|idx1": np.array([0, 3], np.uint32),
    "w|val1": np.array([9, 8], np.uint16),
    "w|idx2": np.array([0], np.uint32),
    "w|val2": np.array([1], np.uint16),
}


def write(path: Path, arrays: dict[str, Any]) -> Path:
    np.savez(path / "chain.npz", **arrays)
    return path / "chain.npz"


def test_versions_are_replayed_step_by_step(tmp_path: Path) -> None:
    chain = read_chain(write(tmp_path, SOUND))
    states = [state["w"].tolist() for state in chain.versions()]
    assert states == [[1, 2, 3, 4], [9, 2, 3, 8], [1, 2, 3, 8]]
    assert chain.tensors[0].spec.shape == (2, 2)


def test_a_version_is_not_touched_by_the_next(tmp_path: Path) -> None:
    versions = read_chain(write(tmp_path, SOUND)).versions()
    first = next(versions)["w"]
    next(versions)
    assert first.tolist() == [1, 2, 3, 4]


def test_a_chain_gives_its_single_steps_and_their_net_change(tmp_path: Path) -> None:
    single, merged = chain_cases(read_chain(write(tmp_path, SOUND)))
    assert [single.n_changed, merged.n_changed] == [3, 1]
    assert [len(single.pairs), len(merged.pairs)] == [2, 1]
    assert merged.pairs[0].density == 0.25


def test_a_made_chain_reads_back_with_its_steps_and_density(tmp_path: Path) -> None:
    make_chain(tmp_path / "made.npz", n_steps=3, density=0.02, seed=5)
    chain = read_chain(tmp_path / "made.npz")
    single, _ = chain_cases(chain)
    assert chain.n_steps == 3
    assert single.n_changed / single.n_elements == pytest.approx(0.02, rel=0.15)


def test_the_same_seed_makes_the_same_chain(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        make_chain(tmp_path / name, n_steps=2, seed=5)
    first, second = (list(read_chain(tmp_path / n).versions()) for n in ("a.npz", "b.npz"))
    for old, new in zip(first, second, strict=True):
        assert all(np.array_equal(old[name], new[name]) for name in old)


def test_a_chain_is_not_made_over_another_file(tmp_path: Path) -> None:
    (tmp_path / "made.npz").write_bytes(b"mine")
    with pytest.raises(OutputExists):
        make_chain(tmp_path / "made.npz")
    assert (tmp_path / "made.npz").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"w|shape": None}, MalformedHeader, "no array"),
        ({"w|shape": np.array([2, 3])}, MalformedHeader, "shape says"),
        ({"w|shape": np.array([-2, -2])}, MalformedHeader, "negative"),
        ({"w|shape": np.array([2.0, 2.0])}, MalformedHeader, "float64"),
        ({"w|base": np.zeros(4, np.float32)}, MalformedHeader, "float32"),
        ({"w|base": np.zeros((2, 2), np.uint16)}, MalformedHeader, "2 dimensions"),
        ({"w|val1": None}, MalformedHeader, "no array"),
        ({"w|idx1": None}, MalformedHeader, "no array"),
        ({"w|idx1": np.array([0, 4], np.uint32)}, MalformedRecord, "beyond"),
        ({"w|idx1": np.array([3, 0], np.uint32)}, MalformedRecord, "ascend"),
        ({"w|idx1": np.array([3, 3], np.uint32)}, MalformedRecord, "ascend"),
        ({"w|idx1": np.array([3], np.uint32)}, MalformedRecord, "more positions"),
        ({"w|base": None}, NotAPatch, "no chain"),
        (
            {"v|shape": np.array([0]), "v|base": np.empty(0, np.uint16)},
            MalformedHeader,
            "different numbers of steps",
        ),
    ],
)
def test_a_chain_file_that_lies_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], reason: str
) -> None:
    arrays = {key: value for key, value in (SOUND | changes).items() if value is not None}
    with pytest.raises(error, match=reason):
        read_chain(write(tmp_path, arrays))


def test_a_pickled_array_is_refused_without_being_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, SOUND | {"w|base": np.array([{}], object)})
    with pytest.raises(NotAPatch):
        read_chain(path)


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "chain.npz").write_bytes(content)
    with pytest.raises(NotAPatch):
        read_chain(tmp_path / "chain.npz")


def test_a_truncated_archive_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, SOUND)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(NotAPatch):
        read_chain(path)


def test_a_single_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(NotAPatch, match="single array"):
        read_chain(tmp_path / "one.npy")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAPatch):
        read_chain(tmp_path / "nowhere.npz")
