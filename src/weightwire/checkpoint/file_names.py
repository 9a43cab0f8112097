"""The names Weightwire gives to its own files beside a checkpoint, and how it knows them again."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
WEIGHTS_SUFFIX = ".safetensors"
PARTIAL_SUFFIX = ".partial"
_JOURNAL_NAME = ".weightwire-journal"
_TEMPORARY_MARK = ".weightwire-"


def journal_of_folder(folder: Path) -> Path:
    """Where the journal of an in-place apply to a checkpoint folder lies."""
    return folder / _JOURNAL_NAME


def journal_of_file(file: Path) -> Path:
    """Where the journal of an in-place apply to a single file lies."""
    return file.with_name(f".{file.name}{_JOURNAL_NAME}")


def checkpoint_of_journal(journal: Path) -> Path:
    """The folder or file a journal belongs to: the inverse of the two functions above."""
    if journal.name == _JOURNAL_NAME:
        return journal.parent
    return journal.with_name(journal.name[1 : -len(_JOURNAL_NAME)])


def partial_of_journal(journal: Path) -> Path:
    """Where a journal grows until it is committed."""
    return journal.with_name(journal.name + PARTIAL_SUFFIX)


def possible_journals(folder: Path | None, files: Iterable[Path]) -> list[Path]:
    """Every journal that may concern these files, however the apply that died was called.

    A folder's journal concerns each of its shards, a shard's journal concerns the folder, and a
    symbolic link's target has journals beside itself.
    """
    journals = {journal_of_folder(folder)} if folder else set()
    for file in files:
        for alias in (file, file.resolve()):
            journals |= {journal_of_file(alias), journal_of_folder(alias.parent)}
    return sorted(journals)


def temporary_sibling(out: Path, suffix: str = ".tmp") -> Path:
    """A name beside ``out``, so that renaming to it never crosses file systems."""
    mark = f"{_TEMPORARY_MARK}{os.getpid()}-{secrets.token_hex(4)}"
    return out.with_name(f".{out.name}{mark}{suffix}")


def temporary_owner(name: str, out: Path) -> int | None:
    """The process that made a ``temporary_sibling`` of ``out``; None for any other name."""
    mark = re.escape(f".{out.name}{_TEMPORARY_MARK}")
    found = re.fullmatch(mark + r"([1-9][0-9]{0,8})-[0-9a-f]{8}\.tmp", name)
    return int(found[1]) if found else None


def is_leftover(name: str) -> bool:
    """Whether a file or folder is what a dead process of ours left behind."""
    journals = (_JOURNAL_NAME, _JOURNAL_NAME + PARTIAL_SUFFIX)
    temporary = _TEMPORARY_MARK in name and name.endswith((".tmp", ".old"))
    return name.startswith(".") and (temporary or name.endswith(journals))
