"""The small objects a run's log is made of: what makes a version exist, and other ways to reach it.

Each is one JSON object, signed if the run has a key, and sealed with its own SHA-256. What one
function writes, its mirror reads, field by field, in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from weightwire import limits
from weightwire.codec.index import seal
from weightwire.codec.piece import CODECS
from weightwire.container import parse_json
from weightwire.container.fields import HEX_128, HEX_256, Fields
from weightwire.errors import HashMismatch, NotARun, ReplayedRecord, UnsupportedVersion
from weightwire.store import layout

Sign: TypeAlias = Callable[[bytes], str]
"""Gives the signature of a message, in hex."""
Verify: TypeAlias = Callable[[bytes, str, str], None]
"""Refuses a message, its signature ("" if none) and where it came from, or returns."""

FORMAT_VERSION = 1
"""Raised by every change after which an older reader would misread a run."""
_SIGNED_AS = b"weightwire.record\0"
_LOOKS_SEALED = len(seal(b"{}")) - 1


@dataclass(frozen=True)
class RunIdentity:
    """What tells one run from another at the same place."""

    run: str
    created_ms: int


@dataclass(frozen=True)
class PatchRef:
    """Where a patch is, and how to know it."""

    folder: str
    base_version: int
    base_digest: str
    codec: str
    n_changed: int
    n_buckets: int
    n_bytes: int
    """All buckets and the index: what a receiver downloads."""
    n_index_bytes: int
    index_sha256: str


@dataclass(frozen=True)
class AnchorRef:
    """Where an anchor is, and how to know it."""

    folder: str
    n_bytes: int
    n_manifest_bytes: int
    manifest_sha256: str


@dataclass(frozen=True)
class Commit:
    """The record of one version: the version exists because this does."""

    run: str
    version: int
    epoch: int
    put_id: str
    previous: str
    """SHA-256 of the commit before it, "" for the first: the log is a chain."""
    time_ms: int
    digest: str
    n_elements: int
    n_state_bytes: int
    patch: PatchRef | None
    """None for the first version, for one that changes nothing, and for a fresh start."""
    anchor: AnchorRef | None
    step: int | None = None
    """The training step it was published at, as the trainer counts; versions count publishes."""

    @property
    def is_empty(self) -> bool:
        """Whether this version holds the same bits as the one before it."""
        return self.patch is None and self.anchor is None


@dataclass(frozen=True)
class Offer:
    """Another way to reach a version that exists: an anchor, or a skip patch. Exactly one is set."""

    run: str
    version: int
    epoch: int
    put_id: str
    time_ms: int
    digest: str
    patch: PatchRef | None
    anchor: AnchorRef | None


def sha256(data: bytes) -> str:
    """The identity of an object's bytes."""
    return hashlib.sha256(data).hexdigest()


def identity_bytes(identity: RunIdentity) -> bytes:
    """``run.json``."""
    return sealed("weightwire.run", {"run": identity.run, "created_ms": identity.created_ms}, None)


def parse_identity(raw: bytes, where: str) -> RunIdentity:
    """The mirror of ``identity_bytes``.

    Raises:
        NotARun, UnsupportedVersion, RetryError: not what we wrote.
    """
    fields = opened("weightwire.run", raw, where, None)
    return RunIdentity(fields.text("run", HEX_128), fields.count("created_ms"))


def commit_bytes(commit: Commit, sign: Sign | None) -> bytes:
    """A commit record, signed if there is a key."""
    body: dict[str, object] = {
        "run": commit.run,
        "version": commit.version,
        "epoch": commit.epoch,
        "put_id": commit.put_id,
        "previous": commit.previous,
        "time_ms": commit.time_ms,
        "digest": commit.digest,
        "n_elements": commit.n_elements,
        "n_state_bytes": commit.n_state_bytes,
        "patch": _patch_fields(commit.patch),
        "anchor": _anchor_fields(commit.anchor),
    }
    if commit.step is not None:
        body["step"] = commit.step
    return sealed("weightwire.commit", body, sign)


def parse_commit(raw: bytes, where: str, version: int, run: str, verify: Verify | None) -> Commit:
    """The mirror of ``commit_bytes``; must be the record of this version of this run.

    Raises:
        ReplayedRecord: a record of another version or run.
        UntrustedHistory: whatever ``verify`` raises.
        NotARun, UnsupportedVersion, RetryError: not what we wrote.
    """
    fields = opened("weightwire.commit", raw, where, verify)
    commit = Commit(
        run=fields.text("run", HEX_128),
        version=fields.count("version"),
        epoch=fields.count("epoch"),
        put_id=fields.text("put_id", HEX_128),
        previous=fields.text("previous") and fields.text("previous", HEX_256),
        time_ms=fields.count("time_ms"),
        digest=fields.text("digest", HEX_128),
        n_elements=fields.count("n_elements"),
        n_state_bytes=fields.count("n_state_bytes"),
        patch=fields.optional("patch", _parse_patch),
        anchor=fields.optional("anchor", _parse_anchor),
        step=fields.optional_count("step"),
    )
    _check_place(commit, version, run, where)
    return commit


