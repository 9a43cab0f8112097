"""Damage without a plan: every truncation and every flipped bit of every file."""

from __future__ import annotations

import json
from collections.abc import Iterator

from registry import attack
from sample import Files, sealed, take_apart, true_files


@attack()
def files_cut_at_every_byte(codec: str) -> Iterator[Files]:
    """A file ends after any number of its bytes; the index knows nothing of it."""
    files = true_files(codec)
    for n in range(len(files.index) - 1):
        yield Files(files.index[:n], files.buckets)
    for name, raw in files.buckets.items():
        for n in range(len(raw)):
            yield Files(files.index, {**files.buckets, name: raw[:n]})


@attack()
def buckets_cut_at_every_byte_with_their_hash(codec: str) -> Iterator[Files]:
    """A bucket ends after any number of its bytes, and its SHA-256 and length fit."""
    files = true_files(codec)
    for name, raw in files.buckets.items():
        for n in range(len(raw)):
            cut = {**files.buckets, name: raw[:n]}
            yield sealed(json.loads(files.index), list(cut.values()))


@attack()
def every_bit_of_the_index_flipped(codec: str) -> Iterator[Files]:
    """One bit of the index is wrong."""
    files = true_files(codec)
    for flipped in _flips(files.index):
        yield Files(flipped, files.buckets)


@attack()
def every_bit_of_every_bucket_flipped(codec: str) -> Iterator[Files]:
    """One bit of a bucket is wrong, and its SHA-256 shows it."""
    files = true_files(codec)
    for name, raw in files.buckets.items():
        for flipped in _flips(raw):
            yield Files(files.index, {**files.buckets, name: flipped})


@attack("compact", may_pass=True)
@attack("plain")
def every_bit_of_every_bucket_flipped_with_its_hash(codec: str) -> Iterator[Files]:
    """One bit is wrong, and the SHA-256 fits; weights of classes without elements cannot matter."""
    files = true_files(codec)
    for name, raw in files.buckets.items():
        for flipped in _flips(raw):
            changed = {**files.buckets, name: flipped}
            yield sealed(json.loads(files.index), list(changed.values()))


@attack("compact", may_pass=True)
@attack("plain")
def words_of_every_record_overwritten_with_their_hash(codec: str) -> Iterator[Files]:
    """Four bytes are all zeros or ones, and the SHA-256 fits; classes without elements cannot matter."""
    for number, bucket in enumerate(take_apart(codec).buckets):
        for place, (_, raw) in enumerate(bucket):
            for at in range(0, len(raw), 4):
                for word in (b"\0\0\0\0", b"\xff\xff\xff\xff"):
                    forgery = take_apart(codec)
                    changed = forgery.buckets[number][place][1]
                    if changed[at : at + 4] != word:
                        changed[at : at + 4] = word
                        yield forgery.files()


def _flips(raw: bytes) -> Iterator[bytes]:
    for at in range(len(raw)):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[at] ^= 1 << bit
            yield bytes(flipped)
