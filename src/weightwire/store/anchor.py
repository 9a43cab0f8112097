"""The full state at one version, as a plain Hugging Face checkpoint folder in the store.

Beside the checkpoint's own files lies ``anchor.json``: every file's length and the SHA-256 of each
of its chunks, so that chunks can be fetched in any order, checked, and fetched again alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from weightwire import limits
from weightwire.checkpoint.companions import companion_files
from weightwire.checkpoint.file_names import INDEX_NAME, SINGLE_NAME
from weightwire.checkpoint.shard_index import build_index
from weightwire.codec.index import seal
from weightwire.container import build_header, parse_json
from weightwire.container.fields import HEX_128, HEX_256, Fields
from weightwire.diff.state import StateReader
from weightwire.digest import piece_ranges
from weightwire.errors import HashMismatch, LimitExceeded, MalformedHeader, UnsupportedVersion
from weightwire.model import TensorSpec
from weightwire.store import layout
from weightwire.store.contract import ObjectStore
from weightwire.store.records import AnchorRef, sha256

FORMAT = "weightwire.anchor"
FORMAT_VERSION = 1
SHARD_BYTES = 2 << 30
"""The size at which a new shard is begun."""
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class AnchorFile:
    """One file of an anchor."""

    name: str
    n_bytes: int
    chunks: tuple[str, ...]
    """SHA-256 of each run of ``limits.ANCHOR_CHUNK_BYTES`` bytes."""

    def chunk_range(self, number: int) -> tuple[int, int]:
        """Where a chunk lies in the file."""
        start = number * limits.ANCHOR_CHUNK_BYTES
        return start, min(start + limits.ANCHOR_CHUNK_BYTES, self.n_bytes)


@dataclass(frozen=True)
class Manifest:
    """What an anchor consists of."""

    digest: str
    ties: Mapping[str, str]
    """Names that share another tensor's storage; a checkpoint file cannot say so itself."""
    files: tuple[AnchorFile, ...]

    @property
    def n_bytes(self) -> int:
        """All files."""
        return sum(file.n_bytes for file in self.files)


def write_anchor(
    store: ObjectStore,
    folder: str,
    state: StateReader,
    digest: str,
    companions: Path | None = None,
) -> AnchorRef:
    """Upload a state, piece by piece, and say where it is; nobody knows of it yet.

    Raises:
        StoreUnavailable, StoreRefused: the store's own errors; what was uploaded is an orphan.
    """
    shards = _shards(state)
    files = []
    for name, specs in shards.items():
        stream = _HashedStream(_ShardBytes(state, specs))
        store.put(folder + name, stream)
        files.append(stream.file(name))
    small = _small_files(shards, companions)
    for name, data in small.items():
        store.put(folder + name, data)
        files.append(_file_of(name, data))
    manifest = Manifest(digest, dict(state.ties), tuple(files))
    raw = manifest_bytes(manifest)
    store.put(folder + layout.ANCHOR_MANIFEST, raw)
    return AnchorRef(folder, manifest.n_bytes + len(raw), len(raw), sha256(raw))


def manifest_bytes(manifest: Manifest) -> bytes:
    """``anchor.json``."""
    fields = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "digest": manifest.digest,
        "ties": dict(manifest.ties),
        "chunk_bytes": limits.ANCHOR_CHUNK_BYTES,
        "files": [
            {"name": f.name, "n_bytes": f.n_bytes, "chunks": list(f.chunks)} for f in manifest.files
        ],
    }
    return seal(json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode())


def parse_manifest(raw: bytes, ref: AnchorRef) -> Manifest:
    """The mirror of ``manifest_bytes``, of the very bytes a record names.

    Raises:
        HashMismatch: other bytes.
        MalformedHeader, LimitExceeded, UnsupportedVersion: one that lies or is too new.
    """
    where = ref.folder + layout.ANCHOR_MANIFEST
    if len(raw) != ref.n_manifest_bytes or sha256(raw) != ref.manifest_sha256:
        raise HashMismatch(f"{where}: not the bytes its record names; fetch it again")
    fields = Fields(parse_json(raw, where, limits.MAX_INDEX_BYTES), where)
    if (fields.raw("format"), fields.raw("format_version")) != (FORMAT, FORMAT_VERSION):
        raise UnsupportedVersion(f"{where}: not an anchor this release reads; upgrade weightwire")
    if fields.raw("chunk_bytes") != limits.ANCHOR_CHUNK_BYTES:
        raise fields.wrong("chunk_bytes")
    files = fields.items("files", _parse_file)
    if len(files) > limits.MAX_ANCHOR_FILES:
        raise LimitExceeded(f"{where}: {len(files)} files")
    if len({file.name for file in files}) != len(files):
        raise MalformedHeader(f"{where}: a file is listed twice")
    return Manifest(fields.text("digest", HEX_128), fields.names("ties"), files)


