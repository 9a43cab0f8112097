"""RL on a Ray cluster: one trainer, N rollout actors, and nothing stops when an actor is killed.

    python examples/ray_cluster.py                                    # a cluster on this machine
    python examples/ray_cluster.py --address auto --store s3://bucket/run-7 --actors 8

The policy is a small language model that is rewarded for even digits: REINFORCE with a group
baseline, AdamW, fp32 masters, published as bf16 after every step. The trainer publishes patches
into the store; the actors follow by themselves, and say of every trajectory which version made it.
Half way through one actor's process is killed. Ray makes it anew; it comes back at the newest
version. At the end every actor must hold the last version, proven by its digest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import torch

import weightwire as ww
from weightwire.engines.ray import Rollout, RolloutStatus, rollout_actors
from weightwire.subscriber import Polling

VOCABULARY, N_NEW, GROUP = 32, 16, 24
MAX_LAG = 4


class Policy(torch.nn.Module):
    """A causal language model, small enough for a demonstration; ``width`` makes it larger."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        self.recur = torch.nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recur(self.embed(tokens))  # batch, length, width
        return self.head(hidden)  # batch, length, vocabulary


def sample(policy: Policy, prompts: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Trajectories: batch, 1 + N_NEW."""
    chance = torch.Generator().manual_seed(seed)
    tokens = prompts
    with torch.no_grad():
        for _ in range(N_NEW):
            odds = policy(tokens)[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(odds, 1, generator=chance)], dim=1)
    return tokens


def reward(tokens: torch.Tensor) -> torch.Tensor:
    """The share of even digits: anyone can check it."""
    new = tokens[:, 1:]
    return ((new < 10) & (new % 2 == 0)).float().mean(1)


class Trainer:
    """Learns from trajectories, and publishes after every step."""

    def __init__(self, store: str, width: int) -> None:
        torch.manual_seed(0)
        self._policy = Policy(width)
        self._optimizer = torch.optim.AdamW(self._policy.parameters(), lr=3e-3)
        self._publisher = ww.Publisher(store, ww.cast(self._policy, "bf16"))
        self._publisher.publish(step=0).result()

    def step(self, step: int, batches: list[torch.Tensor]) -> tuple[float, Any]:
        """One step of REINFORCE with a group baseline; gives the mean reward and what was published."""
        tokens = torch.cat(batches)
        gained = reward(tokens)
        odds = self._policy(tokens[:, :-1]).log_softmax(-1)
        chosen = odds.gather(-1, tokens[:, 1:, None]).squeeze(-1).sum(1)
        loss = -((gained - gained.mean()) * chosen).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return gained.mean().item(), self._publisher.publish(step=step).result()

    def close(self) -> None:
        """Finish anchors in the making."""
        self._publisher.close()


@dataclass(frozen=True)
class Return:
    """How a killed actor came back."""

    killed_pid: int
    new_pid: int
    killed_at: int
    """The version it held."""
    returned_at: int
    """The version it loaded."""
    lag: int
    """How many newer ones there were at that moment."""
    away_s: float
    """From the kill until it answered: a new process, its imports, the model, the weights."""
    load_s: float
    """Of that, from the store to proven weights."""


class Actors:
    """The rollout side, as the loop sees it: one task at a time for each actor."""

    def __init__(self, n_actors: int, store: str, width: int, n_cpus: float) -> None:
        self._actors = rollout_actors(
            n_actors,
            store,
            build=lambda: Policy(width).eval(),
            generate=sample,
            actor_options={"num_cpus": n_cpus},
            polling=Polling(first_s=0.02, max_s=0.2),
            max_lag=MAX_LAG,
        )
        self._tasks: dict[Any, Any] = {}
        self._n_sent = 0

    def rollouts(self) -> list[Rollout]:
        """What is done by now, of at least one actor; nobody waits for one that is away."""
        for actor in self._actors:
            if actor not in self._tasks.values():
                prompts = torch.full((GROUP, 1), VOCABULARY - 1)
                self._tasks[actor.generate.remote(prompts, seed=self._n_sent)] = actor
                self._n_sent += 1
        ray.wait([*self._tasks], num_returns=1)
        done, _ = ray.wait([*self._tasks], num_returns=len(self._tasks), timeout=0.2)
        for task in done:
            del self._tasks[task]
        return ray.get(done)

    def kill(self, number: int, *, is_local: bool) -> Killed:
        """End one actor's process without a word of warning."""
        actor = self._actors[number]
        status = ray.get(actor.status.remote())
        if is_local:
            os.kill(status.pid, signal.SIGKILL)
        else:
            ray.kill(actor, no_restart=False)
        return Killed(status, time.monotonic(), actor)

    def finish(self, version: int) -> list[RolloutStatus]:
        """Bring all of them to this version."""
        ray.get([actor.update_to.remote(version) for actor in self._actors])
        return ray.get([actor.status.remote() for actor in self._actors])

    def close(self) -> None:
        """Stop following, before the run's folder goes."""
        ray.get([actor.close.remote() for actor in self._actors])


class Killed:
    """An actor that is away, until it answers again."""

    def __init__(self, before: RolloutStatus, at: float, actor: Any) -> None:
        self._before, self._at, self._actor = before, at, actor
        self._answer = actor.status.remote()

    def returned(self) -> Return | None:
        """How it came back; None while it is away."""
        done, _ = ray.wait([self._answer], timeout=0)
        if not done:
            return None
        away_s = time.monotonic() - self._at
        status = ray.get(self._answer)
        if status.pid == self._before.pid:  # the answer of the old process was still under way
            self._answer = self._actor.status.remote()
            return None
        return Return(
            killed_pid=self._before.pid,
            new_pid=status.pid,
            killed_at=self._before.version,
            returned_at=status.first_version,
            lag=status.first_lag,
            away_s=away_s,
            load_s=status.load_s,
        )


def train(arguments: argparse.Namespace, store: str) -> dict[str, Any]:
    """The loop: gather, learn, publish; one actor is killed half way and comes back."""
    trainer = (
        ray.remote(Trainer)
        .options(num_cpus=arguments.cpus_per_actor)
        .remote(store, arguments.width)
    )
    actors = Actors(arguments.actors, store, arguments.width, arguments.cpus_per_actor)
    killed: Killed | None = None
    came_back: Return | None = None
    step, rewards, n_steps_without = 0, [], 0
    published: Any = None
    while step < arguments.steps or (killed is not None and came_back is None):
        rollouts = actors.rollouts()
        step += 1
        gained, published = ray.get(trainer.step.remote(step, [r.output for r in rollouts]))
        rewards.append(gained)
        if killed is not None and came_back is None:
            came_back = killed.returned()
            n_steps_without += came_back is None
        if step == arguments.kill_at:
            killed = actors.kill(0, is_local=arguments.address is None)
        show(step, gained, published, rollouts, is_away=killed is not None and came_back is None)
    statuses = actors.finish(published.version)
    actors.close()
    ray.get(trainer.close.remote())
    return {
        "version": published.version,
        "digest": published.digest,
        "actors": [asdict(status) for status in statuses],
        "returned": asdict(came_back) if came_back else None,
        "n_steps_without_the_killed": n_steps_without,
        "first_reward": sum(rewards[:3]) / 3,
        "last_reward": sum(rewards[-3:]) / 3,
    }


def show(
    step: int, gained: float, published: Any, rollouts: list[Rollout], *, is_away: bool
) -> None:
    """One line of the table."""
    of = " ".join(f"{rollout.worker}@{rollout.version}" for rollout in rollouts)
    print(
        f"step {step:3d}  reward {gained:.3f}  version {published.version:3d}"
        f"  changed {published.density:6.2%}  {published.n_bytes:8,} of"
        f" {published.n_state_bytes:,} B  {of}{'  (one is away)' if is_away else ''}",
        flush=True,
    )


def report(result: dict[str, Any]) -> bool:
    """Whether every actor holds the last version, and how the killed one came back."""
    returned = result["returned"]
    if returned:
        print(
            f"killed process {returned['killed_pid']} at version {returned['killed_at']};"
            f" {result['n_steps_without_the_killed']} steps later process {returned['new_pid']} was"
            f" back at version {returned['returned_at']}, {returned['lag']} behind the newest:"
            f" away {returned['away_s']:.1f} s,"
            f" {returned['load_s'] * 1000:.0f} ms of it to load the weights"
        )
    wrong = [a["worker"] for a in result["actors"] if a["digest"] != result["digest"]]
    print(
        f"version {result['version']}: {len(result['actors']) - len(wrong)} of"
        f" {len(result['actors'])} actors hold digest {result['digest']}"
    )
    return not wrong


def arguments_of(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="a running cluster; by default one on this machine")
    parser.add_argument("--store", help="where the run lives; all nodes must reach it")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=8, help="0: kill nobody")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--cpus-per-actor", type=float, default=0.5)
    parser.add_argument("--json", type=Path, help="write what happened there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run it; 0 if every actor ended at the last version."""
    arguments = arguments_of(sys.argv[1:] if argv is None else argv)
    local = (
        {} if arguments.address else {"include_dashboard": False, "object_store_memory": 80 << 20}
    )
    ray.init(address=arguments.address, **local)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = train(arguments, arguments.store or f"{folder}/run")
    finally:
        ray.shutdown()
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2))
    return 0 if report(result) else 1


if __name__ == "__main__":
    sys.exit(main())
