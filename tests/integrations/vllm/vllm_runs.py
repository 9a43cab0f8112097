"""Versions of a tiny model, published one by one, and a server beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_models import Shape, Training, new_model, save
from vllm_servers import Server

import weightwire as ww
from weightwire.engines.vllm import VllmServer

PROMPTS = [list(b"The quick brown fox"), list(b"Once upon a time"), list(b"0123456789")]


@dataclass(frozen=True)
class Trained:
    """A model's versions, each the outcome of one AdamW step, rounded to bf16."""

    shape: Shape
    versions: list[dict[str, torch.Tensor]]
    checkpoint: Path
    """The folder of one of them, saved by transformers."""
    fresh: int
    """Which one."""


def train(shape: Shape, n_versions: int, fresh: int, folder: Path) -> Trained:
    """Take real steps; the checkpoint is written at its step, by another way than publishing."""
    training = Training(new_model(shape))
    versions = []
    for index in range(n_versions):
        versions.append(dict(training.weights()))
        if index == fresh:
            save(training.model, folder / "checkpoint")
        training.step()
    return Trained(shape, versions, folder / "checkpoint", fresh)


class Run:
    """A run in a store, published version by version."""

    def __init__(self, store: Any, versions: list[dict[str, torch.Tensor]]) -> None:
        self.versions, self._next = versions, 0
        self._publisher = ww.Publisher(store, self._weights)

    def publish(self, weights: dict[str, torch.Tensor] | None = None) -> ww.Published:
        """The next version, or these weights."""
        self._now = self.versions[self._next] if weights is None else weights
        self._next += weights is None
        return self._publisher.publish().result()

    def close(self) -> None:
        """End the publisher."""
        self._publisher.close()

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._now.items()


@dataclass
class World:
    """A server, the model's versions, and where runs go."""

    server: Server
    trained: Trained
    folder: Path
    fresh_checksums: dict[str, str] = field(default_factory=dict)
    fresh_tokens: list[list[int]] = field(default_factory=list)
    n_runs: int = 0

    def __post_init__(self) -> None:
        """Note what a fresh load of the checkpoint gives, before anything is patched."""
        self.fresh_checksums = self.server.checksums()
        self.fresh_tokens = self.greedy()
        assert all(len(set(tokens)) > 4 for tokens in self.fresh_tokens), "tokens that say nothing"
        self.client = VllmServer(self.server.url, timeout_s=60, takeover_s=1.0)

    def greedy(self) -> list[list[int]]:
        """What the server generates now."""
        return [self.server.greedy(prompt, 24) for prompt in PROMPTS]

    def new_run(self, store: Any = None) -> tuple[Any, Run]:
        """A store nobody used, and a run in it."""
        self.n_runs += 1
        place = store or str(self.folder / f"run-{self.n_runs}")
        return place, Run(place, self.trained.versions)
