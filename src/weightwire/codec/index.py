"""The index of a patch: which buckets, which digests, and the tensors that need no record."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from weightwire import limits
from weightwire.codec.bucket import FORMAT, FORMAT_VERSION, check_format
from weightwire.codec.piece import CODECS
from weightwire.container import parse_json
from weightwire.container.fields import HEX_128, HEX_256, Fields
from weightwire.errors import HashMismatch, LimitExceeded, NotAPatch

INDEX_FILE = "patch.json"
_BUCKET_FILE = re.compile(r"bucket-[0-9]{5,7}\.safetensors")


@dataclass(frozen=True)
class BucketEntry:
    """One bucket file as the index knows it."""

    file: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class PatchIndex:
    """What a reader must know before the first bucket."""

    codec: str
    base_digest: str
    target_digest: str
    n_tensors: int
    n_elements: int
    n_changed: int
    buckets: tuple[BucketEntry, ...]
    unchanged: Mapping[str, str] = field(default_factory=dict)
    """Tensors without a record, with their digest."""
    removed: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that share the storage of another tensor, and that tensor's name."""

    @property
    def n_bytes(self) -> int:
        """Size of all buckets."""
        return sum(bucket.n_bytes for bucket in self.buckets)


def index_bytes(index: PatchIndex) -> bytes:
    """The index file."""
    fields = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "codec": index.codec,
        "base_digest": index.base_digest,
        "target_digest": index.target_digest,
        "n_tensors": index.n_tensors,
        "n_elements": index.n_elements,
        "n_changed": index.n_changed,
        "buckets": [
            {"file": b.file, "n_bytes": b.n_bytes, "sha256": b.sha256} for b in index.buckets
        ],
        "unchanged": dict(index.unchanged),
        "removed": list(index.removed),
        "tied": dict(index.tied),
    }
    return seal(json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode())


def parse_index(text: bytes, where: str) -> PatchIndex:
    """The inverse of ``index_bytes``, on bytes from anywhere.

    Raises:
        NotAPatch, UnsupportedVersion: not an index we read.
        HashMismatch: not the bytes that were written.
        MalformedHeader, LimitExceeded: one that lies.
    """
    value = parse_json(text, where, limits.MAX_INDEX_BYTES)
    if not isinstance(value, dict):
        raise NotAPatch(f"{where}: not a patch index")
    check_format(value.get("format"), value.get("format_version"), where)
    unsealed = text[: 1 - len(seal(b"{}"))] + b"}"
    if text != seal(unsealed):
        raise HashMismatch(
            f"{where}: not the bytes its own SHA-256 was made of; fetch the patch again"
        )
    return _parse_fields(Fields(value, where), where)


def seal(json_object: bytes) -> bytes:
    """An index file: a JSON object with the SHA-256 of its bytes as one more, last field."""
    field_bytes = b',"sha256":"' + hashlib.sha256(json_object).hexdigest().encode() + b'"}\n'
    return json_object[:-1] + field_bytes


def _parse_fields(fields: Fields, where: str) -> PatchIndex:
    if fields.raw("codec") not in CODECS:
        raise fields.wrong("codec")
    return PatchIndex(
        codec=fields.text("codec"),
        base_digest=fields.text("base_digest", HEX_128),
        target_digest=fields.text("target_digest", HEX_128),
        n_tensors=fields.count("n_tensors"),
        n_elements=fields.count("n_elements"),
        n_changed=fields.count("n_changed"),
        buckets=_parse_buckets(fields, where),
        unchanged=fields.names("unchanged", HEX_128),
        removed=_parse_removed(fields),
        tied=fields.names("tied"),
    )


def _parse_buckets(fields: Fields, where: str) -> tuple[BucketEntry, ...]:
    found = fields.raw("buckets")
    if isinstance(found, list) and len(found) > limits.MAX_BUCKETS:
        raise LimitExceeded(f"{where}: {len(found)} buckets")
    entries = fields.items("buckets", _parse_bucket)
    for entry in entries:
        if entry.n_bytes > limits.MAX_BUCKET_BYTES:
            raise LimitExceeded(f"{where}: bucket {entry.file} of {entry.n_bytes} bytes")
    if len({entry.file for entry in entries}) != len(entries):
        raise fields.wrong("buckets")
    return entries


def _parse_bucket(fields: Fields) -> BucketEntry:
    return BucketEntry(
        fields.text("file", _BUCKET_FILE), fields.count("n_bytes"), fields.text("sha256", HEX_256)
    )


def _parse_removed(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("removed")
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise fields.wrong("removed")
    return tuple(value)
