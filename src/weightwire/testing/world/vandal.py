"""The actor that breaks what lies still: stored objects, receipts, files on local disks."""

from __future__ import annotations

import random
from pathlib import Path

from weightwire.store import layout
from weightwire.store.records import AnchorRef, Offer, offer_bytes
from weightwire.testing.world.stage import Stage
from weightwire.testing.world.troubles import AT_REST, Trouble

_PLACES = {
    Trouble.BUCKET_DAMAGED: ("patches/", ".safetensors"),
    Trouble.INDEX_DAMAGED: ("patches/", ".json"),
    Trouble.ANCHOR_DAMAGED: ("anchors/", ""),
    Trouble.DATA_LOST: ("", ""),
    Trouble.OFFER_DAMAGED: ("log/", "offer"),
    Trouble.OFFER_LOST: ("log/", "offer"),
    Trouble.COMMIT_DAMAGED: ("log/", "-commit.json"),
}


class Vandal:
    """Comes by every now and then."""

    def __init__(self, stage: Stage) -> None:
        self.name = "vandal"
        self._stage = stage
        self._objects = stage.witness.objects
        self._forged: list[str] = []

    def run(self) -> None:
        """Until the world's time is up."""
        while self._stage.is_going:
            self._stage.scheduler.sleep(self._stage.chance.uniform(2.0, 20.0))
            self.clear_forged()
            for trouble in (*AT_REST, Trouble.COMMIT_DAMAGED):
                self._try(trouble)
            self._forge_offer()
            self._spoil_receipts()

    def clear_forged(self) -> None:
        """A person removes what a stranger wrote."""
        self._objects.delete(self._forged)
        self._forged.clear()

    def _try(self, trouble: Trouble) -> None:
        if not self._stage.settings.odds.get(trouble):
            return
        keys = self._keys(trouble)
        if keys and self._stage.chances.strikes(trouble):
            key = self._stage.chance.choice(keys)
            self._stage.chances.tell(f"vandal: {trouble.name} {key}")
            self._strike(trouble, key)

    def _strike(self, trouble: Trouble, key: str) -> None:
        stage = self._stage
        if trouble is Trouble.GARBAGE:
            self._put_garbage()
            return
        stage.is_damaged = True
        entry = layout.parse_entry(key)
        if entry is not None and entry.kind == "commit":
            stage.damaged_versions.add(entry.version)
        if trouble in (Trouble.DATA_LOST, Trouble.OFFER_LOST):
            self._objects.delete([key])
        elif trouble is Trouble.OBJECTS_SWAPPED:
            self._swap(key, stage.chance.choice(self._keys(trouble)))
        else:
            self._objects.put(key, flipped(self._objects.read(key), stage.chance))

    def _keys(self, trouble: Trouble) -> list[str]:
        prefix, end = _PLACES.get(trouble, ("", ""))
        keys = [info.key for info in self._objects.list(prefix)]
        if end == "offer":
            entries = (layout.parse_entry(key) for key in keys)
            return [e.key for e in entries if e is not None and e.kind != "commit"]
        data = (
            (layout.PATCHES, layout.ANCHORS, layout.LOG)
            if prefix
            else (layout.PATCHES, layout.ANCHORS)
        )
        return [key for key in keys if key.startswith(data) and key.endswith(end)]

    def _swap(self, one: str, other: str) -> None:
        first, second = self._objects.read(one), self._objects.read(other)
        self._objects.put(one, second)
        self._objects.put(other, first)

    def _put_garbage(self) -> None:
        chance = self._stage.chance
        version = chance.randint(0, max(self._stage.truth.newest, 0))
        put_id = f"{chance.getrandbits(128):032x}"
        junk = chance.choice((chance.randbytes(40), b"", b"{}", b"[1]", b'{"format":"other"}'))
        self._objects.put(layout.anchor_offer_key(version, put_id), junk)

    def _forge_offer(self) -> None:
        """A way to the newest version that looks cheap and leads nowhere."""
        stage = self._stage
        newest = stage.truth.versions.get(stage.truth.newest)
        if newest is None or not stage.chances.strikes(Trouble.FORGED_OFFER):
            return
        record, put_id = newest.record, f"{stage.chance.getrandbits(128):032x}"
        anchor = AnchorRef(layout.anchor_folder(record.version, put_id), 1, 1, "0" * 64)
        offer = Offer(
            record.run, record.version, record.epoch, put_id, 0, record.digest, None, anchor
        )
        key = layout.anchor_offer_key(record.version, put_id)
        self._objects.put(key, offer_bytes(offer, None))
        self._forged.append(key)
        stage.n_forged += 1

    def _spoil_receipts(self) -> None:
        stage = self._stage
        if not stage.settings.odds.get(Trouble.RECEIPT_LOST):
            return
        receipts = [info.key for info in self._objects.list(layout.RECEIPTS)]
        if receipts and stage.chances.strikes(Trouble.RECEIPT_LOST):
            self._objects.delete([receipts.pop(stage.chance.randrange(len(receipts)))])
        if receipts and stage.chances.strikes(Trouble.RECEIPT_FORGED):
            # Another worker's words under a name of its own: readable, and not true.
            stolen = self._objects.read(stage.chance.choice(receipts))
            raw = stage.chance.choice((stolen, stage.chance.randbytes(50), b""))
            self._objects.put(layout.receipt_key(f"ghost-{stage.chance.randint(0, 3)}"), raw)


def flipped(data: bytes, chance: random.Random) -> bytes:
    """The same bytes with one wrong bit."""
    if not data:
        return b"\0"
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def damage_file(folder: Path, chance: random.Random) -> None:
    """One wrong bit in one of a folder's files."""
    files = local_files(folder)
    if files:
        path = chance.choice(files)
        path.write_bytes(flipped(path.read_bytes(), chance))


def truncate_file(folder: Path, chance: random.Random) -> None:
    """One of a folder's files, cut short."""
    files = local_files(folder)
    if files:
        path = chance.choice(files)
        path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size + 1)])


def remove_file(folder: Path, chance: random.Random) -> None:
    """One of a folder's files, gone."""
    files = local_files(folder)
    if files:
        chance.choice(files).unlink()


def local_files(folder: Path) -> list[Path]:
    """Every file below a folder, in an order that does not depend on the disk."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
