"""Lies in a bucket's own header: lengths, offsets, types, names; every SHA-256 fits."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from registry import attack
from sample import Files, sealed, take_apart, true_files

_NAMES = (
    "../x",
    "/etc/passwd",
    "a\0b",
    "x" * 4096,
    "x" * 4097,
    "",
    "é" * 2048,
    "é" * 2049,
    "a@b",
    "@",
)


def _replaced(codec: str, bucket: bytes) -> Files:
    files = true_files(codec)
    return sealed(json.loads(files.index), [bucket, *list(files.buckets.values())[1:]])


def _first(codec: str) -> tuple[dict[str, Any], bytes]:
    bucket = next(iter(true_files(codec).buckets.values()))
    (n_json,) = struct.unpack("<Q", bucket[:8])
    return json.loads(bucket[8 : 8 + n_json]), bucket[8 + n_json :]


def _bucket(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@attack("plain")
def header_lengths_that_are_wrong(codec: str) -> Iterator[Files]:
    """The first eight bytes promise a header of any other size."""
    bucket = next(iter(true_files(codec).buckets.values()))
    (n_json,) = struct.unpack("<Q", bucket[:8])
    for size in (0, 1, n_json - 1, n_json + 1, len(bucket), 100 << 20, (100 << 20) + 1, 1 << 63):
        yield _replaced(codec, struct.pack("<Q", size) + bucket[8:])
    for whole in (b"", b"\0" * 7, b"\0" * 8, b"PK\x03\x04" + bucket[4:]):
        yield _replaced(codec, whole)


@attack("plain")
def offsets_that_overlap_or_leave_the_file(codec: str) -> Iterator[Files]:
    """Records overlap, leave gaps, run backwards, or lie outside the file."""
    header, data = _first(codec)
    keys = [key for key in header if key != "__metadata__"]
    first, second = header[keys[0]], header[keys[1]]
    start, stop = second["data_offsets"]
    for offsets in (
        [start - 4, stop],
        [start + 4, stop],
        [0, stop - start],
        [stop, start],
        [start, stop + 4],
        [-4, stop],
        [start, 1 << 63],
        [1 << 60, (1 << 60) + stop - start],
        [start],
        [start, stop, stop],
        [float(start), float(stop)],
        None,
    ):
        yield _replaced(
            codec, _bucket({**header, keys[1]: {**second, "data_offsets": offsets}}, data)
        )
        size = (offsets or [0, 0])[-1] - (offsets or [0])[0]
        fitting = {**second, "data_offsets": offsets, "shape": [size]}
        yield _replaced(codec, _bucket({**header, keys[1]: fitting}, data))
    same = {**header, keys[1]: first}
    yield _replaced(codec, _bucket(same, data))
    yield _replaced(codec, _bucket(header, data + b"\0"))
    yield _replaced(codec, _bucket(header, data[:-1]))


@attack("plain")
def entries_of_another_type(codec: str) -> Iterator[Files]:
    """A record is not a row of bytes: another dtype, more dimensions, 2^60 elements."""
    header, data = _first(codec)
    key = next(key for key in header if key != "__metadata__")
    n = header[key]["data_offsets"][1]
    for change in (
        {"dtype": "I8"},
        {"dtype": "BOOL"},
        {"dtype": "F4"},
        {"dtype": "x" * 10_000},
        {"dtype": None},
        {"shape": [1, n]},
        {"shape": [n, 1, 1]},
        {"shape": []},
        {"shape": [1 << 60]},
        {"shape": [1 << 32, 1 << 32]},
        {"shape": [n] + [1] * 16},
        {"shape": [-n]},
        {"shape": "n"},
        {"more": 1},
    ):
        yield _replaced(codec, _bucket({**header, key: {**header[key], **change}}, data))
    for value in (None, [], 7, "x", {}):
        yield _replaced(codec, _bucket({**header, key: value}, data))


@attack("plain")
def metadata_that_is_no_map_of_strings(codec: str) -> Iterator[Files]:
    """The metadata holds numbers, NaN or lists, or says another format."""
    header, data = _first(codec)
    for value in (None, [], "x", {"a": 1}, {"a": None}, {"a": float("nan")}, {"a": {}}, {}):
        yield _replaced(codec, _bucket({**header, "__metadata__": value}, data))
    metadata = header["__metadata__"]
    for change in (
        {"format": "pt"},
        {"format_version": "2"},
        {"format_version": ""},
        {"format": ""},
    ):
        yield _replaced(codec, _bucket({**header, "__metadata__": {**metadata, **change}}, data))


@attack()
def bucket_metadata_about_other_bits(codec: str) -> Iterator[Files]:
    """A bucket's metadata names a codec or digests that its records do not have."""
    header, data = _first(codec)
    metadata = header["__metadata__"]
    other = "plain" if codec == "compact" else "compact"
    for change in ({"codec": other}, {"base_digest": "0" * 32}, {"target_digest": "0" * 32}):
        yield _replaced(codec, _bucket({**header, "__metadata__": {**metadata, **change}}, data))


@attack("plain")
def headers_that_parsers_read_differently(codec: str) -> Iterator[Files]:
    """Keys occur twice, strings hold half a surrogate pair, nesting never ends."""
    header, data = _first(codec)
    text = json.dumps(header).encode()
    key = next(key for key in header if key != "__metadata__").encode()
    yield _replaced(codec, _bucket(text[:-1] + b',"' + key + b'":{}}', data))
    yield _replaced(codec, _bucket(text.replace(key, b"\\ud800", 1), data))
    yield _replaced(codec, _bucket(text.replace(key, b"\xff", 1), data))
    yield _replaced(
        codec, _bucket(text[:-1] + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", data)
    )
    yield _replaced(codec, _bucket(b" " + text, data))
    yield _replaced(codec, _bucket(b"[" + text + b"]", data))


@attack("plain")
def record_names_that_are_paths(codec: str) -> Iterator[Files]:
    """A record is called like a path, a NUL, a very long word, or another piece."""
    for name in (
        *_NAMES,
        "coded@1",
        "coded@0",
        "coded@-1",
        "coded@18446744073709551616",
        "expected",
    ):
        forgery = take_apart(codec)
        key, raw = forgery.buckets[0][0]
        forgery.buckets[0][0] = (name, raw)
        try:
            yield forgery.files()
        except Exception:
            header, data = _first(codec)
            yield _replaced(
                codec, _bucket({name if k == key else k: v for k, v in header.items()}, data)
            )


@attack()
def records_given_twice(codec: str) -> Iterator[Files]:
    """A tensor has the same record in two buckets, or an empty bucket stands between."""
    forgery = take_apart(codec)
    forgery.buckets[1].append(forgery.buckets[0][0])
    yield forgery.files()
    forgery = take_apart(codec)
    forgery.buckets[0].pop()
    yield forgery.files()
    forgery = take_apart(codec)
    forgery.buckets[1].clear()
    yield forgery.files()
