"""Lies in a record's fixed fields, shapes and length; every SHA-256 fits."""

from __future__ import annotations

from collections.abc import Iterator

from registry import attack
from sample import HEAD_BYTES, Files, take_apart

_EXTREMES = (0, 1, 2, 43, (1 << 26) + 1, 1 << 32, 1 << 60, 1 << 63, (1 << 64) - 1)
_START, _N_ELEMENTS, _N_CHANGED, _LANES = 8, 16, 24, 32


def _names(codec: str) -> list[str]:
    return [key for bucket in take_apart(codec).buckets for key, _ in bucket]


def _with_field(codec: str, name: str, at: int, value: int, n_bytes: int) -> Iterator[Files]:
    forgery = take_apart(codec)
    raw = forgery.record(name)
    field = value.to_bytes(n_bytes, "little")
    if raw[at : at + n_bytes] != field:
        raw[at : at + n_bytes] = field
        yield forgery.files()


@attack()
def kinds_and_types_that_are_not_assigned(codec: str) -> Iterator[Files]:
    """A record is of another kind, element type or number of dimensions."""
    for name in ("coded", "dense", "added"):
        for at in range(3):
            for value in (*range(8), 16, 17, 18, 19, 32, 33, 34, 64, 65, 66, 67, 128, 254, 255):
                yield from _with_field(codec, name, at, value, 1)


@attack()
def base_shapes_that_do_not_fit(codec: str) -> Iterator[Files]:
    """A record was reshaped from a shape it does not give, or reserved bytes are used."""
    for name in ("coded", "reshaped", "added"):
        for value in (0, 1, 2, 3, 16, 17, 254, 255):
            yield from _with_field(codec, name, 3, value, 1)
        for value in (1, 1 << 31):
            yield from _with_field(codec, name, 4, value, 4)


@attack()
def ranges_and_counts_at_the_extremes(codec: str) -> Iterator[Files]:
    """A piece starts, ends or changes where its tensor is not."""
    for name in _names(codec):
        for at in (_START, _N_ELEMENTS, _N_CHANGED):
            for value in _EXTREMES:
                yield from _with_field(codec, name, at, value, 8)


@attack()
def extents_at_the_extremes(codec: str) -> Iterator[Files]:
    """A tensor's shape is huge, empty or of another size."""
    for name in _names(codec):
        for value in _EXTREMES:
            yield from _with_field(codec, name, HEAD_BYTES, value, 8)


@attack()
def digests_of_other_bits(codec: str) -> Iterator[Files]:
    """A record's digests are those of other bits."""
    for name in _names(codec):
        for lane in range(4):
            for value in (0, 1, (1 << 64) - 1):
                yield from _with_field(codec, name, _LANES + 8 * lane, value, 8)


@attack()
def fewer_changes_than_the_stream_has(codec: str) -> Iterator[Files]:
    """A record and the index agree on a wrong number of changes."""
    for name in ("coded", "expected", "dense", "wide"):
        for delta in (-1, 1):
            forgery = take_apart(codec)
            raw = forgery.record(name)
            count = int.from_bytes(raw[_N_CHANGED : _N_CHANGED + 8], "little") + delta
            raw[_N_CHANGED : _N_CHANGED + 8] = count.to_bytes(8, "little")
            forgery.index["n_changed"] += delta
            yield forgery.files()


@attack()
def bodies_cut_or_stretched(codec: str) -> Iterator[Files]:
    """A record ends after any number of its bytes, or goes on after its last."""
    for name in _names(codec):
        raw = bytes(take_apart(codec).record(name))
        for changed in [raw[:n] for n in range(len(raw))] + [
            raw + bytes(n) for n in (1, 2, 4, 8, 400)
        ]:
            forgery = take_apart(codec)
            forgery.put(name, changed)
            yield forgery.files()
