"""Changes ↔ bytes: pieces, records, buckets, patches."""

from __future__ import annotations

from weightwire.codec.piece import (
    CODECS,
    Codec,
    EncodedPiece,
    decode_piece,
    encode_piece,
    piece_elements,
)

__all__ = ["CODECS", "Codec", "EncodedPiece", "decode_piece", "encode_piece", "piece_elements"]
