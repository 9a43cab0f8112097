"""The whole demo: start the processes, listen, kill one for show, judge, report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from weightwire.clock import Clock
from weightwire.demo.events import Ended, Event, Failed, Killed, Stepped
from weightwire.demo.processes import Processes
from weightwire.demo.proofs import Verdict, judge
from weightwire.demo.record import Record
from weightwire.demo.settings import Settings
from weightwire.errors import StopError

_LOOK_S = 0.25


class View(Protocol):
    """Whoever watches."""

    def show(self, event: Event, record: Record) -> None:
        """Something happened."""


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    record: Record
    verdicts: list[Verdict]
    seconds: float

    @property
    def is_proven(self) -> bool:
        """Whether every claim held."""
        return all(verdict.holds for verdict in self.verdicts)


def run_demo(settings: Settings, view: View, clock: Clock, kill_at: int | None = None) -> Outcome:
    """Run both arms and judge them; ``kill_at`` names the step at which the last worker is killed.

    Raises:
        StopError: a process failed; the message has what it said.
    """
    began, record = clock.monotonic(), Record()
    with Processes(settings) as processes:
        processes.start_trainer()
        for worker in range(settings.n_workers):
            processes.start_worker(worker)
        for event in processes.events(_LOOK_S):
            if event is None:
                continue
            _take(event, record, view, processes)
            if _is_time_to_kill(event, settings, kill_at):
                _kill(settings.n_workers - 1, event, record, view, processes)
            if _is_over(record, settings):
                break
    return Outcome(record, judge(record, settings), clock.monotonic() - began)


def _take(event: Event, record: Record, view: View, processes: Processes) -> None:
    """Note an event; one that says a process died before its time ends the demo.

    Raises:
        StopError: it does.
    """
    record.add(event)
    view.show(event, record)
    if isinstance(event, Failed):
        raise StopError(f"{event.process} failed: {event.kind}: {event.message}")
    if isinstance(event, Ended) and event.code:
        log = processes.log_of(event.process)
        raise StopError(f"{event.process} ended with exit code {event.code}; its log ends:\n{log}")


def _is_time_to_kill(event: Event, settings: Settings, kill_at: int | None) -> bool:
    is_first_arm = isinstance(event, Stepped) and event.arm == settings.arms[0]
    return is_first_arm and isinstance(event, Stepped) and event.step == kill_at


def _kill(worker: int, event: Event, record: Record, view: View, processes: Processes) -> None:
    """For show: the run waits for nobody's hands, and its bits do not depend on it."""
    processes.kill_worker(worker)
    killed = Killed(worker, event.step if isinstance(event, Stepped) else 0)
    record.add(killed)
    view.show(killed, record)
    processes.start_worker(worker)


def _is_over(record: Record, settings: Settings) -> bool:
    names = ["trainer", *(f"worker-{worker}" for worker in range(settings.n_workers))]
    return {(name, arm) for name in names for arm in settings.arms} <= record.finished
