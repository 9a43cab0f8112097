"""Writes the parts of ``docs/format.md`` that must not be typed by hand.

    python docs/examples/format_tables.py           print them
    python docs/examples/format_tables.py --write   put them into the document

The gap tables come from the codec's constants. The worked example is a real patch of forty bf16
elements, taken apart byte by byte, and decoded with a reader that tells every operation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import weightwire as ww
from weightwire.codec.model_bytes import model_bytes
from weightwire.codec.record import Record, record_bytes
from weightwire.kernels import gaps, steps
from weightwire.kernels.ans import Reader
from weightwire.model import Bits, dtype_named

DOCUMENT = Path(__file__).parent.parent / "format.md"
BF16 = dtype_named("BF16")
CHANGES = {6: 0x3AB7, 12: 0x3B35, 31: 0xBAF4}
"""Position and new bits: one step up, one step down, two steps up (of a negative number)."""


def old_bits() -> Bits:
    """Forty weights between 0.001 and 0.03, of either sign, half a binary octave apart."""
    bits = [0x3CF6 - 64 * (7 * i % 11) | (0x8000 if i % 3 == 1 else 0) for i in range(40)]
    return np.array(bits, dtype="<u2")


def new_bits() -> Bits:
    """The same with three elements changed."""
    bits = old_bits()
    for position, value in CHANGES.items():
        bits[position] = value
    return bits


def example_patch() -> ww.Patch:
    """The patch between the two, of one tensor called ``w``."""
    from ml_dtypes import bfloat16

    return ww.diff({"w": old_bits().view(bfloat16)}, {"w": new_bits().view(bfloat16)})


class TellingReader(Reader):
    """A reader that writes down what it does."""

    def __init__(self, words: Sequence[int]) -> None:
        super().__init__(words, 0, len(words))
        self.told: list[str] = [f"x = 0x{self._state:012X}  (words 0 and 1)"]

    def tell(self, what: str) -> None:
        """Note an operation and the state after it."""
        self.told.append(f"{what:<66} x = 0x{self._state:012X}")


def gap_tables() -> str:
    """The eight gap tables as a Markdown table: one row per symbol, one column per table."""
    lines = ["| c[s] | " + " | ".join(f"f = {f}" for f in range(8)) + " |"]
    lines.append("|---" * 9 + "|")
    for symbol in range(gaps.CONTINUE + 2):
        cells = (str(table[symbol]) for table in gaps.GAP_CUMULATIVE)
        lines.append(f"| s = {symbol} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def worked_example() -> str:
    """The example's Markdown: inputs, annotated bytes, decoding told step by step."""
    record = next(example_patch().records())
    parts = [
        "The old bits of the forty elements of `w` (bf16, in hex, ten to a line):",
        _fenced(_grid(old_bits())),
        "The new bits differ at three places:",
        _changes_table(),
        f"The record of `w` has {len(record_bytes(record))} bytes:",
        _fenced("\n".join(_annotated(record))),
        "Decoding the chunk. `x` is the state of the coder; so little is coded that it never falls"
        " below a bound, and no word is read from a stream:",
        _fenced("\n".join(_decoded(record))),
        _digest_sentences(record),
    ]
    return "\n\n".join(parts)


def _fenced(text: str) -> str:
    return f"```\n{text}\n```"


def _grid(bits: Bits) -> str:
    texts = [f"{b:04X}" for b in bits.tolist()]
    return "\n".join(
        f"{start:>2}: " + " ".join(texts[start : start + 10]) for start in range(0, 40, 10)
    )


def _changes_table() -> str:
    lines = [
        "| position | old bits | new bits | old ordered | new ordered | step |",
        "|---" * 6 + "|",
    ]
    for position, value in CHANGES.items():
        pair = np.array([old_bits()[position], value], dtype="<u2")
        before, after = steps.to_ordered(pair, BF16).tolist()
        lines.append(
            f"| {position} | `{pair[0]:04X}` | `{pair[1]:04X}` | `{before:04X}` | `{after:04X}`"
            f" | {after - before:+d} |"
        )
    return "\n".join(lines)


def _annotated(record: Record) -> Iterator[str]:
    raw, at = record_bytes(record), 0
    for n_bytes, meaning in _fields(record):
        yield f"{at:>3}  {raw[at : at + n_bytes].hex(' '):<50} {meaning}".rstrip()
        at += n_bytes
    if at != len(raw):
        raise SystemExit(f"{len(raw) - at} bytes of the record are not explained")


