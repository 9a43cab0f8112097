"""What one rank says of itself, and the way of that through JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from weightwire.engines.remote.failures import Failure
from weightwire.errors import EngineRefused


@dataclass(frozen=True)
class Session:
    """An activation that was begun and not ended: who finds one took over from someone who died."""

    version: int
    was_paused: bool
    """The server was paused by somebody else already, so it is not ours to resume."""
    began_s: float = 0.0
    """On the rank's own clock; negative once its client gave up."""


@dataclass(frozen=True)
class RankStatus:
    """Where one rank stands."""

    rank: int
    n_ranks: int
    store: str
    """The run it follows; "" before it was connected."""
    state: str
    """As of its subscriber: empty, idle, staging, staged, activating, checking, dirty."""
    version: int = -1
    """Held and being served; -1 if none is known."""
    digest: str = ""
    staged: int = -1
    """Ready to be activated; -1 if none."""
    newest: int = -1
    """The newest that was seen in the store."""
    n_polls: int = 0
    """How often it was looked for."""
    connection: str = ""
    """Stands for everything it was connected with: who would connect it alike need not."""
    n_replicas: int = 1
    """Engines that step together, each with this rank's weights: data parallelism."""
    is_dirty: bool = False
    is_asleep: bool = False
    failure: Failure | None = None
    """What last went wrong, until something goes right."""
    stage_s: float = 0.0
    activate_s: float = 0.0
    """The last activation in this rank: all of the pause that is ours."""
    n_bytes: int = 0
    n_changed: int = 0
    session: Session | None = None
    refused: Failure | None = None
    """Why what was just asked for was not done."""

    @property
    def is_sound(self) -> bool:
        """Whether it holds one version whole."""
        return self.version >= 0 and not self.is_dirty

    def as_json(self) -> dict[str, Any]:
        """For the answer to a remote call."""
        return asdict(self)


def parse_status(raw: Mapping[str, Any]) -> RankStatus:
    """The mirror of ``RankStatus.as_json``.

    Raises:
        EngineRefused: not a status: the server runs another release of Weightwire.
    """
    try:
        known = {field.name for field in fields(RankStatus)}
        found = {name: value for name, value in raw.items() if name in known}
        for name, kind in (("failure", Failure), ("refused", Failure), ("session", Session)):
            found[name] = kind(**found[name]) if found.get(name) else None
        return RankStatus(**found)
    except (TypeError, ValueError, AttributeError) as error:
        raise EngineRefused(f"not a rank's status: {error}; same Weightwire release?") from error
