"""What generates rollouts: a contract, and the plain torch module that fulfils it.

A worker tells its engine which version comes next (``expect``), generates with the one it has
(``sample``), then lets it change (``take``) and has it read its own live weights (``prove``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import weightwire as ww
from weightwire.clock import Clock
from weightwire.demo.policy import empty_policy
from weightwire.demo.receiving import Received, open_receiver
from weightwire.demo.sampling import draw_noise, sample, seed_for
from weightwire.demo.settings import Arm, Settings


@dataclass(frozen=True)
class Proof:
    """What an engine found when it read its live weights."""

    digest: str
    is_exact: bool
    """Nothing was lost or added where weights are kept wider than published."""


@dataclass(frozen=True)
class Order:
    """One prompt to answer several times."""

    prompt_ids: list[int]
    seed: int
    n_answers: int
    n_tokens: int


@dataclass(frozen=True)
class Answers:
    """Token numbers and their log-probabilities, [answers][tokens]."""

    ids: list[list[int]]
    log_probs: list[list[float]]


class RolloutEngine(Protocol):
    """A copy of the policy that generates."""

    def expect(self, version: int) -> None:
        """Let a version come while the engine generates."""

    def take(self, version: int) -> Received:
        """Serve that version from now on."""

    def prove(self) -> Proof:
        """Read the live weights, from scratch."""

    def sample(self, orders: Sequence[Order]) -> list[Answers]:
        """Answer prompts with the version it has."""

    def close(self) -> None:
        """Let go of threads and processes."""


class TorchEngine:
    """A transformers module in this process, fp32, following a bf16 run."""

    def __init__(self, settings: Settings, arm: Arm, worker: int, clock: Clock) -> None:
        self._module = empty_policy(settings, seed_for(settings.seed, 1 + worker))
        self._receiver = open_receiver(settings, arm, worker, self._module, clock)
        self._flip_at = 1 if settings.flip_worker == worker and arm == "patches" else -1

    def expect(self, version: int) -> None:
        """Fetch it in a thread."""
        self._receiver.expect(version)

    def take(self, version: int) -> Received:
        """Write it into the module.

        Raises:
            WeightwireError: whatever the way there ran into.
        """
        received = self._receiver.take(version)
        if version == self._flip_at:
            self._flip_one_bit()
        return received

    def prove(self) -> Proof:
        """Digest the module as bf16, and see whether it is bf16 all through."""
        import torch

        with torch.no_grad():
            is_exact = all(
                torch.equal(each.view(torch.int32), each.bfloat16().float().view(torch.int32))
                for each in self._module.parameters()
            )
        return Proof(ww.digest(ww.cast(self._module, "bf16")), is_exact)

    def sample(self, orders: Sequence[Order]) -> list[Answers]:
        """All orders in one batch; their prompts have one length."""
        import torch

        n_words = self._module.config.vocab_size
        noise = [draw_noise(each.seed, each.n_answers, each.n_tokens, n_words) for each in orders]
        prompts = [each.prompt_ids for each in orders for _ in range(each.n_answers)]
        ids, log_probs = sample(self._module, torch.tensor(prompts), torch.cat(noise))
        return [
            Answers(some.tolist(), their.tolist())
            for some, their in zip(
                ids.split([each.n_answers for each in orders]),
                log_probs.split([each.n_answers for each in orders]),
                strict=True,
            )
        ]

    def close(self) -> None:
        """Let go of threads."""
        self._receiver.close()

    def _flip_one_bit(self) -> None:
        """As a cosmic ray would: the lowest bit that bf16 has, of one weight."""
        import torch

        weight: Any = next(self._module.parameters()).detach()
        weight.view(torch.int32).view(-1)[11] ^= 1 << 16


def open_engine(settings: Settings, arm: Arm, worker: int, clock: Clock) -> RolloutEngine:
    """The engine that was asked for.

    Raises:
        ExtraMissing: its library is not installed.
    """
    if settings.engine == "vllm":
        from weightwire.demo.engine_vllm import VllmEngine

        return VllmEngine(settings, worker, clock)
    return TorchEngine(settings, arm, worker, clock)
