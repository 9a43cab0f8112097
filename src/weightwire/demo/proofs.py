"""What the demo claims, each claim with the numbers that would refute it.

Every function compares what one process said with what another said: no claim rests on the word of
the code it is about.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weightwire.demo.record import Record
from weightwire.demo.settings import Arm, Settings

_N_NAMED = 3


@dataclass(frozen=True)
class Verdict:
    """One claim, and whether it held."""

    claim: str
    n_checked: int
    failures: tuple[str, ...]
    """What refuted it, the first few."""

    @property
    def holds(self) -> bool:
        """Nothing refuted it, and something could have."""
        return not self.failures and self.n_checked > 0

    def __str__(self) -> str:
        if self.holds:
            return f"{self.claim} ({self.n_checked} checked)"
        found = "; ".join(self.failures) or "nothing was there to check"
        return f"{self.claim}: NO. {found}"


def judge(record: Record, settings: Settings) -> list[Verdict]:
    """All claims."""
    verdicts = [
        verdict
        for arm in settings.arms
        for verdict in (
            _trainer_agrees(record, settings, arm),
            _workers_agree(record, settings, arm),
        )
    ]
    verdicts.append(_counts_agree(record, settings))
    verdicts.append(_is_as_stale_as_settled(record, settings))
    if {"patches", "full"} <= {*settings.arms}:
        verdicts += [
            _same(record, settings, "losses", lambda arm, step: _loss_bits(record, arm, step)),
            _same(record, settings, "rewards", lambda arm, step: _reward_bits(record, arm, step)),
            _same(record, settings, "rollouts", lambda arm, step: _rollouts(record, arm, step)),
            _same_weights(record, settings),
        ]
    if record.killed:
        verdicts.append(_came_back(record))
    return verdicts


def _trainer_agrees(record: Record, settings: Settings, arm: Arm) -> Verdict:
    """What receivers are told is what the trainer has, rounded to bf16."""
    failures = []
    for version in range(settings.n_steps + 1):
        sent = record.sent[arm].get(version)
        if sent is None:
            failures.append(f"version {version} was not published")
        elif sent.digest != sent.trainer_digest:
            failures.append(f"version {version}: {sent.digest} is not {sent.trainer_digest}")
    claim = f"{arm}: every published digest is that of the trainer's own weights in bf16"
    return _verdict(claim, settings.n_steps + 1, failures)


def _workers_agree(record: Record, settings: Settings, arm: Arm) -> Verdict:
    """Every version, on every worker, from its live weights."""
    failures, n_checked = [], 0
    for worker in range(settings.n_workers):
        for version in range(settings.n_steps + 1):
            n_checked += 1
            failures += _found_on(record, arm, worker, version)
    return _verdict(
        f"{arm}: every version on every worker is the trainer's, bit for bit", n_checked, failures
    )


def _found_on(record: Record, arm: Arm, worker: int, version: int) -> list[str]:
    sent = record.sent[arm].get(version)
    wanted = sent.trainer_digest if sent else ""
    found = [each for each in record.activations(arm, version) if each.worker == worker]
    where = f"worker {worker}, version {version}"
    if not found:
        return [f"{where} was never held"]
    wrong = [each for each in found if each.live_digest != wanted or not each.is_exact]
    return [f"{where}: live weights have {each.live_digest}, not {wanted}" for each in wrong]


def _counts_agree(record: Record, settings: Settings) -> Verdict:
    sent = [each for arm in settings.arms for each in record.sent[arm].values()]
    failures = [
        f"version {each.version}: {each.n_changed} against {each.n_counted}"
        for each in sent
        if each.n_changed != each.n_counted
    ]
    return _verdict("as many elements were sent as a plain comparison counts", len(sent), failures)


def _is_as_stale_as_settled(record: Record, settings: Settings) -> Verdict:
    done = [each for arm in settings.arms for each in record.delivered[arm]]
    failures = [
        f"batch {each.batch} of worker {each.worker} by version {each.version}"
        for each in done
        if each.version != settings.version_for(each.batch)
    ]
    claim = f"every batch was generated exactly min(k, {settings.staleness}) versions behind"
    return _verdict(claim, len(done), failures)


def _same(
    record: Record, settings: Settings, what: str, get: Callable[[Arm, int], object]
) -> Verdict:
    """One number per step, in both arms."""
    del record
    failures = []
    for step in range(1, settings.n_steps + 1):
        ours, theirs = get("patches", step), get("full", step)
        if ours is None or ours != theirs:
            failures.append(f"step {step}: {ours} against {theirs}")
    claim = f"{what} with patches are those with whole files, bit for bit"
    return _verdict(claim, settings.n_steps, failures)


def _same_weights(record: Record, settings: Settings) -> Verdict:
    failures = []
    for version in range(settings.n_steps + 1):
        ours, theirs = (record.sent[arm].get(version) for arm in ("patches", "full"))
        if ours is None or theirs is None or ours.trainer_digest != theirs.trainer_digest:
            failures.append(f"version {version} differs")
    claim = "the weights of every version are the same in both runs"
    return _verdict(claim, settings.n_steps + 1, failures)


def _came_back(record: Record) -> Verdict:
    n_killed = len(record.killed)
    failures = [] if record.n_returned >= n_killed else ["a killed worker did not come back"]
    return _verdict("a killed worker came back and went on", n_killed, failures)


def _loss_bits(record: Record, arm: Arm, step: int) -> str | None:
    stepped = record.steps[arm].get(step)
    return _bits(stepped.loss) if stepped else None


def _reward_bits(record: Record, arm: Arm, step: int) -> str | None:
    stepped = record.steps[arm].get(step)
    return _bits(stepped.reward) if stepped else None


def _rollouts(record: Record, arm: Arm, step: int) -> str | None:
    stepped = record.steps[arm].get(step)
    return stepped.rollouts_sha256 if stepped else None


def _bits(number: float) -> str:
    """Equal bits, not equal numbers: −0 is not 0, and NaN is itself."""
    return struct.pack(">d", number).hex()


def _verdict(claim: str, n_checked: int, failures: Iterable[str]) -> Verdict:
    found = tuple(failures)
    more = (f"and {len(found) - _N_NAMED} more",) if len(found) > _N_NAMED else ()
    return Verdict(claim, n_checked, found[:_N_NAMED] + more)
