"""A rollout process: hold the version that is due, answer prompts, deliver, again.

    python -m weightwire.demo.rollout SETTINGS WORKER

It remembers nothing on disk. Started again after a kill, it sees in the store which of its batches
are missing, and goes on there.
"""

from __future__ import annotations

import sys

from weightwire.clock import Clock, SystemClock
from weightwire.demo.child import run_child
from weightwire.demo.engine import Order, RolloutEngine, open_engine
from weightwire.demo.events import Activated, Delivered, Finished, Ready, say
from weightwire.demo.policy import tokens_of, use_threads, wait_for_description
from weightwire.demo.sampling import seed_for
from weightwire.demo.settings import Arm, Settings, load_settings
from weightwire.demo.task import task_for
from weightwire.demo.trajectories import Group, Mailbox, Rollouts


class Worker:
    """One worker's life in one arm."""

    def __init__(
        self, settings: Settings, arm: Arm, worker: int, engine: RolloutEngine, clock: Clock
    ) -> None:
        self._settings, self._arm, self._worker = settings, arm, worker
        self._engine, self._clock = engine, clock
        self._mailbox = Mailbox(settings, arm, clock, for_worker=True)
        self._tokens, self._task = tokens_of(settings), task_for(settings.model)
        self._version = -1

    def work(self) -> None:
        """Every batch that is missing, then every version that is left.

        Raises:
            WeightwireError: what cannot be mended here.
        """
        settings = self._settings
        first = self._mailbox.first_missing(self._worker, settings.n_steps)
        for batch in range(first, settings.n_steps):
            version = settings.version_for(batch)
            self._hold(version)
            if settings.version_for(batch + 1) > version:
                self._engine.expect(version + 1)
            self._deliver(batch, version)
        last = settings.n_steps
        for version in range(max(settings.version_for(last), self._version + 1), last + 1):
            self._hold(version)

    def _hold(self, version: int) -> None:
        if version == self._version:
            return
        received = self._engine.take(version)
        self._version = version
        proof = self._engine.prove()
        say(
            Activated(
                arm=self._arm,
                worker=self._worker,
                version=version,
                live_digest=proof.digest,
                is_exact=proof.is_exact,
                n_bytes=received.n_bytes,
                stage_s=received.stage_s,
                fetch_s=received.fetch_s,
                pause_s=received.pause_s,
                was_whole=received.was_whole,
            )
        )

    def _deliver(self, batch: int, version: int) -> None:
        began = self._clock.monotonic()
        groups = self._answer(batch)
        seconds = self._clock.monotonic() - began
        self._mailbox.put(Rollouts(batch, self._worker, version, groups))
        say(Delivered(self._arm, self._worker, batch, version, seconds))

    def _answer(self, batch: int) -> list[Group]:
        """This worker's prompts of a batch; chance depends on seed, batch and prompt alone."""
        settings, seed = self._settings, self._settings.seed_of(self._arm)
        indices = settings.prompts_of(self._worker)
        questions = [self._task.question(seed, batch, index) for index in indices]
        orders = [
            Order(
                self._tokens.encode(question.text),
                seed_for(seed, batch, index),
                settings.group_size,
                self._task.n_answer_tokens,
            )
            for index, question in zip(indices, questions, strict=True)
        ]
        groups = []
        for question, order, answers in zip(
            questions, orders, self._engine.sample(orders), strict=True
        ):
            texts = [self._tokens.decode(ids) for ids in answers.ids]
            rewards = [self._task.reward(question, text) for text in texts]
            groups.append(
                Group(question.text, order.prompt_ids, answers.ids, answers.log_probs, rewards)
            )
        return groups


def rollout(settings: Settings, worker: int, clock: Clock) -> None:
    """All arms, one after another.

    Raises:
        WeightwireError: what cannot be mended here.
    """
    began = clock.monotonic()
    use_threads(settings.worker_threads)
    wait_for_description(settings, clock)
    for number, arm in enumerate(settings.arms):
        engine = open_engine(settings, arm, worker, clock)
        if number == 0:
            say(Ready(f"worker-{worker}", clock.monotonic() - began))
        try:
            Worker(settings, arm, worker, engine, clock).work()
        finally:
            engine.close()
        say(Finished(f"worker-{worker}", arm))


def main() -> None:
    """Run as a process of its own."""
    settings, worker = load_settings(sys.argv[1]), int(sys.argv[2])
    run_child(f"worker-{worker}", lambda: rollout(settings, worker, SystemClock()))


if __name__ == "__main__":
    main()
