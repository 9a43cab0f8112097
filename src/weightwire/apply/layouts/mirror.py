"""Host copies of the elements that an engine cannot give back: what other ranks hold of our chunks.

Nothing is kept where the engine's own memory can be read. A row-parallel shard lies scattered in
its tensor, so the tensor is kept whole; a column-parallel one is a run, so only the ends of the
chunks it shares with its neighbours are. Of a tensor that a device holds whole, where kernels reach
it, nothing is kept; other memory on a device is kept as far as it is needed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weightwire.apply.layouts.regions import AT_ONCE
from weightwire.apply.needs import Span
from weightwire.kernels import kernels
from weightwire.model import Bits, Changes, TensorSpec


class Mirror:
    """Spans of checkpoint tensors, in memory."""

    def __init__(self) -> None:
        self._spans: dict[str, tuple[tuple[Span, Bits], ...]] = {}

    @property
    def n_bytes(self) -> int:
        """What it costs."""
        return sum(bits.nbytes for spans in self._spans.values() for _, bits in spans)

    @property
    def names(self) -> frozenset[str]:
        """The tensors of which something is kept."""
        return frozenset(name for name, spans in self._spans.items() if spans)

    def load(
        self, spec: TensorSpec, spans: tuple[Span, ...], read: Callable[[str, int, int], Bits]
    ) -> None:
        """Keep these spans of a tensor, and no others."""
        kept = []
        for span in spans:
            room = np.empty(span.stop - span.start, spec.dtype.bits_dtype)
            for start in range(span.start, span.stop, AT_ONCE):
                stop = min(start + AT_ONCE, span.stop)
                room[start - span.start : stop - span.start] = read(spec.name, start, stop)
            kept.append((span, room))
        self._spans[spec.name] = tuple(kept)

    def fill(self, name: str, start: int, into: Bits) -> None:
        """Copy what is kept to ``into``, which begins at ``start`` of the tensor."""
        wanted = Span(start, start + len(into))
        for span, bits in self._spans.get(name, ()):
            both = span & wanted
            if both:
                part = bits[both.start - span.start : both.stop - span.start]
                into[both.start - start : both.stop - start] = part

    def write(self, name: str, start: int, changes: Changes, n_threads: int) -> None:
        """Overwrite single elements, where they are kept."""
        positions = changes.positions.astype(np.int64) + start
        for span, bits in self._spans.get(name, ()):
            first, last = np.searchsorted(positions, (span.start, span.stop))
            places = (positions[first:last] - span.start).astype(np.uint64)
            kernels().scatter(bits, places, changes.bits[first:last], n_threads)

    def keep_only(self, names: object) -> None:
        """Drop tensors that the run no longer has."""
        self._spans = {n: s for n, s in self._spans.items() if n in names}  # type: ignore[operator]
