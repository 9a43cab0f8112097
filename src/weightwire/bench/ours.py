"""Weightwire's own codecs, in the same race."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightwire import limits
from weightwire.bench.contender import Span, cut
from weightwire.bench.generate import Pair
from weightwire.model import Bits, DType

if TYPE_CHECKING:
    from weightwire.codec import EncodedPiece

OUR_CODECS = ("compact", "plain")


@dataclass(frozen=True)
class OurPatch:
    """The encoded pieces of all tensors."""

    spans: tuple[Span, ...]
    pieces: tuple[EncodedPiece, ...]
    dtypes: tuple[DType, ...]
    n_threads: int

    @property
    def n_bytes(self) -> int:
        """Bytes of all records."""
        return sum(piece.n_bytes for piece in self.pieces)

    def decode_into(self, outs: Sequence[Bits]) -> None:
        """Decode each piece against the old bits, then overwrite what it names."""
        from weightwire.codec import decode_piece
        from weightwire.kernels import kernels

        for span, piece in zip(self.spans, self.pieces, strict=True):
            bits = span.of(outs)
            dtype = self.dtypes[span.tensor]
            changes = decode_piece(bits, piece, dtype, n_threads=self.n_threads)
            kernels().scatter(bits, changes.positions, changes.bits, self.n_threads)


@dataclass(frozen=True)
class OurContender:
    """One of Weightwire's codecs at a fixed number of threads."""

    name: str
    n_threads: int
    source: str = "Weightwire"

    def encode(self, pairs: Sequence[Pair]) -> OurPatch:
        """Diff and encode every piece of every tensor, several at once as ``weightwire.diff`` does."""
        spans = cut((len(pair.old) for pair in pairs), limits.PIECE_ELEMENTS)
        n_coders = max(1, min(self.n_threads, len(spans)))
        with ThreadPoolExecutor(n_coders) as coders:
            pieces = tuple(
                coders.map(
                    lambda span: self._encode_piece(
                        pairs[span.tensor], span, self.n_threads // n_coders
                    ),
                    spans,
                )
            )
        return OurPatch(spans, pieces, tuple(pair.dtype for pair in pairs), self.n_threads)

    def _encode_piece(self, pair: Pair, span: Span, n_threads: int) -> EncodedPiece:
        from weightwire.codec import encode_piece

        old = pair.old[span.start : span.stop]
        new = pair.new[span.start : span.stop]
        return encode_piece(old, new, pair.dtype, self.name, n_threads=n_threads)


def our_contenders(n_threads: int) -> tuple[OurContender, ...]:
    """Both codecs at ``n_threads``."""
    return tuple(OurContender(codec, n_threads) for codec in OUR_CODECS)
