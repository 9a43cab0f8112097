"""What a kernel backend must do, and the typed values it takes and gives.

A backend holds the hot loops and nothing else: it decides nothing. Every choice (classes, weights,
step tables, chunk size) comes in as a ``ClassModel`` made once, above the kernels, from a
``Survey``. That is why two backends given the same input must give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weightwire.model import Bits, Changes, DType

N_CLASSES = 16
"""Elements fall into 16 classes: a window of consecutive exponents, both ends open."""

N_TOKENS = 128
"""Step magnitudes fall into at most 126 tokens; 128 keeps tables aligned."""

OUTLIERS = 1024
"""One element in so many may lie above the window of classes without moving it."""

PROBABILITY_BITS = 12
"""Frequencies of a table sum to 2^12: fine enough for 0.01 bit, small enough for the L1 cache."""

PROBABILITY_SUM = 1 << PROBABILITY_BITS

WHOLE_SAMPLE = 1 << 18
"""Up to so many elements, a survey looks at all of them: its counts are exact."""

DENSE = 1 << 21
"""The bit in a compact chunk's head that says: all new bits follow as they are."""

PLAIN_CHUNK = 1 << 16
"""Elements in a chunk of the plain codec: a position in it fits two bytes."""


@dataclass(frozen=True)
class StepTable:
    """How often each step token occurs in one class; frequencies sum to 2^12."""

    tokens: tuple[int, ...]
    frequencies: tuple[int, ...]


ONE_STEP = StepTable((0,), (PROBABILITY_SUM,))
"""The table of a class where every change is exactly one step up or down."""


@dataclass(frozen=True)
class ClassModel:
    """What sender and receiver agree on about one piece of a tensor.

    An element's class is ``clamp(key(old bits) - base_key, 0, 15)``. Its weight 2^log2_weight is
    proportional to the rate of events in its class. An *event* is a surprise: a change in a class
    not expected to change, or no change in a class expected to.
    """

    base_key: int
    log2_weights: tuple[int, ...]
    expected: tuple[bool, ...]
    steps: tuple[StepTable, ...]


ALL_ALIKE = ClassModel(0, (0,) * N_CLASSES, (False,) * N_CLASSES, (ONE_STEP,) * N_CLASSES)
"""The model that tells no elements apart, and the shortest there is."""


@dataclass(frozen=True)
class Survey:
    """What a sample of a piece looks like: elements by key, and changes by key and step token."""

    n_by_key: npt.NDArray[np.int64]
    n_changed_by_key_token: npt.NDArray[np.int64]


class Streams(NamedTuple):
    """A coded piece: one fixed-size directory row per chunk, and the chunks' words end to end.

    ``changes`` is what was coded, in clear: there only when the encoder was asked to keep it, and
    never part of a file. Positions are uint32 and count from the piece's start.
    """

    directory: npt.NDArray[np.uint32]
    payload: npt.NDArray[np.uint8]
    n_changed: int
    changes: Changes | None = None


class Kernels(Protocol):
    """The hot loops of one backend.

    ``survey`` runs first, on the trainer; then ``encode_*``. The receiver calls ``decode_*``, which
    writes nothing, and later ``scatter`` and ``matches``. ``digest_*`` runs on both sides.
    """

    name: str

    def survey(self, old: Bits, new: Bits, dtype: DType) -> Survey:
        """Look at the sample of ``sample_runs`` and count."""

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
        """Code the changes from ``old`` to ``new``, given ``old``.

        With ``keep_changes`` they are in the result too, in memory of their own: whoever must
        bring a copy of ``old`` up to date need not compare a second time.
        """

    def decode_compact(
        self,
        old: Bits,
        dtype: DType,
        model: ClassModel,
        chunk_log2: int,
        streams: Streams,
        n_threads: int,
    ) -> Changes:
        """The inverse of ``encode_compact``; raises ``CorruptStream`` on anything it did not write."""

    def encode_plain(
        self, old: Bits, new: Bits, n_threads: int, keep_changes: bool = False
    ) -> Streams:
        """Code the changes from ``old`` to ``new`` so that they decode without ``old``.

        ``keep_changes`` as above; elements that a dense chunk repeats unchanged are not among them.
        """

    def decode_plain(
        self, n_elements: int, dtype: DType, streams: Streams, n_threads: int
    ) -> Changes:
        """The inverse of ``encode_plain``; raises ``CorruptStream`` on anything it did not write."""

    def scatter(self, bits: Bits, positions: Bits, new_bits: Bits, n_threads: int) -> None:
        """Write ``new_bits`` at ``positions``; safe to repeat."""

    def scatter_all(self, writes: Sequence[tuple[Bits, Bits, Bits]], n_threads: int) -> None:
        """The same for many memories at once, each with its positions and bits."""

    def exchange(self, bits: Bits, positions: Bits, new_bits: Bits, n_threads: int) -> Bits:
        """Write like ``scatter``, and give the bits that were there: what would undo it."""

    def matches(self, bits: Bits, positions: Bits, wanted: Bits, n_threads: int) -> bool:
        """Whether ``bits`` holds ``wanted`` at ``positions``: reads back what ``scatter`` wrote."""

    def digest(self, bits: Bits, first_index: int, n_threads: int) -> tuple[int, int]:
        """The two lanes of Σ mix(index, bits), for elements that start at ``first_index``."""

    def digest_at(self, positions: Bits, bits: Bits, first_index: int) -> tuple[int, int]:
        """The same sum over single elements, for updates in O(changed)."""


def sample_runs(n_elements: int) -> list[tuple[int, int]]:
    """Where ``survey`` looks: everything up to 2^18 elements, else 64 even runs of 4096."""
    if n_elements <= WHOLE_SAMPLE:
        return [(0, n_elements)]
    span = n_elements - 4096
    return [(r * span // 63, r * span // 63 + 4096) for r in range(64)]
