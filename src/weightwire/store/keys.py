"""Which names an object may have: those that mean the same thing in every store."""

from __future__ import annotations

from weightwire.errors import StoreRefused

MAX_KEY_BYTES = 1024
"""Longest key S3, Google and Azure all take."""

MAX_SEGMENT_BYTES = 255
"""Longest file name a local folder takes."""


def check_key(key: str) -> str:
    """``key`` itself, if it names one object under the store's prefix and nothing outside it.

    Keys can come from records that a stranger wrote: ``../../etc/passwd`` must end here.

    Raises:
        StoreRefused: empty, too long, absolute, with empty, ``.`` or ``..`` parts, or unprintable.
    """
    segments = key.split("/")
    if not all(_is_plain(segment) for segment in segments) or _n_bytes(key) > MAX_KEY_BYTES:
        raise StoreRefused(
            f"{key!r:.120} is no object name: use printable parts joined by single slashes,"
            f" none of them '.' or '..', at most {MAX_SEGMENT_BYTES} bytes each"
        )
    return key


def _is_plain(segment: str) -> bool:
    """Whether this is one step down the tree, under a name every store keeps as it is."""
    return (
        segment not in {"", ".", ".."}
        and segment.isprintable()
        and "\\" not in segment
        and _n_bytes(segment) <= MAX_SEGMENT_BYTES
    )


def _n_bytes(text: str) -> int:
    """Length in UTF-8; printable text has no lone surrogates, other text is counted as if."""
    return len(text.encode("utf-8", "surrogatepass"))
