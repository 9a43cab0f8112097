"""Lies in the streams of the plain codec; every SHA-256 fits."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

from registry import attack
from sample import Files, take_apart

_PATCHED = ("coded", "expected", "exceptions", "dense", "wide", "reshaped")


def _with_body(name: str, body: bytes) -> Iterator[Files]:
    forgery = take_apart("plain")
    raw = bytes(forgery.record(name)[: forgery.body(name)]) + body
    if raw != forgery.record(name):
        forgery.put(name, raw)
        yield forgery.files()


def _body(name: str) -> bytes:
    forgery = take_apart("plain")
    return bytes(forgery.record(name)[forgery.body(name) :])


@attack("plain")
def heads_of_every_mode_and_count(codec: str) -> Iterator[Files]:
    """A chunk's head announces another mode or number of changes, with and without bytes for it."""
    for name in _PATCHED:
        body = _body(name)
        for mode in (0, 1, 2, 3, 255):
            for count in (0, 1, 2, 3, 5, 6, 37, 42, 43, 1 << 16, (1 << 24) - 1):
                head = struct.pack("<I", count | mode << 24)
                for rest in (body[4:], b"", bytes(4), bytes(400)):
                    yield from _with_body(name, head + rest)


@attack("plain")
def positions_that_do_not_rise(codec: str) -> Iterator[Files]:
    """Positions are equal, descend, or lie past the end of the tensor."""
    values = _body("coded")[4 + 6 :]
    for places in ((3, 3, 41), (17, 3, 41), (3, 41, 17), (41, 41, 41), (3, 17, 42), (3, 17, 65535)):
        head = struct.pack("<I3H", 3, *places)
        yield from _with_body("coded", head + values)


@attack("plain")
def bitmaps_that_do_not_count_up(codec: str) -> Iterator[Files]:
    """A bitmap has more or fewer bits than its head says, or bits past the end."""
    body = bytearray(_body("expected"))
    for at in range(4, 9):
        for bit in range(8):
            changed = bytearray(body)
            changed[at] ^= 1 << bit
            yield from _with_body("expected", bytes(changed))
    for at in range(4, 8):
        body = bytearray(_body("dense"))
        body[at] ^= 0x80
        yield from _with_body("dense", bytes(body))


@attack("plain")
def bytes_where_padding_is(codec: str) -> Iterator[Files]:
    """Bytes past the last value are not zero."""
    for name in ("coded", "dense", "reshaped", "added"):
        forgery = take_apart("plain")
        forgery.record(name)[-1] ^= 1
        yield forgery.files()


@attack("plain")
def bodies_of_random_bytes(codec: str) -> Iterator[Files]:
    """A record's body is noise under any head that passes for one."""
    source = random.Random(21)
    for _ in range(400):
        name = source.choice(_PATCHED)
        head = source.randrange(44) | source.randrange(3) << 24
        size = 4 * source.randrange(40)
        yield from _with_body(name, struct.pack("<I", head) + source.randbytes(size))
