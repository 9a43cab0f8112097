"""One server of one rank and one of two, reused by all tests: starting one takes half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_models
import vllm_servers
from vllm_runs import Trained, World, train

N_VERSIONS = 30
FRESH = 5
"""Servers are started from this version's checkpoint: what a fresh load of it gives is known."""


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A Qwen3 with tied embeddings, and its versions."""
    shape = tiny_models.Shape("qwen3", is_tied=True)
    return train(shape, N_VERSIONS, FRESH, tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A Llama with a head of its own and a vocabulary that two ranks must pad, and its versions."""
    shape = tiny_models.Shape("llama", is_tied=False, vocabulary=500)
    return train(shape, N_VERSIONS, FRESH, tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="session")
def one_rank(tied: Trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server without tensor parallelism."""
    yield from _serve(tied, 1, tmp_path_factory.mktemp("one-rank"))


@pytest.fixture(scope="session")
def two_ranks(
    untied: Trained, tmp_path_factory: pytest.TempPathFactory, isolated: None
) -> Iterator[World]:
    """A tensor-parallel server: its processes talk over sockets, hence ``isolated``."""
    yield from _serve(untied, 2, tmp_path_factory.mktemp("two-ranks"))


def _serve(trained: Trained, n_ranks: int, folder: Path) -> Iterator[World]:
    with vllm_servers.running(
        trained.checkpoint,
        folder / "server.log",
        n_ranks=n_ranks,
        extension="vllm_probe.ProbedWorker",
        python_path=Path(__file__).parent,
    ) as server:
        print(f"\nvLLM with {n_ranks} rank(s) was up after {server.start_s:.0f} s")
        world = World(server, trained, folder)
        yield world
        world.client.close()
