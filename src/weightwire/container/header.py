"""The safetensors header: eight bytes of length, then JSON that names every tensor's place.

    n_bytes_json: u64 | JSON, padded with spaces to a multiple of 8 | tensor data, without gaps

The file is untrusted: everything it says is checked here, once, and trusted afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from weightwire import limits
from weightwire.container.exact_read import read_bytes
from weightwire.container.strict_json import parse_json
from weightwire.errors import (
    DuplicateTensor,
    LimitExceeded,
    MalformedHeader,
    TruncatedFile,
    UnsupportedDType,
)
from weightwire.model import TensorSpec, dtype_named

METADATA_KEY = "__metadata__"
_LENGTH_BYTES = 8
_FIELDS = {"dtype", "shape", "data_offsets"}
_ADVICE = "fetch the file again, or rewrite it with the tool that made it"


@dataclass(frozen=True)
class Entry:
    """One tensor's place; byte offsets count from the header's ``data_start``."""

    spec: TensorSpec
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """A checked header; entries are in the order of their data."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    data_start: int


def read_header(file_descriptor: int, n_bytes_file: int, where: str) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        TruncatedFile: the file is shorter than its header says.
        MalformedHeader: the header does not parse or contradicts itself.
        LimitExceeded: a count or size beyond the published caps.
        UnsupportedDType: a tensor whose elements are unknown or not whole bytes.
    """
    prefix = read_bytes(file_descriptor, _LENGTH_BYTES, 0, where)
    n_bytes_json = _check_length(prefix, n_bytes_file, where)
    text = read_bytes(file_descriptor, n_bytes_json, _LENGTH_BYTES, where)
    return _parse_text(text, n_bytes_file, where)


def parse_header(file_bytes: bytes, where: str) -> Header:
    """Check the header of a safetensors file that is in memory already.

    Raises:
        the same as ``read_header``.
    """
    if len(file_bytes) < _LENGTH_BYTES:
        raise TruncatedFile(f"{where}: has {len(file_bytes)} bytes; fetch it again")
    n_bytes_json = _check_length(file_bytes[:_LENGTH_BYTES], len(file_bytes), where)
    text = file_bytes[_LENGTH_BYTES : _LENGTH_BYTES + n_bytes_json]
    return _parse_text(text, len(file_bytes), where)


def build_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that holds these tensors back to back, in this order.

    Raises:
        DuplicateTensor: one name occurs twice.
        MalformedHeader: a name that the format reserves or that is not valid Unicode.
        LimitExceeded: more tensors or header bytes than any reader accepts.
    """
    _check_names(specs)
    fields: dict[str, object] = {METADATA_KEY: dict(metadata)} if metadata else {}
    offset = 0
    for spec in specs:
        fields[spec.name] = _entry_fields(spec, offset)
        offset += spec.n_bytes
    text = _encode(fields)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _parse_text(text: bytes, n_bytes_file: int, where: str) -> Header:
    if not text.startswith(b"{"):
        raise MalformedHeader(f"{where}: header starts with {text[:1]!r}, not '{{'; {_ADVICE}")
    value = parse_json(text, where, limits.MAX_HEADER_BYTES)
    header = _parse_header(cast("dict[str, object]", value), _LENGTH_BYTES + len(text), where)
    _check_file_length(header, n_bytes_file, where)
    return header


def _check_length(prefix: bytes, n_bytes_file: int, where: str) -> int:
    n_bytes_json = int.from_bytes(prefix, "little")
    if n_bytes_json > limits.MAX_HEADER_BYTES:
        raise LimitExceeded(
            f"{where}: says its header has {n_bytes_json} bytes, the cap is "
            f"{limits.MAX_HEADER_BYTES}; this is no safetensors file, or a damaged one"
        )
    if _LENGTH_BYTES + n_bytes_json > n_bytes_file:
        raise TruncatedFile(
            f"{where}: says its header has {n_bytes_json} bytes, but the file has only "
            f"{n_bytes_file}; fetch it again"
        )
    return n_bytes_json


def _parse_header(value: dict[str, object], data_start: int, where: str) -> Header:
    metadata = _parse_metadata(value.pop(METADATA_KEY, {}), where)
    if len(value) > limits.MAX_TENSORS:
        raise LimitExceeded(f"{where}: {len(value)} tensors; at most {limits.MAX_TENSORS} are read")
    entries = [_parse_entry(name, fields, where) for name, fields in value.items()]
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    _check_contiguous(entries, where)
    return Header({entry.spec.name: entry for entry in entries}, metadata, data_start)


