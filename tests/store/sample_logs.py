"""Small runs written record by record, and stores that die or are shared at a chosen operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from hand_clock import HandClock
from weightwire.codec.index import BucketEntry, PatchIndex, index_bytes
from weightwire.store import layout
from weightwire.store.anchor import AnchorFile, Manifest, manifest_bytes
from weightwire.store.contract import ObjectInfo, ObjectStore
from weightwire.store.memory import MemoryStore
from weightwire.store.records import (
    AnchorRef,
    Commit,
    Offer,
    PatchRef,
    RunIdentity,
    Sign,
    Verify,
    commit_bytes,
    identity_bytes,
    sha256,
)
from weightwire.store.run import Run, announce, commit

WEIGHTS = b"all of the weights" * 300
BUCKET = "bucket-00000.safetensors"


class SampleRun:
    """A publisher without weights: real records, real anchors of a few bytes, real patch indexes."""

    def __init__(
        self, *, sign: Sign | None = None, verify: Verify | None = None, name: str = "a"
    ) -> None:
        self.clock = HandClock()
        self.store = MemoryStore(self.clock)
        identity = RunIdentity(name * 32, int(self.clock.now() * 1000))
        self.store.create(layout.RUN, identity_bytes(identity))
        self.run = Run(self.store, identity, sign, verify)
        self.commits: list[Commit] = []
        self.previous = ""

    def on(self, store: ObjectStore) -> Run:
        """The same run, seen through another store."""
        return replace(self.run, store=store)

    def record(self, *, epoch: int = 1, anchor: bool = False, bits: int | None = None) -> Commit:
        """The next commit, its data uploaded, not yet committed."""
        version = len(self.commits)
        digest = f"{version + 1 if bits is None else bits:032x}"
        put_id = self.clock.token()
        patch = self.upload_patch(version - 1, version, put_id, digest) if version else None
        ref = self.upload_anchor(version, put_id, digest) if anchor or not version else None
        time_ms = int(self.clock.now() * 1000)
        return Commit(
            run=self.run.name,
            version=version,
            epoch=epoch,
            put_id=put_id,
            previous=self.previous,
            time_ms=time_ms,
            digest=digest,
            n_elements=10,
            n_state_bytes=20,
            patch=patch,
            anchor=ref,
        )

    def commit(self, *, epoch: int = 1, anchor: bool = False, bits: int | None = None) -> Commit:
        return self.commit_record(self.record(epoch=epoch, anchor=anchor, bits=bits))

    def commit_record(self, record: Commit) -> Commit:
        self.previous = commit(self.run, record)
        self.commits.append(record)
        return record

    def commit_many(self, n: int, *, apart_s: float = 1.0) -> SampleRun:
        for _ in range(n):
            self.commit()
            self.clock.time += apart_s
        return self

    def offer_anchor(self, version: int) -> Offer:
        put_id, digest = self.clock.token(), self.commits[version].digest
        ref = self.upload_anchor(version, put_id, digest)
        return self.announce_anchor(version, put_id, ref)

    def announce_anchor(self, version: int, put_id: str, ref: AnchorRef) -> Offer:
        return self._announce(version, put_id, None, ref)

    def offer_skip(self, base: int, version: int) -> Offer:
        put_id, digest = self.clock.token(), self.commits[version].digest
        ref = self.upload_patch(base, version, put_id, digest)
        return self._announce(version, put_id, ref, None)

    def upload_anchor(self, version: int, put_id: str, digest: str) -> AnchorRef:
        folder = layout.anchor_folder(version, put_id)
        self.store.put(folder + "model.safetensors", WEIGHTS)
        file = AnchorFile("model.safetensors", len(WEIGHTS), (sha256(WEIGHTS),))
        raw = manifest_bytes(Manifest(digest, {}, (file,)))
        self.store.put(folder + layout.ANCHOR_MANIFEST, raw)
        return AnchorRef(folder, len(WEIGHTS) + len(raw), len(raw), sha256(raw))

    def upload_patch(self, base: int, version: int, put_id: str, digest: str) -> PatchRef:
        folder = layout.patch_folder(base, version, put_id)
        data = f"from {base} to {version}".encode()
        base_digest = self.commits[base].digest
        bucket = BucketEntry(BUCKET, len(data), sha256(data))
        raw = index_bytes(PatchIndex("compact", base_digest, digest, 1, 10, 3, (bucket,)))
        self.store.put(folder + BUCKET, data)
        self.store.put(folder + "patch.json", raw)
        n_bytes = len(data) + len(raw)
        return PatchRef(folder, base, base_digest, "compact", 3, 1, n_bytes, len(raw), sha256(raw))

    def raw_commit(self, record: Commit) -> bytes:
        return commit_bytes(record, self.run.sign)

    def _announce(
        self, version: int, put_id: str, patch: PatchRef | None, anchor: AnchorRef | None
    ) -> Offer:
        time_ms, digest = int(self.clock.now() * 1000), self.commits[version].digest
        offer = Offer(self.run.name, version, 1, put_id, time_ms, digest, patch, anchor)
        announce(self.run, offer)
        return offer


class Crash(BaseException):
    """The process is gone; no handler of ours may stop it."""


class Interrupted:
    """Counts operations, and calls ``before`` with the number of each one before it happens.

    A listing happens when its first object is asked for, as it does in real stores.
    """

    def __init__(self, store: ObjectStore, before: Callable[[int], None] = lambda _: None) -> None:
        self.inner, self.before = store, before
        self.n_operations = 0
        self.n_writes = 0

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        self._step(writes=True)
        self.inner.put(key, data)

    def create(self, key: str, data: bytes) -> bool:
        self._step(writes=True)
        return self.inner.create(key, data)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._step()
        return self.inner.read(key, start, stop)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self._step()
        yield from self.inner.list(prefix, after)

    def delete(self, keys: Iterable[str]) -> None:
        """One key at a time: a crash or another process may come between any two."""
        for key in keys:
            self._step(writes=True)
            self.inner.delete([key])

    def _step(self, *, writes: bool = False) -> None:
        self.before(self.n_operations)
        self.n_operations += 1
        self.n_writes += writes


def die_at(number: int) -> Callable[[int], None]:
    """Let so many operations happen, and none after them."""

    def before(n_done: int) -> None:
        if n_done >= number:
            raise Crash

    return before


def contents(store: ObjectStore) -> dict[str, bytes]:
    """Every object and its bytes."""
    return {info.key: store.read(info.key) for info in store.list("")}


def copy_of(run: SampleRun) -> MemoryStore:
    """The store as it is now, on the same clock."""
    copy = MemoryStore(run.clock)
    for key, data in contents(run.store).items():
        copy.put(key, data)
    return copy
