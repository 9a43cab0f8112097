"""``weightwire inspect``: what is in a patch, by tensor and by exponent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Table

from weightwire.cli.numbers import bytes_text, ratio, share_text
from weightwire.cli.optional_base import open_base
from weightwire.cli.options import AsJson, PatchIn
from weightwire.cli.summary import two_columns
from weightwire.cli.terminal import open_terminal, printable
from weightwire.codec.bucket import FORMAT_VERSION
from weightwire.codec.inspect import ClassSummary, PatchSummary, TensorSummary, inspect_patch
from weightwire.codec.patch import Patch

_BAR_CELLS = 12
_COUNTED = "Counted against the base; bits are code lengths under each record's model."
_MODELLED = (
    "From the model in each record, not counted: give --base to count. The outermost"
    " classes of a record also stand for all exponents beyond."
)


def inspect_command(
    context: typer.Context,
    patch: PatchIn,
    base: Annotated[
        Path | None, typer.Option(help="The patch's base: count classes exactly.")
    ] = None,
    by_class: Annotated[
        bool, typer.Option("--by-class", help="Also by exponent; implied by --base.")
    ] = False,
    top: Annotated[int, typer.Option(min=1, help="Tensors to list, largest first.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Show what a patch holds and what it costs: density and bits per change."""
    with open_terminal(context, as_json=as_json) as terminal, open_base(base) as state:
        loaded = Patch.load(patch)
        n_bytes = sum(pieces[0][1].spec.n_bytes for pieces in loaded.heads.values())
        progress = terminal.display.stage("inspect", n_bytes)
        by_class = by_class or base is not None
        summary = inspect_patch(loaded, state, by_class=by_class, progress=progress)
        terminal.show(_fields(loaded, summary), _text(loaded, summary, top))


def _fields(patch: Patch, summary: PatchSummary) -> dict[str, Any]:
    index = patch.index
    return {
        "format_version": FORMAT_VERSION,
        "codec": index.codec,
        "base_digest": index.base_digest,
        "target_digest": index.target_digest,
        "n_tensors": index.n_tensors,
        "n_elements": index.n_elements,
        "n_changed": index.n_changed,
        "n_bytes": patch.n_bytes,
        "n_unchanged": len(index.unchanged),
        "buckets": [{"file": b.file, "n_bytes": b.n_bytes} for b in index.buckets],
        "removed": list(index.removed),
        "tied": dict(index.tied),
        "tensors": [_tensor_fields(tensor) for tensor in summary.tensors],
        "classes": [_class_fields(each, summary.is_counted) for each in summary.classes],
        "classes_are_counted": summary.is_counted,
    }


def _tensor_fields(tensor: TensorSummary) -> dict[str, Any]:
    return {
        "name": tensor.spec.name,
        "dtype": tensor.spec.dtype.name,
        "shape": list(tensor.spec.shape),
        "kind": tensor.kind.name.lower(),
        "n_elements": tensor.spec.n_elements,
        "n_changed": tensor.n_changed,
        "density": tensor.density,
        "n_bytes": tensor.n_bytes,
        "bits_per_change": tensor.bits_per_change,
    }


def _class_fields(each: ClassSummary, is_counted: bool) -> dict[str, Any]:
    return {
        "dtype": each.dtype.name,
        "key": each.key,
        "exponent": each.exponent,
        "n_elements": int(each.n_elements) if is_counted else None,
        "n_changed": int(each.n_changed) if is_counted else None,
        "density": each.density,
        "bits_per_change": each.bits_per_change,
    }


def _text(patch: Patch, summary: PatchSummary, top: int) -> Group:
    parts = [_head(patch), _tensor_table(patch, summary.tensors, top)]
    if summary.classes:
        parts.append(_class_table(summary))
    return Group(*parts)


def _head(patch: Patch) -> Table:
    index = patch.index
    per_change = ratio(patch.n_bytes, index.n_changed)
    return two_columns(
        {
            "format": f"version {FORMAT_VERSION}, {index.codec}",
            "elements": f"{index.n_elements:,} in {index.n_tensors:,} tensors",
            "changed": f"{index.n_changed:,}, {len(index.unchanged):,} tensors unchanged",
            "size": f"{bytes_text(patch.n_bytes)} in {len(index.buckets):,} buckets"
            + (f", {per_change:.3f} bytes per change" if per_change else ""),
            "removed, tied": f"{len(index.removed):,}, {len(index.tied):,}",
            "base": index.base_digest,
            "target": index.target_digest,
        }
    )


def _tensor_table(patch: Patch, tensors: Sequence[TensorSummary], top: int) -> Table:
    table = _table("tensor", "type", "elements", "changed", "density", "", "bytes", "bits/change")
    peak = max((tensor.density for tensor in tensors), default=0.0)
    shown = sorted(tensors, key=lambda tensor: -tensor.n_bytes)[:top]
    for tensor in shown:
        table.add_row(
            printable(tensor.spec.name),
            tensor.spec.dtype.name,
            f"{tensor.spec.n_elements:,}",
            f"{tensor.n_changed:,}",
            share_text(tensor.density),
            _bar(tensor.density, peak),
            bytes_text(tensor.n_bytes),
            f"{tensor.bits_per_change:.2f}",
        )
    if len(tensors) > len(shown):
        table.caption = f"{len(tensors) - len(shown):,} smaller ones not shown: raise --top"
    table.add_section()
    _add_total(table, patch)
    return table


def _add_total(table: Table, patch: Patch) -> None:
    per_change = ratio(8 * patch.n_bytes, patch.n_changed)
    table.add_row(
        "all, files included",
        "",
        f"{patch.n_elements:,}",
        f"{patch.n_changed:,}",
        share_text(ratio(patch.n_changed, patch.n_elements) or 0.0),
        "",
        bytes_text(patch.n_bytes),
        f"{per_change:.2f}" if per_change else "",
    )


def _class_table(summary: PatchSummary) -> Table:
    table = _table("exponent", "type", "elements", "changed", "density", "", "bits/change")
    table.caption = _COUNTED if summary.is_counted else _MODELLED
    peak = max(each.density for each in summary.classes)
    for each in summary.classes:
        table.add_row(
            _exponent_text(each),
            each.dtype.name,
            f"{each.n_elements:,.0f}" if summary.is_counted else "",
            f"{each.n_changed:,.0f}" if summary.is_counted else "",
            share_text(each.density),
            _bar(each.density, peak),
            f"{each.bits_per_change:.2f}",
        )
    return table


def _exponent_text(each: ClassSummary) -> str:
    if not each.dtype.key_mask:
        return "any"
    return "subnormal" if each.exponent is None else f"2^{each.exponent}"


def _bar(share: float, peak: float) -> str:
    return "█" * round(_BAR_CELLS * share / peak) if peak else ""


def _table(*columns: str) -> Table:
    """The first two columns are text, and so is the bar's; all others are numbers."""
    table = Table(caption_justify="left")
    for number, column in enumerate(columns):
        is_text = number < 2 or not column
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return table
