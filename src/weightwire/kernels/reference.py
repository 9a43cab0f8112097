"""The definition of every kernel, in NumPy and plain integers: slow, short, and right.

Other backends must give the same bytes. ``docs/format.md`` says the same in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weightwire.errors import CorruptStream
from weightwire.kernels import ans, gaps, mixing, steps
from weightwire.kernels.contract import (
    DENSE,
    N_CLASSES,
    N_TOKENS,
    PLAIN_CHUNK,
    ClassModel,
    StepTable,
    Streams,
    Survey,
    sample_runs,
)
from weightwire.model import Bits, Changes, DType

EXCEPTIONS = 1 << 22
EVENT_MASK = DENSE - 1
PLAIN_SPARSE, PLAIN_BITMAP, PLAIN_DENSE = range(3)


class ReferenceKernels:
    """Implements ``Kernels``; thread counts are ignored."""

    name = "reference"

    def survey(self, old: Bits, new: Bits, dtype: DType) -> Survey:
        n_by_key = np.zeros(dtype.key_mask + 1, dtype=np.int64)
        n_changed = np.zeros((dtype.key_mask + 1, N_TOKENS), dtype=np.int64)
        for start, stop in sample_runs(len(old)):
            a, b = old[start:stop], new[start:stop]
            n_by_key += np.bincount(
                steps.keys_of(a, dtype).astype(np.intp), minlength=dtype.key_mask + 1
            )
            at = np.flatnonzero(a != b)
            _, magnitudes = steps.split_steps(a[at], b[at], dtype)
            for key, magnitude in zip(
                steps.keys_of(a[at], dtype).tolist(), magnitudes, strict=True
            ):
                n_changed[key, steps.token_of(magnitude)] += 1
        return Survey(n_by_key, n_changed)

    def encode_compact(
        self,
        old: Bits,
        new: Bits,
        dtype: DType,
        model: ClassModel,
        chunk_log2: int,
        n_threads: int,
        keep_changes: bool = False,
    ) -> Streams:
        del n_threads
        size = 1 << chunk_log2
        chunks = [
            _encode_chunk(old[s : s + size], new[s : s + size], dtype, model)
            for s in range(0, len(old), size)
        ]
        return _gather(chunks, 2, _changes_between(old, new), keep_changes)

    def decode_compact(
        self,
        old: Bits,
        dtype: DType,
        model: ClassModel,
        chunk_log2: int,
        streams: Streams,
        n_threads: int,
    ) -> Changes:
        del n_threads
        _check_payload(4 * int(streams.directory[:, 1].sum(dtype=np.uint64)), streams)
        words = streams.payload.view("<u4").tolist()
        positions, bits, first = [], [], 0
        for number, (head, n_words) in enumerate(streams.directory.tolist()):
            start = number << chunk_log2
            chunk = old[start : start + (1 << chunk_log2)]
            at, new = _decode_chunk(chunk, dtype, model, head, words[first : first + n_words])
            positions.append(at + np.uint64(start))
            bits.append(new)
            first += n_words
        return _concatenated(positions, bits, dtype, len(old))

    def encode_plain(
        self, old: Bits, new: Bits, n_threads: int, keep_changes: bool = False
    ) -> Streams:
        del n_threads
        chunks = [
            _encode_plain_chunk(old[s : s + PLAIN_CHUNK], new[s : s + PLAIN_CHUNK])
            for s in range(0, len(old), PLAIN_CHUNK)
        ]
        return _gather(chunks, 1, _changes_between(old, new), keep_changes)

    def decode_plain(
        self, n_elements: int, dtype: DType, streams: Streams, n_threads: int
    ) -> Changes:
        del n_threads
        heads = streams.directory.ravel().tolist()
        lengths = [min(PLAIN_CHUNK, n_elements - s) for s in range(0, n_elements, PLAIN_CHUNK)]
        sizes = [
            plain_chunk_bytes(head, n, dtype.n_bytes)
            for head, n in zip(heads, lengths, strict=True)
        ]
        _check_payload(sum(sizes), streams)
        positions, bits, first = [], [], 0
        for number, (head, n, n_bytes) in enumerate(zip(heads, lengths, sizes, strict=True)):
            start = number * PLAIN_CHUNK
            part = streams.payload[first : first + n_bytes]
            at, new = _decode_plain_chunk(head, n, dtype, part)
            positions.append(at + np.uint64(start))
            bits.append(new)
            first += n_bytes
        return _concatenated(positions, bits, dtype, n_elements)

    def scatter(self, bits: Bits, positions: Bits, new_bits: Bits, n_threads: int) -> None:
        del n_threads
        bits[positions] = new_bits

    def scatter_all(self, writes: Sequence[tuple[Bits, Bits, Bits]], n_threads: int) -> None:
        for bits, positions, new_bits in writes:
            self.scatter(bits, positions, new_bits, n_threads)

    def exchange(self, bits: Bits, positions: Bits, new_bits: Bits, n_threads: int) -> Bits:
        before: Bits = bits[positions]
        self.scatter(bits, positions, new_bits, n_threads)
        return before

    def matches(self, bits: Bits, positions: Bits, wanted: Bits, n_threads: int) -> bool:
        del n_threads
        return bool(np.array_equal(bits[positions], wanted))

    def digest(self, bits: Bits, first_index: int, n_threads: int) -> tuple[int, int]:
        del n_threads
        indices = np.arange(first_index, first_index + len(bits), dtype=np.uint64)
        return mixing.digest_limbs(*mixing.to_limbs(bits, indices))

    def digest_at(self, positions: Bits, bits: Bits, first_index: int) -> tuple[int, int]:
        indices = positions.astype(np.uint64) + np.uint64(first_index)
        return mixing.digest_limbs(*mixing.to_limbs(bits, indices))


def _check_payload(n_promised: int, streams: Streams) -> None:
    if n_promised != len(streams.payload):
        raise CorruptStream("payload does not match its directory")


def _gather(
    chunks: list[tuple[list[int], bytes]], width: int, changes: Changes, keep_changes: bool
) -> Streams:
    rows = np.array([row for row, _ in chunks], dtype=np.uint32).reshape(len(chunks), width)
    payload = np.frombuffer(b"".join(body for _, body in chunks), dtype=np.uint8)
    return Streams(rows, payload, len(changes), changes if keep_changes else None)


def _changes_between(old: Bits, new: Bits) -> Changes:
    at = np.flatnonzero(old != new)
    return Changes(at.astype(np.uint32), new[at])


def _concatenated(
    positions: list[npt.NDArray[np.uint64]], bits: list[Bits], dtype: DType, n_elements: int
) -> Changes:
    wide = np.uint32 if n_elements <= 1 << 32 else np.uint64
    if not positions:
        return Changes(np.empty(0, dtype=wide), np.empty(0, dtype=dtype.bits_dtype))
    return Changes(np.concatenate(positions).astype(wide), np.concatenate(bits))


# ---------------------------------------------------------------------------------- compact chunks


@dataclass(frozen=True)
class _Elements:
    """A chunk's elements as the model sees them; everything here the receiver knows too."""

    classes: npt.NDArray[np.intp]
    expected: npt.NDArray[np.bool_]
    log2_weights: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    """Where each element's interval ends in weight space; its length is its weight."""


