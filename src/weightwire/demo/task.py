"""The task: put digits in order. Anyone can check an answer, so the reward needs no judge."""

from __future__ import annotations

import random
from dataclasses import dataclass

from weightwire.demo.settings import ModelName

_EXAMPLES = "3 1 2 = 1 2 3\n9 4 6 = 4 6 9\n7 8 0 = 0 7 8\n"


@dataclass(frozen=True)
class Question:
    """One prompt and its only right answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class SortDigits:
    """``40271>`` is to be continued with ``01247``.

    ``separator``, ``lead`` and ``arrow`` make the same task a text that a real model can continue.
    """

    n_digits: int = 5
    separator: str = ""
    lead: str = ""
    arrow: str = ">"
    n_answer_tokens: int = 5

    def question(self, seed: int, batch: int, index: int) -> Question:
        """One of a batch's questions; the same whoever asks, and whenever."""
        chance = random.Random(f"{seed}/{batch}/{index}")
        digits = [str(chance.randrange(10)) for _ in range(self.n_digits)]
        text = self.lead + self.separator.join(digits) + self.arrow
        return Question(text, self.separator.join(sorted(digits)))

    def reward(self, question: Question, completion: str) -> float:
        """1 for the right answer; for a wrong one, half the share of digits in the right place."""
        line = completion.strip(" ").split("\n")[0].strip(" ")
        if line == question.answer:
            return 1.0
        found, wanted = line.replace(" ", ""), question.answer.replace(" ", "")
        n_right = sum(one == other for one, other in zip(found, wanted, strict=False))
        return n_right / self.n_digits / 2


def task_for(model: ModelName) -> SortDigits:
    """Characters for the tiny model, a few worked examples for the real one."""
    if model == "tiny":
        return SortDigits()
    return SortDigits(
        n_digits=3,
        separator=" ",
        lead=_EXAMPLES,
        arrow=" =",
        n_answer_tokens=6,
    )
