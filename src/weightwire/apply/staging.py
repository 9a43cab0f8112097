"""Patches decoded one after another against a state that nobody touches: what activation will write.

Every bucket is seen once and every piece is proven before and after. What is kept is the net
change, so a chain of patches costs no more memory than what differs in the end. Where a receiver
holds only some elements, only the chunks with those are decoded. Where the state is on a device
with kernels, decoding happens there and what changes stays there, until someone asks for it here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from weightwire.apply.device_staging import NO_MEMORY, DeviceStaging, DeviceWrite, Waiting
from weightwire.apply.needs import Needs, Span, whole
from weightwire.apply.pages import Pages
from weightwire.apply.partial import Chunks, chunks_around, partial_changes
from weightwire.apply.proof import check_promise, tensor_digests
from weightwire.codec.patch import Patch
from weightwire.codec.patched import check_base_spec, proven_changes, proven_full, target_specs
from weightwire.codec.piece import piece_elements, thread_count
from weightwire.codec.record import Kind, Record, RecordHead
from weightwire.diff.overlay import room_for
from weightwire.diff.spill import Spill
from weightwire.diff.state import StateReader
from weightwire.digest import TensorDigest, digest_at
from weightwire.errors import BaseMismatch
from weightwire.kernels import kernels
from weightwire.model import Bits, Changes, TensorSpec


class Staging:
    """Implements ``StateReader``: a state with any number of patches laid over it.

    ``take`` a patch, then the next. If one raises, the staging is spoilt and must be dropped; the
    state below it was never written to.
    """

    def __init__(
        self,
        live: StateReader,
        digests: Mapping[str, TensorDigest] | None = None,
        needs: Needs | None = None,
    ) -> None:
        """Begin from ``live``, whose tensors are known to have these digests.

        ``needs`` says which elements the receiver keeps; by default those that ``live`` has, which
        are all unless it says otherwise.
        """
        self._live = live
        self._needs = needs if needs is not None else live if isinstance(live, Needs) else None
        self._specs = dict(live.specs)
        self._ties = dict(live.ties)
        self._changed: dict[str, Pages] = {}
        """What the host decoded. A tensor's changes are kept here or on its device, never in both."""
        self._beside = DeviceStaging(live)
        self._brought: dict[str, Pages] = {}
        """Copies of what is kept on a device, for stages that work here."""
        self._fresh: dict[str, Bits] = {}
        self._spill = Spill()
        self.digests: Mapping[str, TensorDigest] = digests or {}
        """Of every tensor of the result."""
        self._n_changed = self._n_decoded = 0
        self._moved: dict[str, TensorDigest] = {}

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

    @property
    def changed_names(self) -> tuple[str, ...]:
        """The tensors with changes, here or on a device; those made anew are not among them."""
        return (*self._changed, *self._beside.names)

    @property
    def n_changed(self) -> int:
        """Changes decoded, those that a later patch changed again included."""
        return self._n_changed + self._beside.n_changed_in_parts

    @property
    def n_decoded(self) -> int:
        """Elements in the chunks that were decoded."""
        return self._n_decoded + self._beside.n_decoded_in_parts

    @property
    def moved(self) -> Mapping[str, TensorDigest]:
        """By how much the digests of what is kept of tensors moved, where that is not all."""
        names = {*self._moved, *self._beside.moved}
        both = (self._moved, self._beside.moved)
        return {n: sum((m.get(n, TensorDigest()) for m in both), TensorDigest()) for n in names}

    def writes(self, names: Collection[str] | None = None) -> Iterator[tuple[str, int, Changes]]:
        """Tensor, first element of a page, and the net changes within it: each place once.

        Of some tensors or of all. What is kept on a device is copied to the host for it.
        """
        for name in self.changed_names:
            pages = self._pages(name) if names is None or name in names else None
            for start, changes in pages or ():
                yield name, start, changes

    def device_writes(self) -> Iterator[DeviceWrite]:
        """Those changes that are kept on a device; where two list one place, they agree on its bits."""
        return iter(self._beside)

    def leave_devices(self) -> None:
        """Keep on the host what is kept on devices, and decode there what is still to come."""
        self._move_here(self._beside.names)
        self._beside.close(NO_MEMORY)

    def take(self, patch: Patch) -> None:
        """Decode one more patch.

        Raises:
            BaseMismatch, MissingTensor: not made for the state at hand.
            TargetMismatch, RetryError: not what it says it is.
        """
        self._check_unchanged(patch)
        made: dict[str, Bits] = {}
        self._brought = {}
        for record in patch.walk():
            self._decode(record, made)
        self._decode_beside(made)
        self._beside.wait()
        specs = target_specs(self._specs, patch)
        check_promise(patch, specs)
        self._fresh = {n: b for n, b in {**self._fresh, **made}.items() if n in specs}
        self._changed = {
            n: p for n, p in self._changed.items() if n in specs and n not in self._fresh
        }
        self._beside.drop([n for n in self._beside.names if n not in specs or n in self._fresh])
        self._brought = {}
        self._specs, self._ties = specs, dict(patch.index.tied)
        self.digests = tensor_digests(patch, base=False)

    def read(self, name: str, start: int, stop: int) -> Bits:
        """Bits of the result."""
        if name in self._fresh:
            return self._fresh[name][start:stop]
        bits = self._live.read(name, start, stop)
        pages = self._pages(name)
        return bits if pages is None else pages.lay_over(start, bits)

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
        if head.kind is Kind.FULL:
            self._count(head.n_changed, head.n_elements)
            room_for(made, head)[:] = proven_full(record).bits
            return
        check_base_spec(self._specs.get(head.spec.name), head)
        kept, piece = self._kept(head), Span(head.start, head.stop)
        if kept.covers(piece):
            self._count(head.n_changed, head.n_elements)
            if kept != whole(head.spec):
                self._move(head.spec.name, head.target_digest - head.base_digest)
            if not self._goes_beside(record, None, made):
                self._decode_whole(record, made)
        elif kept & piece:
            chunks = chunks_around(record, kept, self._needs)
            if not self._goes_beside(record, chunks, made):
                self._decode_part(record, chunks)

    def _goes_beside(self, record: Record, chunks: Chunks | None, made: dict[str, Bits]) -> bool:
        """Whether a device decodes this record; one full batch is decoded at a time."""
        head, name = record.head, record.head.spec.name
        if head.is_fresh or name in self._fresh or name in self._changed:
            return False
        is_taken = self._beside.takes(record, chunks)
        is_torn = not is_taken and self._beside.has(name)
        if is_torn or self._beside.is_full:
            self._decode_beside(made)
        if is_torn:
            self._move_here([name])
        return is_taken

    def _decode_beside(self, made: dict[str, Bits]) -> None:
        """Decode what waits for a device; all goes on here where that has no room."""
        self._prove(self._beside.waiting_parts)
        left = self._beside.decode()
        if left:
            self._move_here(self._beside.names)
        for each in left:
            self._decode_here(each, made)

    def _decode_here(self, left: Waiting, made: dict[str, Bits]) -> None:
        if left.chunks is None:
            self._decode_whole(left.record, made)
        else:
            self._decode_part(left.record, left.chunks)

    def _move_here(self, names: Iterable[str]) -> None:
        """Keep changes here that were on a device."""
        for name in {*names} & {*self._beside.names}:
            self._changed[name] = self._copied(name)
            self._beside.drop([name])

    def _pages(self, name: str) -> Pages | None:
        """A tensor's changes, wherever they are kept."""
        if name not in self._changed and name not in self._brought and name in self._beside.names:
            self._brought[name] = self._copied(name)
        return self._changed.get(name) or self._brought.get(name)

    def _copied(self, name: str) -> Pages:
        pages = Pages(piece_elements(self._specs[name].dtype), self._spill)
        for start, changes in self._beside.on_host(name):
            pages.add(start, changes)
        return pages

    def _kept(self, head: RecordHead) -> Span:
        if self._needs is None or head.is_fresh or head.spec.name in self._fresh:
            return whole(head.spec)
        return self._needs.span(head.spec)

    def _decode_whole(self, record: Record, made: dict[str, Bits]) -> None:
        head = record.head
        old = self.read(head.spec.name, head.start, head.stop)
        changes = proven_changes(record, old)
        if head.is_fresh:
            new = room_for(made, head)
            new[:] = old
            kernels().scatter(new, changes.positions, changes.bits, thread_count())
        else:
            self._keep(head, head.start, changes)

    def _decode_part(self, record: Record, chunks: Chunks) -> None:
        """Only the chunks with elements that are kept.

        Of a part, the record's digests prove nothing: the bucket's hash proves the changes, and
        the state below proves what it keeps.
        """
        head, span = record.head, chunks.span
        self._prove([head.spec.name])
        old = self.read(head.spec.name, span.start, span.stop)
        changes = partial_changes(record, chunks, old)
        self._count(len(changes), len(old))
        before = digest_at(changes.positions, old[changes.positions], span.start)
        after = digest_at(changes.positions, changes.bits, span.start)
        self._move(head.spec.name, after - before)
        self._keep(head, span.start, changes)

    def _prove(self, names: Collection[str]) -> None:
        if names and isinstance(self._live, Needs):
            self._live.prove_all(names)

    def _move(self, name: str, by: TensorDigest) -> None:
        self._moved[name] = self._moved.get(name, TensorDigest()) + by

    def _count(self, n_changed: int, n_decoded: int) -> None:
        self._n_changed += n_changed
        self._n_decoded += n_decoded

    def _keep(self, head: RecordHead, start: int, changes: Changes) -> None:
        name = head.spec.name
        if name in self._fresh:
            room = self._fresh[name][start:]
            kernels().scatter(room, changes.positions, changes.bits, thread_count())
            return
        if name not in self._changed:
            self._changed[name] = Pages(piece_elements(head.spec.dtype), self._spill)
        self._changed[name].add(start, changes)
