"""What the strict parser takes, and every kind of lie it refuses."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightwire import limits
from weightwire.container import parse_json, strict_json
from weightwire.errors import LimitExceeded, MalformedHeader

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def parse(text: bytes) -> object:
    return parse_json(text, "a.json", 1 << 20)


@settings(deadline=None, max_examples=50)
@given(JSON_VALUES, st.booleans())
def test_parses_what_the_standard_library_writes(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8")
    assert parse(text) == value


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":1}',
        b'[{"x":{"a":1,"\\u0061":2}}]',
        b"NaN",
        b"[-Infinity]",
        b"1e999",
        b"[" + b"9" * 5000 + b"]",
        b'"\\ud800"',
        b'{"\\uDFFF":1}',
        b'"\xff"',
        b"\xef\xbb\xbf{}",
        b'"tab\there"',
        b"{} {}",
        b"{",
        b"",
        b"]]]][[[[",
        b'"open \\"',
        b"'a'",
    ],
)
def test_ambiguous_or_broken_text_is_refused_by_name(text: bytes) -> None:
    with pytest.raises(MalformedHeader, match=r"a\.json"):
        parse(text)


def test_a_surrogate_pair_is_one_character() -> None:
    assert parse(b'"\\ud83d\\ude00"') == "\U0001f600"


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_is_refused_before_the_parser_recurses(opening: bytes) -> None:
    with pytest.raises(LimitExceeded, match="nested deeper"):
        parse(opening * 100_000)


def test_nesting_up_to_the_cap_is_read() -> None:
    deepest = b"[" * limits.MAX_JSON_DEPTH + b"]" * limits.MAX_JSON_DEPTH
    parse(deepest)
    with pytest.raises(LimitExceeded):
        parse(b"[" + deepest + b"]")


@pytest.mark.parametrize(
    "text", ["[" * 50, '\\"' + "[" * 50, "\\" * 7 + "[{" * 50, '"' * 3 + "{" * 50]
)
def test_brackets_inside_strings_do_not_count(text: str) -> None:
    assert parse(json.dumps([text, text]).encode()) == [text, text]


def test_brackets_after_an_escaped_backslash_do_count() -> None:
    with pytest.raises(LimitExceeded):
        parse(b'["\\\\",' + b"[" * 50)


def test_depth_is_carried_from_block_to_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "_SCAN_BYTES", 3)
    assert parse(json.dumps(["[" * 99, "x" * 99]).encode()) == ["[" * 99, "x" * 99]
    with pytest.raises(LimitExceeded):
        parse(b'["a' + b"x" * 99 + b'",' + b"[" * 16)


def test_more_bytes_than_allowed_are_not_parsed() -> None:
    with pytest.raises(LimitExceeded, match="at most 4"):
        parse_json(b"[1,2]", "a.json", 4)
