"""Numbers for people."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB")


def bytes_text(n_bytes: float) -> str:
    """A size in decimal units, about three digits."""
    size, unit = float(n_bytes), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if unit == 0 or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {_UNITS[unit]}"


def share_text(share: float) -> str:
    """A percentage; small ones keep two digits that mean something."""
    return f"{share:.2%}" if share >= 0.001 or share == 0 else f"{100 * share:.2g}%"


def ratio(first: float, second: float) -> float | None:
    """A quotient, or None where there is none: JSON has no infinity."""
    return first / second if second else None
