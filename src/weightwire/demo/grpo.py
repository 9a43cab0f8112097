"""Group-relative policy optimisation: better than its siblings is good, worse is bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weightwire.demo.trajectories import Group, Rollouts

_CLIP = 0.2
_MAX_NORM = 1.0
_EPSILON = 1e-4


@dataclass(frozen=True)
class Learned:
    """One optimizer step, in numbers."""

    loss: float
    reward: float
    clipped: float
    grad_norm: float


class Learner:
    """fp32 masters and AdamW: what every trainer has, and what bf16 patches come from."""

    def __init__(self, module: Any, learning_rate: float) -> None:
        import torch

        self._module = module
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, weight_decay=0.0)

    def step(self, parts: Sequence[Rollouts]) -> Learned:
        """One step on one batch."""
        import torch

        groups = [group for part in parts for group in part.groups]
        answers = torch.tensor([answer for group in groups for answer in group.answers])
        behaviour = torch.tensor([each for group in groups for each in group.log_probs])
        advantages = torch.tensor([a for group in groups for a in advantages_of(group)])
        ratio = (self._log_probs(groups, answers) - behaviour).exp()  # [answers, tokens]
        bounded = ratio.clamp(1 - _CLIP, 1 + _CLIP)
        gain = torch.minimum(ratio * advantages[:, None], bounded * advantages[:, None])
        loss = -gain.mean()
        rewards = [reward for group in groups for reward in group.rewards]
        return Learned(
            loss=loss.item(),
            reward=sum(rewards) / len(rewards),
            clipped=(ratio != bounded).float().mean().item(),
            grad_norm=self._descend(loss),
        )

    def _log_probs(self, groups: Sequence[Group], answers: Any) -> Any:
        """Of every token of every answer, by the masters, with gradients."""
        import torch

        prompts = torch.tensor([group.prompt_ids for group in groups for _ in group.answers])
        inputs = torch.cat([prompts, answers[:, :-1]], 1)
        logits = self._module(input_ids=inputs, use_cache=False).logits
        words = logits[:, prompts.shape[1] - 1 :].log_softmax(-1)  # [answers, tokens, vocabulary]
        return words.gather(2, answers[:, :, None])[:, :, 0]

    def _descend(self, loss: Any) -> float:
        import torch

        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._module.parameters(), _MAX_NORM)
        self._optimizer.step()
        return float(norm)


def advantages_of(group: Group) -> list[float]:
    """How much better than the group's mean, in its standard deviations; zeros where all are alike."""
    rewards = group.rewards
    mean = sum(rewards) / len(rewards)
    spread = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    return [(reward - mean) / (spread + _EPSILON) for reward in rewards]
