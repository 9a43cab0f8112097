"""What the processes say, one JSON object per line: the table, the proofs and the report read it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from weightwire.demo.settings import Arm
from weightwire.errors import MalformedHeader


@dataclass(frozen=True)
class Ready:
    """A process has loaded its libraries and its model."""

    process: str
    seconds: float


@dataclass(frozen=True)
class WarmedUp:
    """The supervised warm-up is over: version 0 of both arms."""

    n_steps: int
    loss: float
    seconds: float
    n_parameters: int


@dataclass(frozen=True)
class Sent:
    """A version exists."""

    arm: Arm
    version: int
    digest: str
    """What receivers are told."""
    trainer_digest: str
    """What the trainer computed from its own rounded weights."""
    n_elements: int
    n_changed: int
    n_counted: int
    """Changed elements, counted by the trainer itself."""
    n_bytes: int
    n_full_bytes: int
    read_s: float
    """How long training waited."""
    commit_s: float
    """From then until the version existed."""
    changed_by_tensor: Mapping[str, float] = field(default_factory=dict)
    """The share of each tensor that changed."""


@dataclass(frozen=True)
class Stepped:
    """The trainer took one optimizer step."""

    arm: Arm
    step: int
    loss: float
    reward: float
    clipped: float
    """The share of tokens whose ratio was clipped."""
    grad_norm: float
    staleness: int
    rollouts_sha256: str
    wait_s: float
    train_s: float


@dataclass(frozen=True)
class Activated:
    """A worker serves a version, and has read its live weights."""

    arm: Arm
    worker: int
    version: int
    live_digest: str
    is_exact: bool
    """The live weights are the published numbers, also where they are kept wider."""
    n_bytes: int
    stage_s: float
    fetch_s: float
    pause_s: float
    was_whole: bool


@dataclass(frozen=True)
class Delivered:
    """A worker has answered its prompts of one batch."""

    arm: Arm
    worker: int
    batch: int
    version: int
    generate_s: float


@dataclass(frozen=True)
class Killed:
    """A worker was killed, for show; another process takes its place."""

    worker: int
    step: int


@dataclass(frozen=True)
class Finished:
    """A process is through with one arm."""

    process: str
    arm: Arm


@dataclass(frozen=True)
class Failed:
    """A process cannot go on."""

    process: str
    kind: str
    message: str


@dataclass(frozen=True)
class Ended:
    """A process is gone; said by whoever started it."""

    process: str
    code: int


Event: TypeAlias = (
    Ready | WarmedUp | Sent | Stepped | Activated | Delivered | Killed | Finished | Failed | Ended
)
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Ready,
        WarmedUp,
        Sent,
        Stepped,
        Activated,
        Delivered,
        Killed,
        Finished,
        Failed,
        Ended,
    )
}
_lock = threading.Lock()


def to_line(event: Event) -> str:
    """An event as one line; floats survive bit for bit."""
    return json.dumps({"event": type(event).__name__, **asdict(event)})


def parse_line(line: str) -> Event:
    """What ``to_line`` wrote.

    Raises:
        MalformedHeader: anything else, such as half a line of a process that was killed.
    """
    try:
        fields = json.loads(line)
        kind = _KINDS[fields.pop("event")]
        event: Event = kind(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MalformedHeader(f"not an event of the demo: {line!r:.200}") from error
    return event


def say(event: Event) -> None:
    """Tell whoever started this process; threads take turns."""
    with _lock:
        sys.stdout.write(to_line(event) + "\n")
        sys.stdout.flush()