def _fields(record: Record) -> Iterator[tuple[int, str]]:
    """Length and meaning of every field of the record, in order."""
    piece = record.piece()
    yield from [(1, "kind 1: compact"), (1, "element type 19: BF16"), (1, "1 dimension")]
    yield from [(1, "the base has the same shape"), (4, "reserved")]
    yield from [(8, "start: element 0"), (8, "40 elements in this piece"), (8, "3 of them changed")]
    yield from [(8, "base digest, low lane"), (8, "base digest, high lane")]
    yield from [(8, "target digest, low lane"), (8, "target digest, high lane"), (8, "shape: 40")]
    if piece.model is None:
        raise SystemExit("the example is not compact")
    yield from [(1, f"chunks of 2^{piece.chunk_log2} elements"), (1, "reserved")]
    yield 2, f"base_key {piece.model.base_key}"
    yield 16, "classes 0 to 15: log2 of the weight"
    previous, n_tables = None, 0
    for number, table in enumerate(piece.model.steps):
        n_bytes, meaning = 1, f"class {number}: same table as class {number - 1}"
        if table != previous:
            n_bytes = 2 + (0 if len(table.tokens) == 1 else _n_frequency_bytes(table.frequencies))
            meaning = f"class {number}: {len(table.tokens)} token(s) from {table.tokens[0]}"
            if len(table.tokens) > 1:
                meaning += f", frequencies {', '.join(map(str, table.frequencies))}"
        previous, n_tables = table, n_tables + n_bytes
        yield n_bytes, meaning
    padding = len(model_bytes(piece.model, piece.chunk_log2)) - 20 - n_tables
    if padding:
        yield padding, "padding to whole words"
    head = int(piece.streams.directory[0, 0])
    yield 4, f"chunk 0: {head & 0x1FFFFF} events, rate {head >> 24}"
    yield 4, f"chunk 0: {piece.streams.directory[0, 1]} words"
    yield from [(4, "word 0: low half of the state"), (4, "word 1: high half of the state")]
    yield 4, "word 2: the signs of three changes, lowest bit first"


def _n_frequency_bytes(frequencies: Sequence[int]) -> int:
    return sum(1 if frequency < 0x80 else 2 for frequency in frequencies)


def _decoded(record: Record) -> list[str]:
    """Decode the one chunk as the document says, telling each operation."""
    piece, old = record.piece(), old_bits()
    if piece.model is None:
        raise SystemExit("the example is not compact")
    model, head = piece.model, int(piece.streams.directory[0, 0])
    words = piece.streams.payload.view("<u4").tolist()
    classes = [min(max(k - model.base_key, 0), 15) for k in steps.keys_of(old, BF16).tolist()]
    weights = [model.log2_weights[number] for number in classes]
    ends = np.cumsum([1 << weight for weight in weights]).tolist()
    reader, end, changed = TellingReader(words), 0, []
    fraction, shift = (head >> 24) % 8, (head >> 24) // 8
    told = [
        f"rate {head >> 24} = 8 * {shift} + {fraction}: k = {shift} raw bits, gap table {fraction}"
    ]
    for _ in range(head & 0x1FFFFF):
        gap = reader.pop_gap(gaps.GAP_CUMULATIVE[fraction], gaps.CONTINUE, shift)
        reader.tell(
            f"gap {gap} (quotient {gap >> shift}, raw {gap & ((1 << shift) - 1)}): slot {end + gap}"
        )
        element = next(i for i, stop in enumerate(ends) if stop > end + gap)
        start = ends[element] - (1 << weights[element])
        reader.give_back(end + gap - start, weights[element])
        reader.tell(
            f"  element {element}, class {classes[element]}, slots [{start}, {ends[element]}):"
            f" give back {end + gap - start} in {weights[element]} bits"
        )
        end = ends[element]
        changed.append(element)
    signs = words[-1]
    for ordinal, element in enumerate(changed):
        table = model.steps[classes[element]]
        token, how = table.tokens[0], "one token, nothing is read"
        if len(table.tokens) > 1:
            token = table.tokens[reader.pop_symbol([0, *np.cumsum(table.frequencies).tolist()])]
            how = "read"
        step = (steps.magnitude_of(token, 0) + 1) * (-1 if signs >> ordinal & 1 else 1)
        reader.tell(f"element {element}: token {token} ({how}), step {step:+d}")
    reader.finish(len(words) - 1)
    return [
        *told,
        *reader.told,
        "x = 2^32 and no word is left before the signs: the chunk is sound",
    ]


def _digest_sentences(record: Record) -> str:
    patch, head = example_patch(), record.head
    return (
        f"The tensor's digest is `{head.base_digest}` before and `{head.target_digest}` after (high"
        f" lane, low lane). The state of this one tensor has digest `{patch.base_digest}` before"
        f" and `{patch.target_digest}` after."
    )


SECTIONS = {"gap tables": gap_tables, "worked example": worked_example}


def filled(document: str) -> str:
    """The document with every marked section made anew."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        if document.count(begin) != 1 or document.count(end) != 1:
            raise SystemExit(f"{DOCUMENT} needs exactly one section {name!r}")
        before, rest = document.split(begin)
        document = f"{before}{begin}\n{make()}\n\n{end}{rest.split(end)[1]}"
    return document


def main() -> None:
    """Print the sections, or write them into the document."""
    if "--write" in sys.argv[1:]:
        DOCUMENT.write_text(filled(DOCUMENT.read_text()))
        return
    for make in SECTIONS.values():
        print(make(), end="\n\n")


if __name__ == "__main__":
    main()
