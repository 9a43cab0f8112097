"""What a rank is told through SGLang's tensor route: a command in a tensor's name.

SGLang takes pickled pairs of name and tensor, one list for each rank, and checks what it unpickles.
An empty tensor is pickled without shared memory, so a command also reaches a server on another
host; and because there is one list for each rank, each rank learns its number with it.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from weightwire.errors import EngineRefused

LOADER = "weightwire.engines.sglang.load"
"""``--custom-weight-loader`` and ``load_format``"""
_MARK = "weightwire:"
_MAX_BYTES = 64 << 10
"""A command is a few paths and numbers; whatever is longer is not one."""


@dataclass(frozen=True)
class Command:
    """One thing for one rank to do."""

    do: Literal["connect", "activate"]
    rank: int
    n_ranks: int
    version: int = -1
    store: str = ""
    mailbox: str = ""
    key: str | None = None
    worker: str | None = None
    cache: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)


def pairs_of(command: Command) -> list[tuple[str, Any]]:
    """The command as SGLang's loaders get it: one pair of name and tensor."""
    import torch

    return [(_MARK + json.dumps(asdict(command)), torch.empty(0, dtype=torch.uint8))]


def payload(command: Command) -> str:
    """The command as SGLang's route takes it: pickled pairs, in base64."""
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # noqa: F401  teaches the pickler about tensors

    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(pairs_of(command))
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def command_in(pairs: Iterable[tuple[str, Any]]) -> Command:
    """The mirror of ``pairs_of``.

    Raises:
        EngineRefused: these are not a command of ours.
    """
    names = [name for name, _ in pairs]
    if len(names) != 1 or not names[0].startswith(_MARK) or len(names[0]) > _MAX_BYTES:
        raise EngineRefused(
            f"{LOADER} takes commands of Weightwire, and got {len(names)} tensors:"
            f" {', '.join(name[:40] for name in names[:3])}"
        )
    try:
        return Command(**json.loads(names[0].removeprefix(_MARK)))
    except (TypeError, ValueError) as error:
        raise EngineRefused(f"not a command: {error}; same Weightwire release?") from error
