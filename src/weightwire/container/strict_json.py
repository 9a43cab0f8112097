"""JSON from untrusted files: what Python's parser lets pass, or chokes on, is refused here."""

from __future__ import annotations

import json
import math
import re
from functools import partial

import numpy as np
import numpy.typing as npt

from weightwire import limits
from weightwire.errors import LimitExceeded, MalformedHeader

_SCAN_BYTES = 1 << 20
_MAX_INT_DIGITS = 20
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_ADVICE = "fetch the file again, or rewrite it with the tool that made it"


def parse_json(text: bytes, where: str, max_bytes: int) -> object:
    """The value that ``text`` holds, if it is unambiguous JSON.

    Two parsers must never read one file differently, so duplicate keys, NaN, Infinity, overflowing
    numbers and lone surrogates are refused. Depth is measured before parsing: the parser recurses.

    Raises:
        LimitExceeded: longer than ``max_bytes``, nested deeper than ``limits.MAX_JSON_DEPTH``, or of
            more values than ``limits.MAX_JSON_VALUES``.
        MalformedHeader: not UTF-8, not JSON, or JSON that parsers read in different ways.
    """
    if len(text) > max_bytes:
        raise LimitExceeded(f"{where}: {len(text)} bytes of JSON; at most {max_bytes} are read")
    if text.count(b",") >= limits.MAX_JSON_VALUES:
        raise LimitExceeded(f"{where}: JSON of more than {limits.MAX_JSON_VALUES} values")
    _check_depth(text, where)
    value = _loads(text, where)
    if _SURROGATE_ESCAPE.search(text):
        _check_surrogates(value, where)
    return value


def _loads(text: bytes, where: str) -> object:
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=partial(_unique_keys, where),
            parse_constant=partial(_refuse_constant, where),
            parse_int=partial(_bounded_int, where),
            parse_float=partial(_finite_float, where),
        )
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise MalformedHeader(f"{where}: not JSON in UTF-8: {error}; {_ADVICE}") from error
    except RecursionError as error:
        raise LimitExceeded(f"{where}: JSON nested too deeply to parse; {_ADVICE}") from error


def _check_depth(text: bytes, where: str) -> None:
    """Scan in blocks, so that a large text costs no more memory than itself."""
    if text.count(b"{") + text.count(b"[") <= limits.MAX_JSON_DEPTH:
        return  # most records: not enough brackets to be too deep
    plain = np.frombuffer(_without_escapes(text), np.uint8)
    depth, in_string = 0, 0
    for start in range(0, plain.size, _SCAN_BYTES):
        block = plain[start : start + _SCAN_BYTES]
        parity = (np.cumsum(block == ord('"'), dtype=np.uint8) + np.uint8(in_string)) & 1
        steps = _nesting_steps(block[parity == 0])
        if steps.size and depth + int(steps.max()) > limits.MAX_JSON_DEPTH:
            raise LimitExceeded(
                f"{where}: JSON nested deeper than {limits.MAX_JSON_DEPTH} levels; {_ADVICE}"
            )
        depth += int(steps[-1]) if steps.size else 0
        in_string = int(parity[-1])


def _without_escapes(text: bytes) -> bytes:
    """Drop what could hide a quote; pairs first, so that ``\\\\"`` still ends its string."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"")


def _nesting_steps(outside: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
    """The depth after each character, from 0. ``{`` and ``[`` differ by 0x20, as do their ends."""
    folded = outside | 0x20
    delta = (folded == ord("{")).astype(np.int8) - (folded == ord("}")).astype(np.int8)
    return np.cumsum(delta, dtype=np.int32)


def _unique_keys(where: str, pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise MalformedHeader(f"{where}: key {_first_repeated(pairs)!r} occurs twice; {_ADVICE}")
    return value


def _first_repeated(pairs: list[tuple[str, object]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    return ""


def _refuse_constant(where: str, constant: str) -> object:
    raise MalformedHeader(f"{where}: {constant} is not a JSON number; {_ADVICE}")


def _bounded_int(where: str, digits: str) -> int:
    """Long digit strings cost quadratic time to convert, and no size or offset needs them."""
    if len(digits) > _MAX_INT_DIGITS:
        raise MalformedHeader(f"{where}: an integer of {len(digits)} characters; {_ADVICE}")
    return int(digits)


def _finite_float(where: str, digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise MalformedHeader(f"{where}: the number {digits[:40]} overflows; {_ADVICE}")
    return value


def _check_surrogates(value: object, where: str) -> None:
    """Half a surrogate pair is no character: it could be neither encoded nor printed later."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise MalformedHeader(
            f"{where}: a string holds half a surrogate pair; {_ADVICE}"
        ) from error