def _parse_file(fields: Fields) -> AnchorFile:
    name = fields.text("name", _FILE_NAME)
    n_bytes = fields.count("n_bytes")
    chunks = fields.raw("chunks")
    n_chunks = -(-n_bytes // limits.ANCHOR_CHUNK_BYTES)
    if not isinstance(chunks, list) or len(chunks) != n_chunks:
        raise fields.wrong("chunks")
    if not all(isinstance(chunk, str) and HEX_256.fullmatch(chunk) for chunk in chunks):
        raise fields.wrong("chunks")
    return AnchorFile(name, n_bytes, tuple(chunks))


def _shards(state: StateReader) -> dict[str, list[TensorSpec]]:
    """Tensors by file, in the state's order; wide elements first, so that none stands astride."""
    groups: list[list[TensorSpec]] = [[]]
    n_bytes = 0
    for spec in state.specs.values():
        if groups[-1] and n_bytes + spec.n_bytes > SHARD_BYTES:
            groups.append([])
            n_bytes = 0
        groups[-1].append(spec)
        n_bytes += spec.n_bytes
    groups = [sorted(group, key=lambda spec: -spec.dtype.n_bytes) for group in groups]
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {
        f"model-{n:05d}-of-{len(groups):05d}.safetensors": group
        for n, group in enumerate(groups, 1)
    }


def _small_files(
    shards: Mapping[str, Sequence[TensorSpec]], companions: Path | None
) -> dict[str, bytes]:
    files = {}
    if len(shards) > 1:
        files[INDEX_NAME] = build_index(shards, {})
    if companions is not None:
        for path in companion_files(companions):
            if (
                not _FILE_NAME.fullmatch(path.name)
                or path.stat().st_size > limits.MAX_COMPANION_BYTES
            ):
                raise LimitExceeded(f"{path}: too large, or a name that is not safe everywhere")
            files[path.name] = path.read_bytes()
    return files


def _file_of(name: str, data: bytes) -> AnchorFile:
    size = limits.ANCHOR_CHUNK_BYTES
    chunks = [sha256(data[start : start + size]) for start in range(0, len(data), size)]
    return AnchorFile(name, len(data), tuple(chunks))


@dataclass(frozen=True)
class _ShardBytes:
    """A shard's bytes; may be asked for again when an upload failed half way."""

    state: StateReader
    specs: Sequence[TensorSpec]

    def __iter__(self) -> Iterator[memoryview]:
        yield memoryview(build_header(self.specs, _METADATA))
        for spec in self.specs:
            for start, stop in piece_ranges(spec) if spec.n_elements else ():
                bits = self.state.read(spec.name, start, stop)
                yield np.ascontiguousarray(bits).view(np.uint8).data


@dataclass
class _HashedStream:
    """Cuts a shard into chunks on their way up, and remembers their hashes."""

    source: _ShardBytes
    chunks: list[str] = field(default_factory=list)
    n_bytes: int = 0

    def __iter__(self) -> Iterator[bytes]:
        self.chunks, self.n_bytes = [], 0
        pending = bytearray()
        for part in self.source:
            for start in range(0, len(part), limits.ANCHOR_CHUNK_BYTES):
                pending += part[start : start + limits.ANCHOR_CHUNK_BYTES]
                while len(pending) >= limits.ANCHOR_CHUNK_BYTES:
                    yield self._close(bytes(pending[: limits.ANCHOR_CHUNK_BYTES]))
                    del pending[: limits.ANCHOR_CHUNK_BYTES]
        if pending:
            yield self._close(bytes(pending))

    def file(self, name: str) -> AnchorFile:
        """What was streamed; only right once all of it was."""
        return AnchorFile(name, self.n_bytes, tuple(self.chunks))

    def _close(self, chunk: bytes) -> bytes:
        self.chunks.append(hashlib.sha256(chunk).hexdigest())
        self.n_bytes += len(chunk)
        return chunk
