"""Lies in the coded streams of the compact codec: model, directory, words; every SHA-256 fits."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import numpy as np

from registry import attack
from sample import Files, Forgery, take_apart
from weightwire.codec.model_bytes import parse_model
from weightwire.codec.record import parse_record

_CODED = ("coded", "expected", "exceptions", "wide")
_ALL = (*_CODED, "dense", "reshaped")


def _directory(forgery: Forgery, name: str) -> int:
    """Where the directory row of a record's only chunk starts."""
    record = parse_record(name, np.frombuffer(bytes(forgery.record(name)), np.uint8))
    return forgery.body(name) + parse_model(record.body, record.head.spec.dtype)[2]


def _with_bytes(name: str, at: int, new: bytes, *, from_directory: bool) -> Iterator[Files]:
    forgery = take_apart("compact")
    start = at + (_directory(forgery, name) if from_directory else forgery.body(name))
    raw = forgery.record(name)
    if raw[start : start + len(new)] != new:
        raw[start : start + len(new)] = new
        yield forgery.files()


def _head(name: str) -> tuple[int, int]:
    forgery = take_apart("compact")
    start = _directory(forgery, name)
    row: tuple[int, int] = struct.unpack_from("<II", forgery.record(name), start)
    return row


@attack("compact")
def chunk_sizes_out_of_range(codec: str) -> Iterator[Files]:
    """A chunk has 2^0 to 2^255 elements."""
    for name in _ALL:
        for value in (*range(10), *range(21, 256, 13), 255):
            yield from _with_bytes(name, 0, bytes([value]), from_directory=False)


@attack("compact")
def windows_past_every_key(codec: str) -> Iterator[Files]:
    """The window of classes starts where no exponent is, or reserved bits are set."""
    for name in _CODED:
        for value in (2048, 65535):
            yield from _with_bytes(name, 2, struct.pack("<H", value), from_directory=False)
        yield from _with_bytes(name, 1, b"\x01", from_directory=False)


@attack("compact", may_pass=True)
def windows_of_every_start(codec: str) -> Iterator[Files]:
    """The window of classes starts elsewhere; where all elements keep their class, it cannot matter."""
    for name in _CODED:
        for value in (0, 1, 3, 14, 31, 32, 33, 120, 127, 255, 256):
            yield from _with_bytes(name, 2, struct.pack("<H", value), from_directory=False)


@attack("compact", may_pass=True)
def class_weights_of_every_value(codec: str) -> Iterator[Files]:
    """A class has any weight and expectation; one that no element is in cannot matter."""
    for name in _CODED:
        for number in range(16):
            for value in (0, 1, 8, 9, 15, 16, 24, 25, 32, 255):
                yield from _with_bytes(name, 4 + number, bytes([value]), from_directory=False)


@attack("compact")
def weights_out_of_range(codec: str) -> Iterator[Files]:
    """A class weighs more than 2^8, or the last class weighs or expects anything."""
    for name in _CODED:
        for number in range(16):
            for value in (9, 0x0F, 0x19, 0x20, 0x80, 0xFF):
                yield from _with_bytes(name, 4 + number, bytes([value]), from_directory=False)
        for value in range(1, 256, 3):
            yield from _with_bytes(name, 19, bytes([value]), from_directory=False)


@attack("compact", may_pass=True)
def step_tables_of_every_kind(codec: str) -> Iterator[Files]:
    """Step tables with tokens out of range, none, too many, or frequencies that do not sum up."""
    for name in _CODED:
        forgery = take_apart("compact")
        size = _directory(forgery, name) - forgery.body(name)
        for at in range(20, size):
            for value in (0, 1, 2, 4, 61, 62, 126, 127, 128, 254, 255):
                yield from _with_bytes(name, at, bytes([value]), from_directory=False)


@attack("compact")
def tables_that_do_not_sum_up(codec: str) -> Iterator[Files]:
    """A step table has a frequency of zero, a sum other than 4096, or a token no change can need."""
    bodies = (
        bytes([0, 2, 0, 0x80, 32]),
        bytes([0, 2, 1, 1]),
        bytes([0, 2, 0xFF, 0xFF, 0xFF, 0xFF]),
        bytes([0, 3, 0x80, 16, 0x80, 16, 1]),
        bytes([30, 1]),
        bytes([0, 0]),
        bytes([0, 200]),
        bytes([254, 1]),
        bytes([0xFF]),
    )
    for name in ("coded", "expected"):
        for body in bodies:
            forgery = take_apart("compact")
            raw, start, stop = forgery.record(name), forgery.body(name), _directory(forgery, name)
            model = bytes(raw[start : start + 20]) + body + b"\xff" * 15
            forgery.put(
                name, bytes(raw[:start]) + model + bytes(-len(model) % 4) + bytes(raw[stop:])
            )
            yield forgery.files()


