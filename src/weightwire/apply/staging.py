"""Patches decoded one after another against a state that nobody touches: what activation will write.

Every bucket is seen once and every piece is proven before and after. What is kept is the net
change, so a chain of patches costs no more memory than what differs in the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from weightwire.apply.proof import check_promise, tensor_digests
from weightwire.codec.patch import Patch
from weightwire.codec.patched import check_base_spec, proven_changes, proven_full, target_specs
from weightwire.codec.piece import thread_count
from weightwire.codec.record import Kind, Record, RecordHead
from weightwire.diff.overlay import net_changes, overlay, room_for
from weightwire.diff.spill import Spill
from weightwire.diff.state import StateReader
from weightwire.digest import TensorDigest
from weightwire.errors import BaseMismatch, MalformedRecord
from weightwire.kernels import kernels
from weightwire.model import Bits, Changes, TensorSpec


class Staging:
    """Implements ``StateReader``: a state with any number of patches laid over it.

    ``take`` a patch, then the next. If one raises, the staging is spoilt and must be dropped; the
    state below it was never written to.
    """

    def __init__(
        self, live: StateReader, digests: Mapping[str, TensorDigest] | None = None
    ) -> None:
        """Begin from ``live``, whose tensors are known to have these digests."""
        self._live = live
        self._specs = dict(live.specs)
        self._ties = dict(live.ties)
        self._changed: dict[str, dict[int, tuple[int, Changes]]] = {}
        self._fresh: dict[str, Bits] = {}
        self._spill = Spill()
        self.digests: Mapping[str, TensorDigest] = digests or {}
        """Of every tensor of the result."""
        self.n_changed = 0
        """Changes decoded, those that a later patch changed again included."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The result's tensors."""
        return self._specs

    @property
    def ties(self) -> Mapping[str, str]:
        """The result's aliases."""
        return self._ties

    @property
    def fresh(self) -> Mapping[str, Bits]:
        """Tensors to be made anew, whole."""
        return self._fresh

    @property
    def live_names(self) -> Iterable[str]:
        """The tensors of the state below."""
        return self._live.specs.keys()

    @property
    def removes(self) -> bool:
        """Whether the result lacks tensors that the state below has."""
        return any(name not in self._specs for name in self._live.specs)

    def writes(self) -> Iterator[tuple[str, int, Changes]]:
        """Tensor, first element of the piece, and the net changes within it."""
        for name, pieces in self._changed.items():
            for start, (_, changes) in pieces.items():
                yield name, start, changes

    def take(self, patch: Patch) -> None:
        """Decode one more patch.

        Raises:
            BaseMismatch, MissingTensor: not made for the state at hand.
            TargetMismatch, RetryError: not what it says it is.
        """
        self._check_unchanged(patch)
        made: dict[str, Bits] = {}
        for record in patch.walk():
            self._decode(record, made)
        specs = target_specs(self._specs, patch)
        check_promise(patch, specs)
        self._fresh = {n: b for n, b in {**self._fresh, **made}.items() if n in specs}
        self._changed = {
            n: p for n, p in self._changed.items() if n in specs and n not in self._fresh
        }
        self._specs, self._ties = specs, dict(patch.index.tied)
        self.digests = tensor_digests(patch, base=False)

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Bits of the result."""
        if name in self._fresh:
            return self._fresh[name][start:stop]
        bits: Bits = self._live.read(name, start, stop)
        pieces = self._changed.get(name, {})
        parts = [(a, c) for a, (b, c) in pieces.items() if a < stop and start < b]
        if not parts:
            return bits
        patched: Bits = bits.copy()
        for at, changes in parts:
            overlay(patched, start, at, changes)
        return patched

    def _check_unchanged(self, patch: Patch) -> None:
        """Tensors without a record are not read, but they must be the ones the patch means."""
        for name, text in patch.index.unchanged.items():
            if name in self.digests and str(self.digests[name]) != text:
                raise BaseMismatch(
                    f"tensor {name!r:.200} has digest {self.digests[name]}, the patch needs {text};"
                    " nothing was written; start from the version it was made for"
                )

    def _decode(self, record: Record, made: dict[str, Bits]) -> None:
        head = record.head
        self.n_changed += head.n_changed
        if head.kind is Kind.FULL:
            room_for(made, head)[:] = proven_full(record).bits
            return
        check_base_spec(self._specs.get(head.spec.name), head)
        old = self.read(head.spec.name, head.start, head.stop)
        changes = proven_changes(record, old)
        if head.is_fresh:
            new = room_for(made, head)
            new[:] = old
            kernels().scatter(new, changes.positions, changes.bits, thread_count())
        else:
            self._keep(head, old, changes)

    def _keep(self, head: RecordHead, old: Bits, changes: Changes) -> None:
        name = head.spec.name
        if name in self._fresh:
            kernels().scatter(
                self._fresh[name][head.start : head.stop],
                changes.positions,
                changes.bits,
                thread_count(),
            )
            return
        pieces = self._changed.setdefault(name, {})
        if head.start not in pieces:
            pieces[head.start] = (head.stop, self._spill.keep(changes))
            return
        stop, before = pieces[head.start]
        if stop != head.stop:
            raise MalformedRecord(
                f"tensor {head.key!r:.200}: two patches of the chain cut it differently"
            )
        pieces[head.start] = (stop, self._spill.keep(net_changes(old, before, changes)))
