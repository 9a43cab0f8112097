"""Host copies of the elements that an engine cannot give back: what other ranks hold of our chunks.

Nothing is kept where the engine's own memory can be read. A row-parallel shard lies scattered in
its tensor, so the tensor is kept whole; a column-parallel one is a run, so only the ends of the
chunks it shares with its neighbours are. Memory on a device is read as well where kernels reach it,
and what is kept beside it is page-locked; other memory on a device is kept as far as it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from weightwire.apply.layouts.regions import AT_ONCE
from weightwire.apply.needs import Span
from weightwire.diff.page_locked import page_locked
from weightwire.kernels import kernels
from weightwire.model import Bits, Changes, TensorSpec

if TYPE_CHECKING:
    import torch


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
        self,
        spec: TensorSpec,
        spans: tuple[Span, ...],
        read: Callable[[str, int, int], Bits],
        device: torch.device | None = None,
    ) -> None:
        """Keep these spans of a tensor, and no others; ``device`` will read them, if there is one."""
        kept = []
        for span in spans:
            room = page_locked(span.stop - span.start, spec.dtype, device)
            for start in range(span.start, span.stop, AT_ONCE):
                stop = min(start + AT_ONCE, span.stop)
                room[start - span.start : stop - span.start] = read(spec.name, start, stop)
            kept.append((span, room))
        self._spans[spec.name] = tuple(kept)

    def within(self, name: str, wanted: Span) -> Iterator[tuple[Span, Bits]]:
        """What is kept of a span: the elements, and their bits where they are kept."""
        for span, bits in self._spans.get(name, ()):
            both = span & wanted
            if both:
                yield both, bits[both.start - span.start : both.stop - span.start]

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