@attack("compact")
def heads_with_every_flag(codec: str) -> Iterator[Files]:
    """A chunk's head has every combination of its flags, and every rate."""
    for name in _ALL:
        head, _ = _head(name)
        flags = {(head & 0xFF1FFFFF) | flag << 21 for flag in range(8)}
        rates = {(head & 0x00FFFFFF) | rate << 24 for rate in range(256)}
        for value in sorted(flags | rates - {head}):
            yield from _with_bytes(name, 0, struct.pack("<I", value), from_directory=True)


@attack("compact")
def more_events_than_elements(codec: str) -> Iterator[Files]:
    """A chunk announces another number of events than it has, up to more than its elements."""
    for name in _CODED:
        head, _ = _head(name)
        for n_events in (*range(50), 1 << 10, 1 << 20, (1 << 21) - 1):
            value = (head & ~0x1FFFFF) | n_events
            yield from _with_bytes(name, 0, struct.pack("<I", value), from_directory=True)


@attack("compact")
def word_counts_that_are_wrong(codec: str) -> Iterator[Files]:
    """A chunk's directory row promises more or fewer words than there are."""
    for name in _ALL:
        _, n_words = _head(name)
        for value in {0, 1, 2, n_words - 1, n_words + 1, 1 << 20, 1 << 31, (1 << 32) - 1}:
            yield from _with_bytes(name, 4, struct.pack("<I", value), from_directory=True)


@attack("compact")
def words_at_the_extremes(codec: str) -> Iterator[Files]:
    """Any word of a stream is all zeros, all ones, or one off."""
    for name in _ALL:
        forgery = take_apart("compact")
        raw, start = forgery.record(name), _directory(forgery, name)
        for at in range(8, len(raw) - start, 4):
            (word,) = struct.unpack_from("<I", raw, start + at)
            for value in (0, 0xFFFFFFFF, (word + 1) & 0xFFFFFFFF, (word - 1) & 0xFFFFFFFF):
                yield from _with_bytes(name, at, struct.pack("<I", value), from_directory=True)


@attack("compact")
def words_in_another_order(codec: str) -> Iterator[Files]:
    """Two words of a stream are swapped: exceptions out of order, signs for states."""
    for name in _ALL:
        forgery = take_apart("compact")
        raw, start = forgery.record(name), _directory(forgery, name) + 8
        for a in range(start, len(raw), 4):
            for b in range(a + 4, len(raw), 4):
                changed = bytearray(raw)
                changed[a : a + 4], changed[b : b + 4] = raw[b : b + 4], raw[a : a + 4]
                if changed != raw:
                    again = take_apart("compact")
                    again.put(name, changed)
                    yield again.files()


@attack("compact")
def streams_of_random_words(codec: str) -> Iterator[Files]:
    """A chunk's words are noise, of any number, under any head that passes for one."""
    source = random.Random(20)
    for _ in range(400):
        forgery = take_apart("compact")
        name = source.choice(_CODED)
        raw, start = forgery.record(name), _directory(forgery, name)
        head, _ = _head(name)
        if source.random() < 0.7:
            head = source.randrange(43) | source.choice((0, 1 << 22)) | source.randrange(168) << 24
        n_words = source.randrange(12)
        words = source.randbytes(4 * n_words)
        forgery.put(name, bytes(raw[:start]) + struct.pack("<II", head, n_words) + words)
        yield forgery.files()


@attack("compact")
def exceptions_that_cannot_be(codec: str) -> Iterator[Files]:
    """Exceptions are out of order, past the last change, too many, or none where some are flagged."""
    forgery = take_apart("compact")
    raw, start = bytes(forgery.record("exceptions")), _directory(forgery, "exceptions")
    n_words = len(raw[start + 8 :]) // 4
    for count in (0, 1, 3, 4, 100, 1 << 30, 0xFFFFFFFF):
        yield from _with_bytes("exceptions", 8, struct.pack("<I", count), from_directory=True)
    for place in (4 * (n_words - 4), 4 * (n_words - 2)):
        for ordinal in (0, 1, 2, 3, 24, 0xFFFFFFFF):
            word = struct.pack("<I", ordinal)
            yield from _with_bytes("exceptions", 8 + place, word, from_directory=True)


@attack("compact")
def bits_where_padding_is(codec: str) -> Iterator[Files]:
    """Sign bits past the last change, or bytes past a dense chunk's or tensor's last, are set."""
    for name in ("dense", "reshaped", "added", "coded", "wide"):
        forgery = take_apart("compact")
        forgery.record(name)[-1] |= 0x80
        yield forgery.files()