def _parse_metadata(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise MalformedHeader(f"{where}: {METADATA_KEY} is {value!r:.80}, not a map; {_ADVICE}")
    for key, text in value.items():
        if not isinstance(text, str):
            raise MalformedHeader(
                f"{where}: {METADATA_KEY}[{key!r}] is {text!r:.80}, not a string; {_ADVICE}"
            )
    return value


def _parse_entry(name: str, value: object, where: str) -> Entry:
    label = f"{where}: tensor {name!r:.200}"
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        raise MalformedHeader(
            f"{label} is described by {value!r:.200}; expected exactly {sorted(_FIELDS)}; {_ADVICE}"
        )
    spec = _parse_spec(name, value["dtype"], value["shape"], label)
    start, stop = _parse_offsets(value["data_offsets"], label)
    if stop - start != spec.n_bytes:
        raise MalformedHeader(
            f"{label} of {spec.dtype.name} and shape {spec.shape} needs {spec.n_bytes} bytes, "
            f"but data_offsets {[start, stop]} span {stop - start}; {_ADVICE}"
        )
    return Entry(spec, start, stop)


def _parse_spec(name: str, dtype: object, shape: object, label: str) -> TensorSpec:
    if not isinstance(dtype, str):
        raise MalformedHeader(f"{label}: dtype is {dtype!r:.80}, not a string; {_ADVICE}")
    try:
        return TensorSpec(name, dtype_named(dtype[:80]), tuple(_parse_sizes(shape, "shape", label)))
    except (UnsupportedDType, LimitExceeded) as error:
        raise type(error)(f"{label}: {error}") from error


def _parse_offsets(value: object, label: str) -> tuple[int, int]:
    offsets = _parse_sizes(value, "data_offsets", label)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise MalformedHeader(
            f"{label}: data_offsets are {offsets!r:.80}; expected two rising integers; {_ADVICE}"
        )
    return offsets[0], offsets[1]


def _parse_sizes(value: object, field: str, label: str) -> list[int]:
    """``type(...) is int`` and not ``isinstance``: ``true`` must not pass for 1."""
    if not isinstance(value, list) or any(type(size) is not int or size < 0 for size in value):
        raise MalformedHeader(
            f"{label}: {field} is {value!r:.80}, not a list of whole numbers; {_ADVICE}"
        )
    return value


def _check_contiguous(entries: Iterable[Entry], where: str) -> None:
    """Overlaps would alias tensors; gaps could smuggle bytes that no digest covers."""
    expected = 0
    for entry in entries:
        if entry.start != expected:
            lie = "overlaps the one before it" if entry.start < expected else "leaves a gap"
            raise MalformedHeader(
                f"{where}: tensor {entry.spec.name!r:.200} {lie}: it starts at byte "
                f"{entry.start}, expected {expected}; {_ADVICE}"
            )
        expected = entry.stop


def _check_file_length(header: Header, n_bytes_file: int, where: str) -> None:
    n_bytes_data = max((entry.stop for entry in header.entries.values()), default=0)
    expected = header.data_start + n_bytes_data
    if n_bytes_file < expected:
        raise TruncatedFile(
            f"{where}: has {n_bytes_file} bytes, its header promises {expected}; fetch it again"
        )
    if n_bytes_file > expected:
        raise MalformedHeader(
            f"{where}: has {n_bytes_file} bytes, its header accounts for {expected}; {_ADVICE}"
        )


def _check_names(specs: Sequence[TensorSpec]) -> None:
    if len(specs) > limits.MAX_TENSORS:
        raise LimitExceeded(f"{len(specs)} tensors in one file; at most {limits.MAX_TENSORS}")
    seen: set[str] = set()
    for spec in specs:
        if spec.name == METADATA_KEY:
            raise MalformedHeader(f"no tensor can be called {METADATA_KEY!r}; rename it")
        if spec.name in seen:
            raise DuplicateTensor(f"tensor {spec.name!r} occurs twice in one file; drop one")
        seen.add(spec.name)


def _entry_fields(spec: TensorSpec, offset: int) -> dict[str, object]:
    return {
        "dtype": spec.dtype.name,
        "shape": list(spec.shape),
        "data_offsets": [offset, offset + spec.n_bytes],
    }


def _encode(fields: dict[str, object]) -> bytes:
    """Compact JSON, padded so that the data behind it starts at a multiple of 8."""
    try:
        text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise MalformedHeader(f"a tensor name is not valid Unicode: {error}; rename it") from error
    padded = text + b" " * (-len(text) % _LENGTH_BYTES)
    if len(padded) > limits.MAX_HEADER_BYTES:
        raise LimitExceeded(f"header of {len(padded)} bytes; the cap is {limits.MAX_HEADER_BYTES}")
    return padded
