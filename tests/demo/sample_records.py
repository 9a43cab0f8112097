"""Records of runs that went well, made by hand: tests then spoil one thing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weightwire.demo.events import (
    Activated,
    Delivered,
    Event,
    Killed,
    Ready,
    Sent,
    Stepped,
    WarmedUp,
)
from weightwire.demo.record import Record
from weightwire.demo.settings import Arm, Settings

ARMS: tuple[Arm, ...] = ("patches", "full")


def sample_settings(folder: Path | str = "unused") -> Settings:
    return Settings(folder=str(folder), store=f"{folder}/store", n_steps=4)


def sample_events(settings: Settings) -> list[Event]:
    events: list[Event] = [Ready("trainer", 1.0), WarmedUp(10, 0.5, 2.0, 1000)]
    events += [Ready(f"worker-{worker}", 1.0) for worker in range(settings.n_workers)]
    for arm in ARMS:
        events += [sent(arm, version) for version in range(settings.n_steps + 1)]
        events += [stepped(arm, step) for step in range(1, settings.n_steps + 1)]
        for worker in range(settings.n_workers):
            events += [activated(arm, worker, v) for v in range(settings.n_steps + 1)]
            events += [
                Delivered(arm, worker, batch, settings.version_for(batch), 0.1)
                for batch in range(settings.n_steps)
            ]
    return [*events, Killed(1, 2), Ready("worker-1", 1.0)]


def sample_record(settings: Settings) -> Record:
    return record_of(sample_events(settings))


def record_of(events: list[Event]) -> Record:
    record = Record()
    for event in events:
        record.add(event)
    return record


def spoiled(events: list[Event], which: Event, **changes: object) -> list[Event]:
    """The same events, with one of them changed."""
    assert which in events
    return [replace(each, **changes) if each == which else each for each in events]  # type: ignore[arg-type]


def sent(arm: Arm, version: int) -> Sent:
    n_changed = 50 if version else 1000
    return Sent(
        arm=arm,
        version=version,
        digest=f"digest-{version}",
        trainer_digest=f"digest-{version}",
        n_elements=1000,
        n_changed=n_changed,
        n_counted=n_changed,
        n_bytes=40 if arm == "patches" and version else 2100,
        n_full_bytes=2000,
        read_s=0.01,
        commit_s=0.002,
        changed_by_tensor={"model.layers.0.w.weight": 0.05, "lm_head.weight": 0.1},
    )


def stepped(arm: Arm, step: int) -> Stepped:
    return Stepped(arm, step, -0.01 * step, 0.1 * step, 0.0, 1.0, 1, f"sha-{step}", 0.1, 0.2)


def activated(arm: Arm, worker: int, version: int) -> Activated:
    is_whole = arm == "full" or version == 0
    return Activated(
        arm, worker, version, f"digest-{version}", True, 40, 0.02, 0.01, 0.001, is_whole
    )
