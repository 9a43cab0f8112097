"""A state on many ranks, read on one: each piece comes from whoever has it, when it is needed.

That is how rank 0 writes an anchor without gathering the model: one piece is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from weightwire.diff.places import Outline
from weightwire.diff.state import StateReader
from weightwire.digest import TensorDigest, digest_bits
from weightwire.errors import RankFailed, WeightwireError
from weightwire.model import Bits, TensorSpec
from weightwire.trainers.ranks import Ranks
from weightwire.trainers.shards import Ownership, Part

_DONE = b""
_BITS, _FAILED = b"\0", b"\1"


class SpreadState:
    """Implements ``StateReader`` on rank 0; the other ranks ``serve`` until it is closed.

    It sums up the digest of what it read, so that nobody has to read everything twice to know
    whether it was right.
    """

    def __init__(
        self, ranks: Ranks, ownership: Ownership, local: StateReader, starts: Mapping[str, int]
    ) -> None:
        self._ranks, self._ownership = ranks, ownership
        self._local, self._starts = local, starts
        self._seen: dict[tuple[str, int], TensorDigest] = {}

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, whole."""
        return self._ownership.outline.specs

    @property
    def ties(self) -> Mapping[str, str]:
        """Names that share another tensor's storage."""
        return self._ownership.outline.ties

    @property
    def digest(self) -> str:
        """Of everything that was read; a piece that was read again counts once."""
        sums: dict[str, TensorDigest] = {}
        for (name, _), digest in self._seen.items():
            sums[name] = sums.get(name, TensorDigest()) + digest
        return Outline(self.specs, self.ties).digest(sums)

    def read(self, name: str, start: int, stop: int) -> Bits:
        """A piece, put together from the ranks that have it.

        Raises:
            RankFailed: a rank does not have it any more.
            RankLost: a rank is gone.
        """
        parts = [p for p in self._ownership.parts[name] if p.start < stop and start < p.stop]
        found = [self._fetch(name, p, max(start, p.start), min(stop, p.stop)) for p in parts]
        bits = found[0] if len(found) == 1 else np.concatenate(found)
        self._seen[name, start] = digest_bits(bits, start)
        return bits

    def close(self) -> None:
        """Tell the others that nothing more will be asked for."""
        for rank in range(1, self._ranks.n_ranks):
            self._ranks.send(rank, _DONE)

    def _fetch(self, name: str, part: Part, start: int, stop: int) -> Bits:
        if part.rank == self._ranks.rank:
            return _read_local(self._local, self._starts, name, start, stop)
        self._ranks.send(part.rank, json.dumps([name, start, stop]).encode())
        answer = self._ranks.receive(part.rank)
        if answer[:1] != _BITS:
            raise RankFailed(f"rank {part.rank}: {answer[1:].decode(errors='replace')}")
        bits: Bits = np.frombuffer(answer, self.specs[name].dtype.bits_dtype, offset=1)
        return bits


def serve(ranks: Ranks, local: StateReader, starts: Mapping[str, int]) -> None:
    """Give rank 0 the pieces it asks for, until it has enough.

    Raises:
        RankLost: rank 0 is gone.
    """
    while request := ranks.receive(0):
        ranks.send(0, _answer(request, local, starts))


def _answer(request: bytes, local: StateReader, starts: Mapping[str, int]) -> bytes:
    try:
        name, start, stop = json.loads(request)
        return _BITS + _read_local(local, starts, name, start, stop).tobytes()
    except (WeightwireError, OSError) as error:
        return _FAILED + f"{type(error).__name__}: {error}".encode()


def _read_local(
    local: StateReader, starts: Mapping[str, int], name: str, start: int, stop: int
) -> Bits:
    return local.read(name, start - starts[name], stop - starts[name])
