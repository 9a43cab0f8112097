"""Everything that lies in a run, and for how long each object is needed.

One number says when an object may go: the highest boundary at which something that stays still needs
it. A commit goes with its version, a skip patch with the version it starts from, data with the last
record that names it, and data that no record names with its own version.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from weightwire.errors import (
    LimitExceeded,
    ObjectMissing,
    RetryError,
    StoreUnavailable,
    UnsupportedVersion,
)
from weightwire.store import layout
from weightwire.store.anchor import parse_manifest
from weightwire.store.contract import ObjectInfo, ObjectStore
from weightwire.store.history import History, HistoryReader
from weightwire.store.records import AnchorRef
from weightwire.store.run import Run

log = logging.getLogger("weightwire.store")

Kind = Literal["record", "patch", "anchor"]


@dataclass(frozen=True)
class Stored:
    """One object of a run."""

    info: ObjectInfo
    kind: Kind
    version: int
    last: int
    """It stays while the boundary is at most this."""
    folder: str = ""
    """For data: the folder it is in."""


@dataclass(frozen=True)
class Folder:
    """The objects of one patch or anchor."""

    name: str
    kind: Kind
    version: int
    is_named: bool
    """Whether a record names it."""
    objects: tuple[Stored, ...]

    @property
    def modified(self) -> float:
        """When its youngest object was written, by the store's clock."""
        return max(each.info.modified for each in self.objects)


@dataclass(frozen=True)
class AnchorAt:
    """An anchor that a record names."""

    version: int
    ref: AnchorRef
    offer_key: str
    """"" for one that a commit names."""


@dataclass(frozen=True)
class Inventory:
    """One look at a whole run."""

    history: History
    records: tuple[Stored, ...]
    boundary_keys: Mapping[int, str]
    gone: frozenset[str]
    """Folders of anchors that a collector is removing, or began to remove."""
    folders: Mapping[str, Folder]

    @property
    def objects(self) -> Iterator[Stored]:
        """Every object that can be collected."""
        yield from self.records
        for folder in self.folders.values():
            yield from folder.objects


def take_inventory(run: Run) -> Inventory:
    """Look at the history, then at the log's names, then at the data.

    In this order data that a record names is there when the data is listed, unless it is really
    gone; and a mark on an anchor, made before anything of it is deleted, is seen by whoever
    could still take the anchor for a complete one.

    Raises:
        UntrustedHistory: a history that must not be followed, nor collected.
        RetryError: a record that stays damaged, or the store gave no answer.
    """
    history = HistoryReader(run).refresh(-1)
    infos = list(run.store.list(layout.LOG))
    boundaries = {layout.parse_boundary(info.key): info.key for info in infos}
    gone = (layout.parse_gone(info.key) for info in infos)
    return Inventory(
        history,
        tuple(_records(infos)),
        {version: key for version, key in boundaries.items() if version is not None},
        frozenset(folder for folder in gone if folder is not None),
        _folders(run.store, _named(history, infos)),
    )


def named_anchors(history: History) -> list[AnchorAt]:
    """Every anchor that a record names, newest first; at one version the commit's own first."""
    found = [
        AnchorAt(version, commit.anchor, "")
        for version, commit in history.commits.items()
        if commit.anchor is not None
    ]
    found += [
        AnchorAt(offer.version, offer.anchor, key)
        for key, offer in history.offers.items()
        if offer.anchor is not None
    ]
    return sorted(found, key=lambda anchor: (-anchor.version, anchor.offer_key))


def is_complete(store: ObjectStore, ref: AnchorRef, inventory: Inventory) -> bool:
    """Whether an anchor can be loaded: its manifest is the one its record names, and every file
    is there in its full length.

    Raises:
        StoreUnavailable, StoreRefused: the store's own errors.
    """
    folder = inventory.folders.get(ref.folder)
    if folder is None or ref.folder in inventory.gone:
        return False
    key = ref.folder + layout.ANCHOR_MANIFEST
    try:
        manifest = parse_manifest(store.read(key, 0, ref.n_manifest_bytes + 1), ref)
    except StoreUnavailable:
        raise
    except (ObjectMissing, RetryError, LimitExceeded, UnsupportedVersion) as error:
        log.warning("an anchor is not counted on: %s", error)
        return False
    n_bytes = {each.info.key: each.info.n_bytes for each in folder.objects}
    return all(n_bytes.get(ref.folder + file.name) == file.n_bytes for file in manifest.files)


def _records(infos: list[ObjectInfo]) -> Iterator[Stored]:
    """Records and marks; names that this release does not know are left alone."""
    for info in infos:
        entry = layout.parse_entry(info.key)
        gone = layout.parse_gone(info.key)
        if entry is not None:
            yield Stored(info, "record", entry.version, _needed_until(entry))
        elif gone is not None:
            version = int(gone.removeprefix(layout.ANCHORS)[:12])
            yield Stored(info, "record", version, version)


def _needed_until(entry: layout.Entry) -> int:
    return entry.version if entry.base is None else min(entry.base, entry.version)


def _named(history: History, infos: list[ObjectInfo]) -> dict[str, int]:
    """Folders that records name, each with the highest boundary at which one of them stays."""
    named: dict[str, int] = {}

    def name(folder: str, last: int) -> None:
        named[folder] = max(named.get(folder, last), last)

    for version, commit in history.commits.items():
        for ref in (commit.patch, commit.anchor):
            if ref is not None:
                name(ref.folder, version)
    for offer in history.offers.values():
        if offer.patch is not None:
            name(offer.patch.folder, offer.patch.base_version)
        if offer.anchor is not None:
            name(offer.anchor.folder, offer.version)
    for entry in filter(None, (layout.parse_entry(info.key) for info in infos)):
        # An offer that was unreadable, or came after the history was read, names it all the same.
        if entry.kind != "commit":
            name(_folder_of(entry), _needed_until(entry))
    return named


def _folder_of(entry: layout.Entry) -> str:
    put_id = entry.key.removesuffix(".json")[-32:]
    if entry.base is None:
        return layout.anchor_folder(entry.version, put_id)
    return layout.patch_folder(entry.base, entry.version, put_id)


def _folders(store: ObjectStore, named: Mapping[str, int]) -> dict[str, Folder]:
    objects: dict[str, list[Stored]] = {}
    for prefix in (layout.PATCHES, layout.ANCHORS):
        for info in store.list(prefix):
            data = layout.parse_data(info.key)
            if data is not None:
                last = named.get(data.folder, data.version)
                stored = Stored(info, data.kind, data.version, last, data.folder)
                objects.setdefault(data.folder, []).append(stored)
    return {
        name: Folder(name, each[0].kind, each[0].version, name in named, tuple(each))
        for name, each in objects.items()
    }
