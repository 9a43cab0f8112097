"""A bucket: several records in one valid safetensors file, one hash, one object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from weightwire import limits
from weightwire.codec.record import KIND_OF_CODEC, Kind, Record, parse_record, record_parts
from weightwire.container import build_header, parse_header
from weightwire.digest import TensorDigest, combine
from weightwire.errors import LimitExceeded, MalformedHeader, NotAPatch, UnsupportedVersion
from weightwire.model import TensorSpec, dtype_named

FORMAT = "weightwire.patch"
FORMAT_VERSION = 1
"""Raised by every change after which an older reader would misread a patch."""


def bucket_bytes(records: Sequence[Record], codec: str) -> bytes:
    """A whole bucket file.

    Raises:
        LimitExceeded: the bucket would be larger than any reader accepts.
    """
    parts = [record_parts(record) for record in records]
    byte = dtype_named("U8")
    specs = [
        TensorSpec(record.head.key, byte, (len(head) + len(body),))
        for record, (head, body) in zip(records, parts, strict=True)
    ]
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "codec": codec,
        "base_digest": _combined(records, base=True),
        "target_digest": _combined(records, base=False),
    }
    bodies = [part for both in parts for part in both]
    whole = b"".join([build_header(specs, metadata), *bodies])
    if len(whole) > limits.MAX_BUCKET_BYTES:
        raise LimitExceeded(f"a bucket of {len(whole)} bytes; the cap is {limits.MAX_BUCKET_BYTES}")
    return whole


def parse_bucket(file_bytes: bytes, where: str) -> Iterator[Record]:
    """The records of a bucket, in file order.

    Raises:
        NotAPatch, UnsupportedVersion: a safetensors file, but not a bucket we read.
        MalformedHeader, MalformedRecord, TruncatedFile: a damaged one.
    """
    header = parse_header(file_bytes, where)
    check_format(header.metadata.get("format"), header.metadata.get("format_version"), where)
    data = np.frombuffer(file_bytes, dtype=np.uint8)[header.data_start :]
    records = []
    for key, entry in header.entries.items():
        if entry.spec.dtype.name != "U8" or len(entry.spec.shape) != 1:
            raise MalformedHeader(f"{where}: {key!r:.200} is not a record; fetch the patch again")
        records.append(parse_record(key, data[entry.start : entry.stop]))
    _check_metadata(header.metadata, records, where)
    yield from records


def _check_metadata(metadata: Mapping[str, str], records: Sequence[Record], where: str) -> None:
    """What a bucket says of itself is read by people and tools that never decode it."""
    found = _combined(records, base=True), _combined(records, base=False)
    if found != (metadata.get("base_digest"), metadata.get("target_digest")):
        raise MalformedHeader(f"{where}: its metadata has other digests; fetch the patch again")
    kinds = {Kind.FULL, KIND_OF_CODEC.get(metadata.get("codec", ""))}
    if not {record.head.kind for record in records} <= kinds:
        raise MalformedHeader(f"{where}: its metadata names another codec; fetch the patch again")


def check_format(name: object, version: object, where: str) -> None:
    """Refuse what is not a patch, and patches of another format version.

    Raises:
        NotAPatch: another format, or none.
        UnsupportedVersion: written by a newer release.
    """
    if name != FORMAT:
        raise NotAPatch(f"{where}: format is {name!r:.80}, not {FORMAT!r}")
    if str(version) != str(FORMAT_VERSION):
        raise UnsupportedVersion(
            f"{where}: format version {version!r:.80}; this release reads version"
            f" {FORMAT_VERSION}: upgrade weightwire, or make the patch again with this one"
        )


def _combined(records: Sequence[Record], *, base: bool) -> str:
    """The digest of the bucket's own pieces: what it takes in and what it gives."""
    return combine(
        (
            TensorSpec(record.head.key, record.head.spec.dtype, record.head.spec.shape),
            _side(record, base=base),
        )
        for record in records
    )


def _side(record: Record, *, base: bool) -> TensorDigest:
    return record.head.base_digest if base else record.head.target_digest
