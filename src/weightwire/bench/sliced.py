"""A published encoding on all threads: slices of every tensor go through one pool."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from weightwire.bench.contender import Span, cut
from weightwire.bench.generate import Pair
from weightwire.bench.published import PUBLISHED, SLICE_ELEMENTS, Parts, SliceEncoding
from weightwire.model import Bits

MIN_SLICE_ELEMENTS = 1 << 18
"""Below this the interpreter costs more than another thread gains."""


@dataclass(frozen=True)
class SlicedPatch:
    """The parts of all slices."""

    encoding: SliceEncoding
    spans: tuple[Span, ...]
    parts: tuple[Parts, ...]
    pool: ThreadPoolExecutor

    @property
    def n_bytes(self) -> int:
        """Bytes of all parts; framing and counts are not charged to the published encodings."""
        return sum(part.nbytes for parts in self.parts for part in parts)

    def decode_into(self, outs: Sequence[Bits]) -> None:
        """Apply every slice in place; slices do not overlap, so their order is free."""
        views = (span.of(outs) for span in self.spans)
        for _ in self.pool.map(self.encoding.decode_into, views, self.parts):
            pass


@dataclass(frozen=True)
class PublishedContender:
    """A published encoding with a thread pool that outlives the timed calls."""

    encoding: SliceEncoding
    n_threads: int
    pool: ThreadPoolExecutor

    @property
    def name(self) -> str:
        """The encoding's name."""
        return self.encoding.name

    @property
    def source(self) -> str:
        """The encoding's users."""
        return self.encoding.source

    def encode(self, pairs: Sequence[Pair]) -> SlicedPatch:
        """Diff and encode every slice."""
        lengths = [len(pair.old) for pair in pairs]
        spans = cut(lengths, slice_elements(sum(lengths), self.n_threads))
        olds = [pair.old for pair in pairs]
        news = [pair.new for pair in pairs]
        views = ([span.of(olds) for span in spans], [span.of(news) for span in spans])
        return SlicedPatch(
            self.encoding, spans, tuple(self.pool.map(self.encoding.encode, *views)), self.pool
        )


def slice_elements(n_elements: int, n_threads: int) -> int:
    """The best slice size, or less where that would leave threads without work."""
    fair = -(-n_elements // n_threads)
    return min(SLICE_ELEMENTS, max(fair, MIN_SLICE_ELEMENTS))


def published_contenders(
    n_threads: int, pool: ThreadPoolExecutor
) -> tuple[PublishedContender, ...]:
    """All published encodings on one pool of ``n_threads``."""
    return tuple(PublishedContender(encoding, n_threads, pool) for encoding in PUBLISHED)
