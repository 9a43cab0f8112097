"""Durations and sizes as people write them: ``15m``, ``7d``, ``10GB``."""

from __future__ import annotations

import re

import typer

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**n for n, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**n for n, prefix in enumerate("kmgt", 1)},
}


def duration(text: str) -> float:
    """Seconds: ``90s``, ``15m``, ``2h``, ``7d``, ``1w``; a bare number is seconds.

    Raises:
        typer.BadParameter: anything else.
    """
    return _parse(text, _SECONDS, "a duration such as 90s, 15m, 2h or 7d")


def size(text: str) -> int:
    """Bytes: ``500MB``, ``10GB``, ``1.5TB``, ``8GiB``; a bare number is bytes.

    Raises:
        typer.BadParameter: anything else.
    """
    return int(_parse(text, _BYTES, "a size such as 500MB, 10GB or 8GiB"))


def age_text(seconds: float) -> str:
    """A duration in its largest unit: ``42 s``, ``7 min``, ``3.5 h``, ``12 d``."""
    if seconds < 0:
        return "in the future"
    for unit, n_seconds in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= n_seconds:
            value = seconds / n_seconds
            return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
    return f"{seconds:.0f} s"


def _parse(text: str, units: dict[str, int], wanted: str) -> float:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None or found[2].lower() not in units:
        raise typer.BadParameter(f"{text!r} is not {wanted}")
    return float(found[1]) * units[found[2].lower()]
