"""Every name under a run, in one place.

    run.json                                   the run's identity, written once
    log/000000000042-commit.json               version 42 exists because this object does
    log/000000000042-anchor-<put id>.json      version 42 can also be had as a whole
    log/000000000064-skip-000000000056-<put id>.json   … or in one step from version 56
    log/000000000042-gone-<put id>             the anchor of this put id is gone, or going
    log/boundary-000000000030                  versions before 30 are gone, or going
    patches/000000000042-000000000041-<put id>/   patch.json and buckets, 41 → 42
    anchors/000000000042-<put id>/             a Hugging Face checkpoint folder, and anchor.json
    receipts/<worker>.json                     what one receiver holds

Twelve digits sort as numbers do. ``boundary`` sorts after every digit, so a listing from any
version on shows it too. Data is written under a random put id: two writers never share a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from weightwire.errors import StopError

RUN = "run.json"
LOG = "log/"
PATCHES = "patches/"
ANCHORS = "anchors/"
RECEIPTS = "receipts/"
ANCHOR_MANIFEST = "anchor.json"
_BOUNDARY = f"{LOG}boundary-"

_ENTRY = re.compile(
    r"log/(?P<version>[0-9]{12})-(?:(?P<commit>commit)|anchor-(?P<anchor>[0-9a-f]{32})"
    r"|skip-(?P<base>[0-9]{12})-(?P<skip>[0-9a-f]{32}))\.json"
)
_GONE = re.compile(r"log/(?P<version>[0-9]{12})-gone-(?P<put_id>[0-9a-f]{32})")
_DATA = re.compile(
    r"(?:patches/(?P<patch>[0-9]{12})-(?P<base>[0-9]{12})|anchors/(?P<anchor>[0-9]{12}))-(?P<put_id>[0-9a-f]{32})/.+"
)
PATCH_FOLDER = re.compile(r"patches/[0-9]{12}-[0-9]{12}-[0-9a-f]{32}/")
ANCHOR_FOLDER = re.compile(r"anchors/[0-9]{12}-[0-9a-f]{32}/")
_WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

EntryKind = Literal["commit", "anchor", "skip"]


@dataclass(frozen=True)
class Entry:
    """What the name of an object in the log says."""

    key: str
    kind: EntryKind
    version: int
    base: int | None
    """Where a skip starts."""


@dataclass(frozen=True)
class DataFolder:
    """What the name of an object of a patch or an anchor says."""

    folder: str
    kind: Literal["patch", "anchor"]
    version: int
    put_id: str


def commit_key(version: int) -> str:
    """The one place for the record that makes a version exist."""
    return f"{LOG}{version:012d}-commit.json"


def anchor_offer_key(version: int, put_id: str) -> str:
    """Where an anchor made later is announced."""
    return f"{LOG}{version:012d}-anchor-{put_id}.json"


def skip_offer_key(base: int, version: int, put_id: str) -> str:
    """Where a skip patch is announced."""
    return f"{LOG}{version:012d}-skip-{base:012d}-{put_id}.json"


def after_version(version: int) -> str:
    """Sorts after everything about ``version`` and before everything about the next one."""
    return f"{LOG}{version:012d}~" if version >= 0 else LOG


def parse_entry(key: str) -> Entry | None:
    """What a name in the log stands for; None for names this release does not know."""
    found = _ENTRY.fullmatch(key)
    if found is None:
        return None
    kind: EntryKind = "commit" if found["commit"] else "anchor" if found["anchor"] else "skip"
    base = int(found["base"]) if found["base"] else None
    return Entry(key, kind, int(found["version"]), base)


def boundary_key(version: int) -> str:
    """Says that versions before ``version`` are gone."""
    return f"{_BOUNDARY}{version:012d}"


def parse_boundary(key: str) -> int | None:
    """The version a boundary object names; None for other objects."""
    digits = key.removeprefix(_BOUNDARY)
    return int(digits) if key.startswith(_BOUNDARY) and re.fullmatch(r"[0-9]{12}", digits) else None


def boundary_prefix() -> str:
    """Where all boundary objects are."""
    return _BOUNDARY


def gone_key(folder: str) -> str:
    """Says that the anchor in this folder must not be counted on."""
    version, _, put_id = folder.removeprefix(ANCHORS).rstrip("/").partition("-")
    return f"{LOG}{version}-gone-{put_id}"


def parse_gone(key: str) -> str | None:
    """The anchor folder such an object names; None for other objects."""
    found = _GONE.fullmatch(key)
    return anchor_folder(int(found["version"]), found["put_id"]) if found else None


def patch_folder(base: int, version: int, put_id: str) -> str:
    """Where a patch's index and buckets lie."""
    return f"{PATCHES}{version:012d}-{base:012d}-{put_id}/"


def anchor_folder(version: int, put_id: str) -> str:
    """Where an anchor's files lie."""
    return f"{ANCHORS}{version:012d}-{put_id}/"


def parse_data(key: str) -> DataFolder | None:
    """Which patch or anchor an object belongs to; None for names this release does not know."""
    found = _DATA.fullmatch(key)
    if found is None:
        return None
    is_patch = found["patch"] is not None
    folder = key[: key.index("/", key.index("/") + 1) + 1]
    version = int(found["patch"] if is_patch else found["anchor"])
    return DataFolder(folder, "patch" if is_patch else "anchor", version, found["put_id"])


def receipt_key(worker: str) -> str:
    """Where a worker writes what it holds.

    Raises:
        StopError: a name that is no file name everywhere.
    """
    if not _WORKER.fullmatch(worker):
        raise StopError(
            f"worker name {worker!r:.80}: use letters, digits, dot, dash and underscore, at most 128"
        )
    return f"{RECEIPTS}{worker}.json"
