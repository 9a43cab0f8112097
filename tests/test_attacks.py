"""Every attack in ``attacks/`` is refused with a typed error before anything is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "attacks"))

import run
from judge import HARMLESS, judge_files
from registry import ATTACKS, TRICKS, Attack, FolderTrick
from sample import take_apart, true_files

N_MOST = {"native": 300, "reference": 60}
"""Cases of one attack tried here; ``python attacks/run.py`` tries them all."""

_RUNS = [(attack, codec) for attack in ATTACKS for codec in attack.codecs]


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize(("attack", "codec"), _RUNS, ids=[f"{a.name}-{c}" for a, c in _RUNS])
def test_attack_is_refused_before_anything_is_written(
    attack: Attack, codec: str, backend: str
) -> None:
    outcomes = run.run_attack(attack, codec, backend, N_MOST[backend])
    assert outcomes.total()
    assert not run.broken_promises(outcomes, may_pass=attack.may_pass)


@pytest.mark.parametrize("trick", TRICKS, ids=lambda trick: trick.name)
def test_trick_with_a_folder_is_refused(trick: FolderTrick) -> None:
    outcomes = run.run_trick(trick)
    assert outcomes.total() == 1
    assert not run.broken_promises(outcomes, may_pass=False)


@pytest.mark.parametrize("codec", ["compact", "plain"])
def test_true_patch_passes_the_judge_whole_and_put_together_again(codec: str) -> None:
    assert judge_files(true_files(codec)) == HARMLESS
    assert take_apart(codec).files() == true_files(codec)
