"""What each exponent class of a patch costs: from the model in its records, or counted.

An event is a point of a process in weight space with one event per 2^(2 + rate/8) slots, so an
element of weight w has one with probability 1 - exp(-w / mean gap). The code length of an element
is then that of its event, and for a change the sign, the step's token and the token's raw bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from weightwire.codec.patched import proven_changes
from weightwire.codec.piece import EncodedPiece
from weightwire.codec.record import Record
from weightwire.diff.state import StateReader
from weightwire.errors import MissingTensor
from weightwire.kernels import kernels
from weightwire.kernels.contract import (
    DENSE,
    N_CLASSES,
    N_TOKENS,
    PROBABILITY_BITS,
    WHOLE_SAMPLE,
    ClassModel,
    StepTable,
)
from weightwire.kernels.steps import keys_of, raw_bits_of, split_steps
from weightwire.model import Bits, Changes, DType

_Floats = npt.NDArray[np.float64]
_Counts = npt.NDArray[np.int64]

_RATE_SHIFT = 24
_LOG2_FIRST_GAP = 2
_RATES_PER_OCTAVE = 8
_SIGN_BITS = 1
_BLOCK = 1 << 20
_EXCEPTION_BITS = 64
"""A step no table can say: its ordinal and its bits, a word each."""


@dataclass
class ClassCost:
    """Sums over the elements of one class."""

    n_elements: float = 0.0
    n_changed: float = 0.0
    n_bits: float = 0.0


@dataclass
class ClassTally:
    """Sums by element type and key while records go by."""

    costs: dict[tuple[str, int], ClassCost] = field(default_factory=dict)

    def add(
        self, dtype: DType, base_key: int, elements: _Floats, changed: _Floats, bits: _Floats
    ) -> None:
        """Add one value per class, classes standing for the keys from ``base_key`` up."""
        for number in range(min(N_CLASSES, dtype.key_mask + 1 - base_key)):
            cost = self.costs.setdefault((dtype.name, base_key + number), ClassCost())
            cost.n_elements += float(elements[number])
            cost.n_changed += float(changed[number])
            cost.n_bits += float(bits[number])


def tally_modelled(tally: ClassTally, record: Record) -> None:
    """Add what a record's model expects, as if every class had all of the chunk's elements.

    How many elements each class has is known only with the base, so densities and bits per change
    are averages over chunks. Dense chunks have no model and are left out.

    Raises:
        MalformedRecord: the record's body does not parse.
    """
    piece = record.piece()
    if piece.model is None:
        return
    chances, surprisals = _events(piece.model, piece)
    sizes = _chunk_sizes(piece)[:, None]
    expected = np.array(piece.model.expected)
    changed = np.where(expected, 1.0 - chances, chances) * sizes
    silent = (piece.streams.directory[:, 1] == 0)[:, None]
    changed = np.where(silent, 0.0, changed)
    step_bits = np.array([_mean_bits(table) for table in piece.model.steps])
    bits = np.where(silent, 0.0, surprisals * sizes) + changed * (_SIGN_BITS + step_bits)
    kept = (piece.streams.directory[:, :1] & DENSE == 0).astype(np.float64)
    tally.add(
        record.head.spec.dtype,
        piece.model.base_key,
        (sizes * kept * np.ones(N_CLASSES)).sum(axis=0),
        (changed * kept).sum(axis=0),
        (bits * kept).sum(axis=0),
    )


def tally_counted(tally: ClassTally, record: Record, base: StateReader) -> None:
    """Add what every element of a record costs under its model, by decoding it against the base.

    Raises:
        BaseMismatch, MissingTensor: not the base of this patch.
        MalformedRecord, CorruptStream: the record is damaged.
    """
    head, piece = record.head, record.piece()
    if head.spec.name not in base.specs:
        raise MissingTensor(f"the state has no tensor {head.spec.name!r:.200}")
    if piece.model is None:
        return
    old = base.read(head.spec.name, head.start, head.stop)
    counted = _Counted(old, proven_changes(record, old), head.spec.dtype, piece.model, piece)
    is_dense = (piece.streams.directory[:, :1] & DENSE) != 0
    is_coded = (piece.streams.directory[:, 1:] != 0) & ~is_dense
    elements, changed = counted.elements(), counted.changed()
    bits = np.where(is_coded, _event_bits(piece.model, piece, elements, changed), 0.0)
    bits += np.where(is_dense, elements * 8.0 * head.spec.dtype.n_bytes, 0.0)
    total = bits.sum(axis=0) + counted.step_bits(is_coded[:, 0])
    tally.add(
        head.spec.dtype,
        piece.model.base_key,
        elements.sum(axis=0).astype(np.float64),
        changed.sum(axis=0).astype(np.float64),
        total,
    )


@dataclass(frozen=True)
class _Counted:
    """A decoded piece, counted in blocks so that index arrays stay small."""

    old: Bits
    changes: Changes
    dtype: DType
    model: ClassModel
    piece: EncodedPiece

    def elements(self) -> _Counts:
        """Elements by chunk and class, in parts small enough for a survey to see all of them."""
        total = self._zeros()
        keys = np.arange(self.dtype.key_mask + 1)
        classes = np.clip(keys - self.model.base_key, 0, N_CLASSES - 1)
        size = min(1 << self.piece.chunk_log2, WHOLE_SAMPLE)
        for start in range(0, len(self.old), size):
            part = self.old[start : start + size]
            n_by_key = kernels().survey(part, part, self.dtype).n_by_key
            np.add.at(total[start >> self.piece.chunk_log2], classes, n_by_key)
        return total

    def changed(self) -> _Counts:
        """Changes by chunk and class."""
        total = self._zeros()
        for at, _ in self._blocks():
            total += self._by_chunk(at.astype(np.int64), self.old[at])
        return total

    def step_bits(self, is_coded: npt.NDArray[np.bool_]) -> _Floats:
        """Code length of the magnitudes of all coded steps, by class."""
        costs = np.array([[_bits_of(t, n) for n in range(N_TOKENS)] for t in self.model.steps])
        total = np.zeros(N_CLASSES)
        for at, bits in self._blocks():
            coded = is_coded[at.astype(np.int64) >> self.piece.chunk_log2]
            old, new = self.old[at[coded]], bits[coded]
            _, magnitudes = split_steps(old, new, self.dtype)
            tokens = tokens_of(np.array(magnitudes, dtype=np.uint64))
            classes = self._classes(old)
            weights = costs[classes, tokens]
            total += np.bincount(classes, weights=weights, minlength=N_CLASSES)
        return total

    def _zeros(self) -> _Counts:
        return np.zeros((len(self.piece.streams.directory), N_CLASSES), dtype=np.int64)

    def _blocks(self) -> Iterator[tuple[Bits, Bits]]:
        for start in range(0, len(self.changes), _BLOCK):
            part = slice(start, start + _BLOCK)
            yield self.changes.positions[part], self.changes.bits[part]

    def _classes(self, old: Bits) -> _Counts:
        keys = keys_of(old, self.dtype).astype(np.int64)
        return np.clip(keys - self.model.base_key, 0, N_CLASSES - 1)

    def _by_chunk(self, at: _Counts, old: Bits) -> _Counts:
        n_chunks = len(self.piece.streams.directory)
        cells = (at >> self.piece.chunk_log2) * N_CLASSES + self._classes(old)
        counts = np.bincount(cells, minlength=n_chunks * N_CLASSES)
        return counts.astype(np.int64).reshape(n_chunks, N_CLASSES)


def _event_bits(
    model: ClassModel, piece: EncodedPiece, elements: _Counts, changed: _Counts
) -> _Floats:
    """Code length of which elements changed, and of their signs."""
    chances = _chances(model, piece.streams.directory[:, :1] >> _RATE_SHIFT)
    events = np.where(model.expected, elements - changed, changed)
    bits = -events * np.log2(chances) - (elements - events) * np.log2(1.0 - chances)
    return np.asarray(bits + changed * _SIGN_BITS)


def tokens_of(magnitudes: npt.NDArray[np.uint64]) -> _Counts:
    """What ``token_of`` gives for each; large ones lose low bits first, to fit a double exactly."""
    is_large = magnitudes >> np.uint64(53) != 0
    reduced = np.where(is_large, magnitudes >> np.uint64(11), magnitudes)
    exponents = np.frexp(reduced.astype(np.float64))[1].astype(np.int64) - 1 + 11 * is_large
    halves = magnitudes >> np.maximum(exponents - 1, 0).astype(np.uint64) & np.uint64(1)
    tokens = 2 * exponents + halves.astype(np.int64)
    return np.where(magnitudes < 4, magnitudes.astype(np.int64), tokens)


def _bits_of(table: StepTable, token: int) -> float:
    if token not in table.tokens:
        return _EXCEPTION_BITS + _bits_of(table, table.tokens[0])
    frequency = table.frequencies[table.tokens.index(token)]
    return PROBABILITY_BITS - math.log2(frequency) + raw_bits_of(token)


def _mean_bits(table: StepTable) -> float:
    """Entropy of a step table, with the raw bits of its tokens."""
    share = np.array(table.frequencies) / (1 << PROBABILITY_BITS)
    return float(sum(p * _bits_of(table, t) for p, t in zip(share, table.tokens, strict=True)))


def _events(model: ClassModel, piece: EncodedPiece) -> tuple[_Floats, _Floats]:
    """Per chunk and class: the chance of an event, and the mean code length of one element."""
    chances = _chances(model, piece.streams.directory[:, :1] >> _RATE_SHIFT)
    others = 1.0 - chances
    return chances, -chances * np.log2(chances) - others * np.log2(others)


def _chances(model: ClassModel, rates: npt.NDArray[np.integer]) -> _Floats:
    gaps = np.exp2(_LOG2_FIRST_GAP + rates / _RATES_PER_OCTAVE)
    weights = np.exp2(np.array(model.log2_weights, dtype=np.float64))
    # Kept off 0 and 1, where the logarithms of the callers end.
    chances: _Floats = np.clip(1.0 - np.exp(-weights / gaps), 1e-12, 1.0 - 1e-12)
    return chances


def _chunk_sizes(piece: EncodedPiece) -> _Counts:
    size = 1 << piece.chunk_log2
    starts = np.arange(0, piece.n_elements, size, dtype=np.int64)
    return np.minimum(size, piece.n_elements - starts)
