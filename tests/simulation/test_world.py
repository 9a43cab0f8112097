"""A thousand worlds, and in none of them a broken promise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from weightwire.testing.simulate import all_kinds, main, run_block
from weightwire.testing.world import run_world

N_BLOCKS = 20
SEEDS_PER_BLOCK = 50


@pytest.mark.parametrize(
    "block",
    [
        *range(N_BLOCKS // 4),
        *(pytest.param(n, marks=pytest.mark.long) for n in range(N_BLOCKS // 4, N_BLOCKS)),
    ],
)
def test_no_world_breaks_a_promise(
    block: int, record_property: Callable[[str, object], None]
) -> None:
    first = block * SEEDS_PER_BLOCK
    tally = run_block(range(first, first + SEEDS_PER_BLOCK))
    record_property("faults", json.dumps(tally.faults))
    record_property("worlds", tally.n_worlds)
    assert not tally.violations, "\n\n".join(tally.violations)
    assert tally.n_worlds == SEEDS_PER_BLOCK
    assert tally.faults.total() > SEEDS_PER_BLOCK
    assert tally.n_versions > 5 * SEEDS_PER_BLOCK


def test_every_kind_of_fault_occurs() -> None:
    missing, first = set(all_kinds()), 2_000
    while missing and first < 2_300:
        missing -= set(run_block(range(first, first + 10)).faults)
        first += 10
    assert not missing


def test_a_seed_replays_its_world_event_by_event() -> None:
    for seed in (3, 17, 42):
        assert run_world(seed) == run_world(seed)


def test_one_world_can_be_traced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "5", "--trace"]) == 0
    shown = capsys.readouterr().out
    assert "version 0 of epoch 1 exists" in shown
    assert "everything is healed" in shown


def test_many_worlds_end_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3", "--first", "100"]) == 0
    shown = capsys.readouterr().out
    assert "3 worlds in" in shown
    assert all(kind in shown for kind in all_kinds())
    assert "0 violations" in shown


def test_worlds_leave_nothing_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("weightwire.testing.world.world._fast_disk", lambda: str(tmp_path))
    run_block(range(200, 205))
    assert not list(tmp_path.iterdir())
