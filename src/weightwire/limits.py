"""Every cap in one place, each with its why. Nothing a peer sends may make us exceed them."""

from __future__ import annotations

MAX_HEADER_BYTES = 100 << 20
"""Same cap as the safetensors library: larger headers are attacks, not models."""

MAX_INDEX_BYTES = 64 << 20
"""A patch index holds about 200 bytes per tensor; this allows 300,000 tensors."""

MAX_JSON_DEPTH = 16
"""Our JSON nests four levels; deep nesting only serves to exhaust the parser's stack."""

MAX_JSON_VALUES = 1 << 23
"""Eight per tensor of the largest state; bounds the parser's memory to some 500 MB."""

MAX_TENSORS = 1 << 20
"""Largest number of tensors in a state: ten times the largest mixture-of-experts model."""

MAX_NAME_BYTES = 4096
"""Longest tensor name, in UTF-8 bytes."""

MAX_DIMS = 16
"""Most dimensions of a tensor; frameworks stop at 8 to 64, checkpoints at 5."""

MAX_ELEMENTS = 1 << 38
"""Most elements in one tensor: keeps byte counts far from 2^63 and digest blocks below 2^32."""

MAX_BUCKETS = 1 << 20
"""Most buckets in one patch."""

MAX_BUCKET_BYTES = 1 << 30
"""Largest bucket file. The writer aims far lower; one record may exceed its aim, never this."""

PIECE_ELEMENTS = 1 << 24
"""A tensor is coded in pieces of at most this many elements, so memory never grows with it."""

PIECE_BYTES = 32 << 20
"""Nor does a piece exceed this many bytes: wide elements come in shorter pieces."""

MAX_PIECE_ELEMENTS = 1 << 26
"""Largest piece a reader accepts: bounds what a hostile record can make it allocate."""

BUCKET_BYTES = 4 << 20
"""The size at which the writer closes a bucket: big enough to stream, small enough to retry."""

MIN_CHUNK_LOG2 = 10
"""Smallest chunk of the compact codec: below it the directory outweighs the data."""

MAX_CHUNK_LOG2 = 20
"""Largest chunk: the event count of a chunk has 21 bits, and a GPU decodes one chunk per warp."""

MAX_RECORD_BYTES = 1 << 20
"""A commit record has about 1 kB; nothing in it grows with the model."""

ANCHOR_CHUNK_BYTES = 8 << 20
"""An anchor's files are hashed, fetched and retried in chunks of this size."""

MAX_ANCHOR_FILES = 1 << 16
"""Most files in an anchor: shards and what lies beside them."""

MAX_COMPANION_BYTES = 256 << 20
"""Largest file beside the weights: tokenizers reach 30 MB."""

MAX_RECEIPTS = 1 << 16
"""Most receivers whose receipts are read; a stranger can write more, and they are passed over."""

MAX_UNLISTED = 1 << 10
"""Versions a reader asks for by name when a listing leaves them out; more are never in doubt."""
