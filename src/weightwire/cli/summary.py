"""A new patch in a few lines: what diff and merge say when they are done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from weightwire.cli.numbers import bytes_text, ratio, share_text
from weightwire.codec.index import PatchIndex, index_bytes


def patch_fields(
    index: PatchIndex, path: Path, *, n_full_bytes: int | None, seconds: float
) -> dict[str, Any]:
    """The summary for programs; what is not known is null."""
    n_bytes = index.n_bytes + len(index_bytes(index))
    return {
        "patch": str(path),
        "codec": index.codec,
        "n_tensors": index.n_tensors,
        "n_elements": index.n_elements,
        "n_changed": index.n_changed,
        "density": ratio(index.n_changed, index.n_elements) or 0.0,
        "n_bytes": n_bytes,
        "bytes_per_change": ratio(n_bytes, index.n_changed),
        "n_full_bytes": n_full_bytes,
        "times_smaller": ratio(n_full_bytes, n_bytes) if n_full_bytes is not None else None,
        "base_digest": index.base_digest,
        "target_digest": index.target_digest,
        "seconds": seconds,
    }


def patch_text(fields: dict[str, Any]) -> Table:
    """The summary for people."""
    rows = {
        "patch": f"{fields['patch']} ({fields['codec']})",
        "elements": f"{fields['n_elements']:,} in {fields['n_tensors']:,} tensors",
        "changed": f"{fields['n_changed']:,} ({share_text(fields['density'])})",
        "size": _size_text(fields),
        "base": fields["base_digest"],
        "target": fields["target_digest"],
        "time": _time_text(fields),
    }
    return two_columns(rows)


def two_columns(rows: dict[str, str]) -> Table:
    """Names and values, without lines."""
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(value, overflow="fold"))
    return table


def _size_text(fields: dict[str, Any]) -> str:
    parts = [bytes_text(fields["n_bytes"])]
    if fields["bytes_per_change"] is not None:
        parts.append(f"{fields['bytes_per_change']:.3f} bytes per change")
    if fields["times_smaller"] is not None:
        parts.append(f"{fields['times_smaller']:,.1f}× smaller than full")
    return ", ".join(parts)


def _time_text(fields: dict[str, Any]) -> str:
    seconds = fields["seconds"]
    text = f"{seconds:.2f} s"
    if fields["n_full_bytes"] and seconds:
        text += f", {bytes_text(fields['n_full_bytes'] / seconds)}/s"
    return text
