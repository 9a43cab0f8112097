"""A short supervised warm-up: without any right answer there is nothing to reinforce.

The examples are sorted upwards half of the time and downwards half of the time. The policy that
comes of it can do both; the reward then has something to choose from, as with a real base model.
"""

from __future__ import annotations

import random
from typing import Any

from weightwire.demo.policy import Characters
from weightwire.demo.task import SortDigits

_N_EXAMPLES = 64
_LEARNING_RATE = 1e-3
_N_RISING = 20


def warm_up(module: Any, task: SortDigits, seed: int, n_steps: int) -> float:
    """Teach the tiny model; gives the last loss."""
    import torch

    optimizer = torch.optim.AdamW(module.parameters(), lr=_LEARNING_RATE, weight_decay=0.0)
    chance, loss = random.Random(f"warm-up/{seed}"), torch.zeros(())
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1, (step + 1) / _N_RISING) * (1 - step / n_steps)
        loss = _loss(module, _examples(task, chance), task.n_answer_tokens)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def _examples(task: SortDigits, chance: random.Random) -> Any:
    """Prompts and answers [examples, length], as token numbers."""
    import torch

    rows = []
    for _ in range(_N_EXAMPLES):
        question = task.question(chance.randrange(1 << 32), 0, 0)
        answer = question.answer if chance.random() < 0.5 else question.answer[::-1]
        rows.append(Characters().encode(question.text + answer))
    return torch.tensor(rows)


def _loss(module: Any, tokens: Any, n_answer: int) -> Any:
    from torch.nn.functional import cross_entropy

    logits = module(input_ids=tokens[:, :-1], use_cache=False).logits[:, -n_answer:]
    return cross_entropy(logits.flatten(0, 1), tokens[:, -n_answer:].flatten())
