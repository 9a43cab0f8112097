"""The index of a patch: which buckets, which digests, and the tensors that need no record."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightwire import limits
from weightwire.codec.bucket import FORMAT, FORMAT_VERSION, check_format
from weightwire.codec.piece import CODECS
from weightwire.container import parse_json
from weightwire.errors import HashMismatch, LimitExceeded, MalformedHeader, NotAPatch

INDEX_FILE = "patch.json"
_HEX_128 = re.compile(r"[0-9a-f]{32}")
_HEX_256 = re.compile(r"[0-9a-f]{64}")
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
    return _Parser(value, where).index()


def seal(json_object: bytes) -> bytes:
    """An index file: a JSON object with the SHA-256 of its bytes as one more, last field."""
    field_bytes = b',"sha256":"' + hashlib.sha256(json_object).hexdigest().encode() + b'"}\n'
    return json_object[:-1] + field_bytes


class _Parser:
    """Takes typed fields out of a JSON object, or says which one is wrong."""

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where

    def index(self) -> PatchIndex:
        return PatchIndex(
            codec=self._choice("codec"),
            base_digest=self._hex("base_digest"),
            target_digest=self._hex("target_digest"),
            n_tensors=self._count("n_tensors", self._fields.get("n_tensors")),
            n_elements=self._count("n_elements", self._fields.get("n_elements")),
            n_changed=self._count("n_changed", self._fields.get("n_changed")),
            buckets=self._buckets(),
            unchanged=self._names("unchanged", _HEX_128),
            removed=self._removed(),
            tied=self._names("tied", None),
        )

    def _wrong(self, field_name: str) -> MalformedHeader:
        found = self._fields.get(field_name)
        return MalformedHeader(
            f"{self._where}: field {field_name!r} is {found!r:.120}; fetch the patch again"
        )

    def _choice(self, field_name: str) -> str:
        value = self._fields.get(field_name)
        if value not in CODECS:
            raise self._wrong(field_name)
        return str(value)

    def _hex(self, field_name: str) -> str:
        value = self._fields.get(field_name)
        if not isinstance(value, str) or not _HEX_128.fullmatch(value):
            raise self._wrong(field_name)
        return value

    def _count(self, field_name: str, value: object) -> int:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise self._wrong(field_name)
        return value

    def _buckets(self) -> tuple[BucketEntry, ...]:
        value = self._fields.get("buckets")
        if not isinstance(value, list):
            raise self._wrong("buckets")
        if len(value) > limits.MAX_BUCKETS:
            raise LimitExceeded(f"{self._where}: {len(value)} buckets")
        entries = tuple(self._bucket(entry) for entry in value)
        if len({entry.file for entry in entries}) != len(entries):
            raise self._wrong("buckets")
        return entries

    def _bucket(self, value: object) -> BucketEntry:
        if not isinstance(value, dict):
            raise self._wrong("buckets")
        file, sha256 = value.get("file"), value.get("sha256")
        if not isinstance(file, str) or not _BUCKET_FILE.fullmatch(file):
            raise self._wrong("buckets")
        if not isinstance(sha256, str) or not _HEX_256.fullmatch(sha256):
            raise self._wrong("buckets")
        n_bytes = self._count("buckets", value.get("n_bytes"))
        if n_bytes > limits.MAX_BUCKET_BYTES:
            raise LimitExceeded(f"{self._where}: bucket {file} of {n_bytes} bytes")
        return BucketEntry(file, n_bytes, sha256)

    def _names(self, field_name: str, pattern: re.Pattern[str] | None) -> dict[str, str]:
        value = self._fields.get(field_name)
        if not isinstance(value, dict):
            raise self._wrong(field_name)
        for text in value.values():
            if not isinstance(text, str) or (pattern and not pattern.fullmatch(text)):
                raise self._wrong(field_name)
        return value

    def _removed(self) -> tuple[str, ...]:
        value = self._fields.get("removed")
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._wrong("removed")
        return tuple(value)
