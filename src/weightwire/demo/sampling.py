"""Drawing answers from a policy, so that the same seeds and weights give the same answers."""

from __future__ import annotations

import hashlib
from typing import Any


def seed_for(*numbers: int) -> int:
    """A seed of its own for every place in a run."""
    text = "/".join(str(number) for number in numbers)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def draw_noise(seed: int, n_answers: int, n_tokens: int, n_words: int) -> Any:
    """Gumbel noise [answers, tokens, vocabulary]: all the chance there is in a group's answers."""
    import torch

    source = torch.Generator().manual_seed(seed)
    uniform = torch.rand((n_answers, n_tokens, n_words), generator=source)
    return -(-uniform.clamp(1e-20, 1 - 1e-7).log()).log()


def sample(module: Any, prompts: Any, noise: Any) -> tuple[Any, Any]:
    """Answers [n, tokens] to prompts [n, length] at temperature 1, and each token's log-probability.

    The word with the largest log-probability plus noise is a fair draw from the policy.
    """
    import torch

    answers, log_probs, past, inputs = [], [], None, prompts
    with torch.inference_mode():
        for position in range(noise.shape[1]):
            out = module(input_ids=inputs, past_key_values=past, use_cache=True)
            past = out.past_key_values
            words = out.logits[:, -1].log_softmax(-1)  # [n, vocabulary]
            chosen = (words + noise[:, position]).argmax(-1, keepdim=True)  # [n, 1]
            answers.append(chosen)
            log_probs.append(words.gather(1, chosen))
            inputs = chosen
    return torch.cat(answers, 1), torch.cat(log_probs, 1)
