"""The safetensors container: strict JSON and strict headers, from files nobody vouches for."""

from __future__ import annotations

from weightwire.container.exact_read import read_bytes, read_into
from weightwire.container.header import Entry, Header, build_header, parse_header, read_header
from weightwire.container.strict_json import parse_json

__all__ = [
    "Entry",
    "Header",
    "build_header",
    "parse_header",
    "parse_json",
    "read_bytes",
    "read_header",
    "read_into",
]
