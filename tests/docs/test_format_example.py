"""The parts of ``docs/format.md`` that a script makes are the ones it makes today."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import second_decoder as second

from weightwire import limits
from weightwire.kernels.gaps import choose_rate
from weightwire.model import dtype_coded

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """The script, as a module."""
    path = DOCS / "examples" / "format_tables.py"
    spec = importlib.util.spec_from_file_location("format_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["format_tables"] = module
    spec.loader.exec_module(module)
    return module


def test_the_document_holds_the_generated_sections(tables: ModuleType) -> None:
    document = (DOCS / "format.md").read_text()
    assert document == tables.filled(document)
    assert tables.worked_example() in document
    assert tables.gap_tables() in document


def test_the_second_decoder_reads_the_worked_example(tables: ModuleType, tmp_path: Path) -> None:
    tables.example_patch().save(tmp_path / "patch")
    base = {"w": second.Tensor(19, (40,), tables.old_bits().tolist())}
    target = second.apply_folder(tmp_path / "patch", base)
    assert target["w"].bits == tables.new_bits().tolist()


def test_the_type_table_of_the_document_is_complete() -> None:
    document = (DOCS / "format.md").read_text()
    for code, (n_bytes, shift, mask, ordered) in second.TYPES.items():
        dtype = dtype_coded(code)
        assert (dtype.n_bytes, dtype.key_mask, dtype.ordered) == (n_bytes, mask, ordered)
        key = f"shift {shift}, mask 0x{mask:02X}" if mask else "0"
        row = f"| {code} | `{dtype.name}` | {n_bytes} | {key} | {'yes' if ordered else 'no'} |"
        assert row in document


def rate_of_the_document(n_events: int, total: int, largest: int) -> int:
    """Section 8.7, in its own words."""
    borders = (62757, 68438, 74632, 81386, 88752, 96785, 105545, 115098)
    rate = 8 * max(0, largest - 2)
    while rate < 167:
        border = borders[(rate + 1) % 8] << (2 + (rate + 1) // 8)
        if total << 16 < n_events * border:
            break
        rate += 1
    return rate


def test_the_rate_of_the_document_is_the_one_that_is_chosen() -> None:
    source = random.Random(1)
    for _ in range(2_000):
        n_events, largest = source.randrange(1 << source.randrange(20)), source.randrange(9)
        total = source.randrange(1, 1 << source.randrange(1, 28))
        expected = choose_rate(n_events, total, largest)
        assert rate_of_the_document(n_events, total, largest) == expected


def test_the_limits_of_the_document_are_the_ones_in_force() -> None:
    section = (DOCS / "format.md").read_text().split("## 11. Limits")[1]
    rows = {
        "patch.json": (limits.MAX_INDEX_BYTES, 64 << 20, "64 MiB"),
        "safetensors header": (limits.MAX_HEADER_BYTES, 100 << 20, "100 MiB"),
        "JSON nesting": (limits.MAX_JSON_DEPTH, 16, "16"),
        "tensors in a file": (limits.MAX_TENSORS, 1 << 20, "2^20"),
        "buckets": (limits.MAX_BUCKETS, 1 << 20, "2^20"),
        "bytes in a bucket": (limits.MAX_BUCKET_BYTES, 1 << 30, "2^30"),
        "bytes in a tensor's name": (limits.MAX_NAME_BYTES, 4096, "4096"),
        "dimensions": (limits.MAX_DIMS, 16, "16"),
        "elements in a tensor": (limits.MAX_ELEMENTS, 1 << 38, "2^38"),
        "elements in a piece": (limits.MAX_PIECE_ELEMENTS, 1 << 26, "2^26"),
    }
    for what, (in_force, documented, text) in rows.items():
        assert in_force == documented
        assert f"| {what} | {text} |" in section