def _elements(old: Bits, dtype: DType, model: ClassModel) -> _Elements:
    keys = steps.keys_of(old, dtype).astype(np.int64)
    classes = np.clip(keys - model.base_key, 0, N_CLASSES - 1).astype(np.intp)
    log2_weights = np.array(model.log2_weights, dtype=np.int64)[classes]
    return _Elements(
        classes,
        np.array(model.expected, dtype=bool)[classes],
        log2_weights,
        np.cumsum(np.int64(1) << log2_weights),
    )


def _encode_chunk(old: Bits, new: Bits, dtype: DType, model: ClassModel) -> tuple[list[int], bytes]:
    """Directory row and payload of one chunk: nothing, coded, or dense, whichever is shortest."""
    changed = np.flatnonzero(old != new)
    if len(changed) == 0:
        return [0, 0], b""
    dense = new.tobytes() + bytes(-new.nbytes % 4)
    row, body = _code_chunk(old, new, changed, dtype, model)
    if len(body) >= len(dense):
        return [DENSE, len(dense) // 4], dense
    return row, body


def _code_chunk(
    old: Bits, new: Bits, changed: npt.NDArray[np.intp], dtype: DType, model: ClassModel
) -> tuple[list[int], bytes]:
    elements = _elements(old, dtype, model)
    events = np.flatnonzero((old != new) ^ elements.expected)
    rate = gaps.choose_rate(len(events), int(elements.ends[-1]), max(model.log2_weights))
    writer = ans.Writer()
    negative, exceptions = _push_steps(writer, old, new, changed, elements, dtype, model)
    _push_gaps(writer, events, elements, rate)
    tail = [*reversed(_sign_words(negative)), *_exception_words(exceptions, dtype)]
    words = [*writer.words(), *tail]
    head = len(events) | rate << 24
    if exceptions:
        head |= EXCEPTIONS
        words.insert(0, len(exceptions))
    return [head, len(words)], np.array(words, dtype="<u4").tobytes()


def _push_steps(
    writer: ans.Writer,
    old: Bits,
    new: Bits,
    changed: npt.NDArray[np.intp],
    elements: _Elements,
    dtype: DType,
    model: ClassModel,
) -> tuple[list[bool], list[tuple[int, int]]]:
    """Push every change's magnitude; gives the signs, and the changes no table can say."""
    negative, magnitudes = steps.split_steps(old[changed], new[changed], dtype)
    classes = elements.classes[changed].tolist()
    exceptions = []
    for ordinal in reversed(range(len(changed))):
        table = model.steps[classes[ordinal]]
        token = steps.token_of(magnitudes[ordinal])
        raw = magnitudes[ordinal] & ((1 << steps.raw_bits_of(token)) - 1)
        if token not in table.tokens:
            exceptions.append((ordinal, int(new[changed[ordinal]])))
            token, raw = table.tokens[0], 0
        writer.push_raw(raw, steps.raw_bits_of(token))
        if len(table.tokens) > 1:
            at = table.tokens.index(token)
            writer.push_symbol(sum(table.frequencies[:at]), table.frequencies[at])
    return negative, exceptions[::-1]


def _push_gaps(
    writer: ans.Writer, events: npt.NDArray[np.intp], elements: _Elements, rate: int
) -> None:
    cumulative, shift = gaps.GAP_CUMULATIVE[rate % 8], rate // 8
    ends = elements.ends[events].tolist()
    log2_weights = elements.log2_weights[events].tolist()
    previous_ends = [0, *ends][:-1]
    for end, previous, log2_weight in zip(
        reversed(ends), reversed(previous_ends), reversed(log2_weights), strict=True
    ):
        slot = end - (1 << log2_weight) + writer.borrow(log2_weight)
        n_again, symbol = divmod((slot - previous) >> shift, gaps.CONTINUE)
        low_bits = (slot - previous) & ((1 << shift) - 1)
        writer.push_gap(
            cumulative[symbol], cumulative[symbol + 1] - cumulative[symbol], low_bits, shift
        )
        for _ in range(n_again):
            start = cumulative[gaps.CONTINUE]
            writer.push_symbol(start, cumulative[-1] - start)


def _sign_words(negative: list[bool]) -> list[int]:
    padded = np.zeros(-(-len(negative) // 32) * 32, dtype=bool)
    padded[: len(negative)] = negative
    words: list[int] = np.packbits(padded, bitorder="little").view("<u4").tolist()
    return words


def _exception_words(exceptions: list[tuple[int, int]], dtype: DType) -> list[int]:
    words = []
    for ordinal, bits in exceptions:
        words += [ordinal, bits & 0xFFFFFFFF]
        if dtype.n_bytes == 8:
            words.append(bits >> 32)
    return words


def _decode_chunk(
    old: Bits, dtype: DType, model: ClassModel, head: int, words: list[int]
) -> tuple[npt.NDArray[np.uint64], Bits]:
    """Positions in the chunk and new bits there."""
    if not words:
        if head:
            raise CorruptStream("an empty chunk has a head")
        return np.empty(0, dtype=np.uint64), old[:0]
    if head & DENSE:
        return _decode_dense(old, dtype, head, words)
    return _decode_coded(old, dtype, model, head, words)


def _decode_dense(
    old: Bits, dtype: DType, head: int, words: list[int]
) -> tuple[npt.NDArray[np.uint64], Bits]:
    if head != DENSE or len(words) != -(-old.nbytes // 4):
        raise CorruptStream("a dense chunk has the wrong size")
    raw = np.array(words, dtype="<u4").tobytes()
    if any(raw[old.nbytes :]):
        raise CorruptStream("a dense chunk's padding is not zero")
    new: Bits = np.frombuffer(raw[: old.nbytes], dtype=dtype.bits_dtype)
    at = np.flatnonzero(old != new)
    return at.astype(np.uint64), new[at]


def _decode_coded(
    old: Bits, dtype: DType, model: ClassModel, head: int, words: list[int]
) -> tuple[npt.NDArray[np.uint64], Bits]:
    n_events, rate = head & EVENT_MASK, head >> 24
    if head & 1 << 23 or n_events > len(old) or rate > gaps.MAX_RATE:
        raise CorruptStream("a chunk's head is out of range")
    if max(model.log2_weights) > rate // 8 + gaps.HEADROOM_LOG2:
        raise CorruptStream("a chunk's rate is too high for its weights")
    has_exceptions = bool(head & EXCEPTIONS)
    elements = _elements(old, dtype, model)
    reader = ans.Reader(words, int(has_exceptions), len(words))
    changed = elements.expected.copy()
    for event in _pop_gaps(reader, n_events, elements, rate):
        changed[event] ^= True
    at = np.flatnonzero(changed)
    n_tail = _n_exception_words(words[0], len(at), dtype) if has_exceptions else 0
    first_exception = len(words) - n_tail
    first_sign = first_exception - -(-len(at) // 32)
    magnitudes = _pop_steps(reader, elements.classes[at].tolist(), model.steps)
    reader.finish(first_sign)
    negative = _signs(words[first_sign:first_exception][::-1], len(at))
    new = steps.add_steps(old[at], negative, magnitudes, dtype)
    _put_exceptions(new, words[first_exception:], dtype)
    return at.astype(np.uint64), new


def _pop_gaps(reader: ans.Reader, n_events: int, elements: _Elements, rate: int) -> list[int]:
    cumulative, shift = gaps.GAP_CUMULATIVE[rate % 8], rate // 8
    total = int(elements.ends[-1]) if len(elements.ends) else 0
    events, slot = [], 0
    for _ in range(n_events):
        slot += reader.pop_gap(cumulative, gaps.CONTINUE, shift)
        if slot >= total:
            raise CorruptStream("a position lies past the end of its chunk")
        event = int(np.searchsorted(elements.ends, slot, side="right"))
        log2_weight = int(elements.log2_weights[event])
        end = int(elements.ends[event])
        reader.give_back(slot - (end - (1 << log2_weight)), log2_weight)
        events.append(event)
        slot = end
    return events


def _pop_steps(reader: ans.Reader, classes: list[int], tables: tuple[StepTable, ...]) -> list[int]:
    cumulatives = [[0, *np.cumsum(table.frequencies).tolist()] for table in tables]
    magnitudes = []
    for number in classes:
        tokens = tables[number].tokens
        token = tokens[0]
        if len(tokens) > 1:
            token = tokens[reader.pop_symbol(cumulatives[number])]
        magnitudes.append(steps.magnitude_of(token, reader.pop_raw(steps.raw_bits_of(token))))
    return magnitudes


def _signs(words: list[int], n_changed: int) -> list[bool]:
    bits = np.unpackbits(np.array(words, dtype="<u4").view(np.uint8), bitorder="little")
    if bits[n_changed:].any():
        raise CorruptStream("sign bits past the last change are not zero")
    negative: list[bool] = bits[:n_changed].astype(bool).tolist()
    return negative


def _n_exception_words(n_exceptions: int, n_changed: int, dtype: DType) -> int:
    if not 0 < n_exceptions <= n_changed:
        raise CorruptStream("more exceptions than changes")
    return n_exceptions * (3 if dtype.n_bytes == 8 else 2)


def _put_exceptions(new: Bits, words: list[int], dtype: DType) -> None:
    stride = 3 if dtype.n_bytes == 8 else 2
    previous = -1
    for at in range(0, len(words), stride):
        ordinal, bits = words[at], words[at + 1]
        if stride == 3:
            bits |= words[at + 2] << 32
        if not previous < ordinal < len(new) or bits >> 8 * dtype.n_bytes:
            raise CorruptStream("an exception is out of order or out of range")
        new[ordinal] = bits
        previous = ordinal


# ------------------------------------------------------------------------------------ plain chunks


def plain_chunk_bytes(head: int, n: int, n_bytes: int) -> int:
    """Payload size of a plain chunk: known from its directory word alone.

    Raises:
        CorruptStream: the word is not one the encoder writes.
    """
    n_changed, mode = head & 0xFFFFFF, head >> 24
    if n_changed > n or mode > PLAIN_DENSE or (mode and not n_changed):
        raise CorruptStream("a plain chunk's head is out of range")
    sizes = (n_changed * (2 + n_bytes), -(-n // 8) + n_changed * n_bytes, n * n_bytes)
    return sizes[mode] + -sizes[mode] % 4


def _encode_plain_chunk(old: Bits, new: Bits) -> tuple[list[int], bytes]:
    changed = np.flatnonzero(old != new)
    n, width = len(old), old.dtype.itemsize
    heads = [len(changed) | mode << 24 for mode in range(3)]
    if len(changed) == 0:
        return [0], b""
    head = min(heads, key=lambda candidate: plain_chunk_bytes(candidate, n, width))
    values = new[changed].tobytes()
    if head >> 24 == PLAIN_SPARSE:
        body = changed.astype("<u2").tobytes() + values
    elif head >> 24 == PLAIN_BITMAP:
        body = np.packbits(old != new, bitorder="little").tobytes() + values
    else:
        body = new.tobytes()
    return [head], body + bytes(-len(body) % 4)


def _decode_plain_chunk(
    head: int, n: int, dtype: DType, part: npt.NDArray[np.uint8]
) -> tuple[npt.NDArray[np.uint64], Bits]:
    n_changed, mode = head & 0xFFFFFF, head >> 24
    if mode == PLAIN_DENSE:
        at, split, count = np.arange(n, dtype=np.uint64), 0, n
    elif mode == PLAIN_BITMAP:
        split, count = -(-n // 8), n_changed
        at = np.flatnonzero(np.unpackbits(part[:split], bitorder="little")).astype(np.uint64)
    else:
        split, count = 2 * n_changed, n_changed
        at = part[:split].view("<u2").astype(np.uint64)
    _check_plain(at, count, n, part[split + count * dtype.n_bytes :])
    values = part[split : split + count * dtype.n_bytes].tobytes()
    return at, np.frombuffer(values, dtype=dtype.bits_dtype)


def _check_plain(
    at: npt.NDArray[np.uint64], count: int, n: int, padding: npt.NDArray[np.uint8]
) -> None:
    if len(at) != count or (count and int(at[-1]) >= n):
        raise CorruptStream("a plain chunk's positions do not match its head")
    if np.any(at[1:] <= at[:-1]):
        raise CorruptStream("positions are not strictly ascending")
    if padding.any():
        raise CorruptStream("a plain chunk's padding is not zero")
