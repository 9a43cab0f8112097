"""The list of attacks: each is a function that yields forged files, named after its lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sample import Files

MakeFiles = Callable[[str], Iterator[Files]]
MakeFolder = Callable[[Path], None]


@dataclass(frozen=True)
class Attack:
    """Forged files for one codec; ``may_pass`` where a lie cannot matter by construction."""

    name: str
    lie: str
    make: MakeFiles
    codecs: tuple[str, ...]
    may_pass: bool


@dataclass(frozen=True)
class FolderTrick:
    """A change to a saved patch folder."""

    name: str
    lie: str
    play: MakeFolder


ATTACKS: list[Attack] = []
TRICKS: list[FolderTrick] = []


def attack(*codecs: str, may_pass: bool = False) -> Callable[[MakeFiles], MakeFiles]:
    """Register a generator of forged files; by default against both codecs."""

    def register(make: MakeFiles) -> MakeFiles:
        lie = (make.__doc__ or "").strip()
        ATTACKS.append(Attack(_name(make), lie, make, codecs or ("compact", "plain"), may_pass))
        return make

    return register


def trick(play: MakeFolder) -> MakeFolder:
    """Register a change to a folder on disk."""
    TRICKS.append(FolderTrick(_name(play), (play.__doc__ or "").strip(), play))
    return play


def _name(function: Callable[..., object]) -> str:
    return function.__name__.replace("_", " ")