def offer_bytes(offer: Offer, sign: Sign | None) -> bytes:
    """An offer, signed if there is a key."""
    body = {
        "run": offer.run,
        "version": offer.version,
        "epoch": offer.epoch,
        "put_id": offer.put_id,
        "time_ms": offer.time_ms,
        "digest": offer.digest,
        "patch": _patch_fields(offer.patch),
        "anchor": _anchor_fields(offer.anchor),
    }
    return sealed("weightwire.offer", body, sign)


def parse_offer(raw: bytes, where: str, version: int, run: str, verify: Verify | None) -> Offer:
    """The mirror of ``offer_bytes``.

    Raises:
        the same as ``parse_commit``.
    """
    fields = opened("weightwire.offer", raw, where, verify)
    offer = Offer(
        run=fields.text("run", HEX_128),
        version=fields.count("version"),
        epoch=fields.count("epoch"),
        put_id=fields.text("put_id", HEX_128),
        time_ms=fields.count("time_ms"),
        digest=fields.text("digest", HEX_128),
        patch=fields.optional("patch", _parse_patch),
        anchor=fields.optional("anchor", _parse_anchor),
    )
    _check_place(offer, version, run, where)
    if (offer.patch is None) == (offer.anchor is None):
        raise fields.wrong("patch")
    return offer


def _check_place(record: Commit | Offer, version: int, run: str, where: str) -> None:
    if (record.version, record.run) != (version, run):
        raise ReplayedRecord(
            f"{where}: a record of version {record.version} of run {record.run[:8]}…, expected"
            f" version {version} of run {run[:8]}…; someone moved it here"
        )
    if record.patch is not None and record.patch.base_version >= version:
        raise ReplayedRecord(
            f"{where}: version {version} cannot start from {record.patch.base_version}"
        )


def _patch_fields(ref: PatchRef | None) -> dict[str, object] | None:
    if ref is None:
        return None
    return {
        "folder": ref.folder,
        "base_version": ref.base_version,
        "base_digest": ref.base_digest,
        "codec": ref.codec,
        "n_changed": ref.n_changed,
        "n_buckets": ref.n_buckets,
        "n_bytes": ref.n_bytes,
        "n_index_bytes": ref.n_index_bytes,
        "index_sha256": ref.index_sha256,
    }


def _parse_patch(fields: Fields) -> PatchRef:
    codec = fields.text("codec")
    if codec not in CODECS:
        raise fields.wrong("codec")
    return PatchRef(
        folder=fields.text("folder", layout.PATCH_FOLDER),
        base_version=fields.count("base_version"),
        base_digest=fields.text("base_digest", HEX_128),
        codec=codec,
        n_changed=fields.count("n_changed"),
        n_buckets=fields.count("n_buckets", limits.MAX_BUCKETS),
        n_bytes=fields.count("n_bytes"),
        n_index_bytes=fields.count("n_index_bytes", limits.MAX_INDEX_BYTES),
        index_sha256=fields.text("index_sha256", HEX_256),
    )


def _anchor_fields(ref: AnchorRef | None) -> dict[str, object] | None:
    if ref is None:
        return None
    return {
        "folder": ref.folder,
        "n_bytes": ref.n_bytes,
        "n_manifest_bytes": ref.n_manifest_bytes,
        "manifest_sha256": ref.manifest_sha256,
    }


def _parse_anchor(fields: Fields) -> AnchorRef:
    return AnchorRef(
        folder=fields.text("folder", layout.ANCHOR_FOLDER),
        n_bytes=fields.count("n_bytes"),
        n_manifest_bytes=fields.count("n_manifest_bytes", limits.MAX_INDEX_BYTES),
        manifest_sha256=fields.text("manifest_sha256", HEX_256),
    )


def sealed(kind: str, body: dict[str, object], sign: Sign | None) -> bytes:
    """An object of this kind: its fields, its signature if there is a key, its own SHA-256."""
    fields = {"format": kind, "format_version": FORMAT_VERSION, **body}
    plain = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    signature = sign(_SIGNED_AS + plain) if sign else ""
    return seal(plain[:-1] + b',"signature":"' + signature.encode() + b'"}')


def opened(kind: str, raw: bytes, where: str, verify: Verify | None) -> Fields:
    """The mirror of ``sealed``: fields, once the format, the seal and the signature are right.

    Raises:
        UntrustedHistory: whatever ``verify`` raises.
        NotARun, UnsupportedVersion, LimitExceeded, RetryError: not what we wrote.
    """
    fields = Fields(parse_json(raw, where, limits.MAX_RECORD_BYTES), where)
    unsealed = raw[:-_LOOKS_SEALED] + b"}"
    is_intact = raw == seal(unsealed)
    # One wrong bit must not look like something else: only what is intact, or was never ours, is.
    if fields.raw("format") != kind and (is_intact or fields.raw("sha256") is None):
        raise NotARun(f"{where}: format is {fields.raw('format')!r:.80}, not {kind!r}")
    if not is_intact:
        raise HashMismatch(f"{where}: not the bytes its own SHA-256 was made of; fetch it again")
    if fields.raw("format_version") != FORMAT_VERSION:
        raise UnsupportedVersion(
            f"{where}: format version {fields.raw('format_version')!r:.80}; this release reads"
            f" version {FORMAT_VERSION}: upgrade weightwire"
        )
    signature = fields.text("signature")
    if verify is not None:
        field_bytes = b',"signature":"' + signature.encode() + b'"}'
        verify(_SIGNED_AS + unsealed[: -len(field_bytes)] + b"}", signature, where)
    return fields
