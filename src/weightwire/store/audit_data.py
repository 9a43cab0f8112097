"""A run's patches and anchors, read in full and compared with what their records say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from weightwire.codec.index import INDEX_FILE, PatchIndex, parse_index
from weightwire.errors import (
    BaseMismatch,
    HashMismatch,
    MalformedHeader,
    StoreRefused,
    StoreUnavailable,
    TruncatedFile,
    WeightwireError,
)
from weightwire.store import layout
from weightwire.store.anchor import AnchorFile, parse_manifest
from weightwire.store.plan import Step
from weightwire.store.records import AnchorRef, PatchRef, sha256
from weightwire.store.run import Run
from weightwire.store.survey import Damage, damage_of

Progress = Callable[[int], None]

_N_AT_ONCE = 4
"""Buckets or chunks read side by side: bounds memory."""
_N_TRIES = 2
"""A byte that was wrong on the way is right the second time."""


@dataclass(frozen=True)
class _Part:
    """A run of bytes of one object, and its SHA-256."""

    key: str
    start: int
    n_bytes: int
    sha256: str
    is_last: bool = True
    """The object ends here."""


class DataChecker:
    """Reads data and compares; counts what it read. Nothing of it stays in memory."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self._run, self._progress = run, progress
        self.n_objects = 0
        self.n_bytes = 0

    def check(self, step: Step) -> list[Damage]:
        """Everything that is wrong with one patch or anchor.

        Raises:
            StoreUnavailable, StoreRefused: the store's own errors.
        """
        name = INDEX_FILE if step.patch is not None else layout.ANCHOR_MANIFEST
        try:
            parts = list(self._parts(step))
        except (StoreUnavailable, StoreRefused):
            raise
        except WeightwireError as error:
            return [damage_of(error, step.folder + name, step.version)]
        return _first_of_each(self._check_parts(parts, step.version))

    def _parts(self, step: Step) -> Iterator[_Part]:
        """What an index or a manifest, itself checked, says there must be."""
        if step.patch is not None:
            yield from self._buckets(step, step.patch)
        if step.anchor is not None:
            yield from self._files(step, step.anchor)

    def _buckets(self, step: Step, ref: PatchRef) -> Iterator[_Part]:
        key = ref.folder + INDEX_FILE
        index = parse_index(self._read(_Part(key, 0, ref.n_index_bytes, ref.index_sha256)), key)
        _check_promise(index, ref, step)
        for bucket in index.buckets:
            yield _Part(ref.folder + bucket.file, 0, bucket.n_bytes, bucket.sha256)

    def _files(self, step: Step, ref: AnchorRef) -> Iterator[_Part]:
        key = ref.folder + layout.ANCHOR_MANIFEST
        part = _Part(key, 0, ref.n_manifest_bytes, ref.manifest_sha256)
        manifest = parse_manifest(self._read(part), ref)
        if manifest.digest != step.digest:
            raise BaseMismatch(f"{key}: of {manifest.digest}, its record says {step.digest}")
        if manifest.n_bytes + ref.n_manifest_bytes != ref.n_bytes:
            raise MalformedHeader(f"{key}: disagrees with its record about its size")
        for file in manifest.files:
            yield from _chunks(ref.folder + file.name, file)

    def _check_parts(self, parts: list[_Part], version: int) -> Iterator[Damage]:
        for first in range(0, len(parts), _N_AT_ONCE):
            batch = parts[first : first + _N_AT_ONCE]
            for part, error in zip(batch, self._look_at(batch), strict=True):
                self._count(part)
                if error is not None:
                    yield damage_of(error, part.key, version)

    def _look_at(self, parts: list[_Part]) -> Iterable[WeightwireError | None]:
        executor = self._run.executor
        return map(self._look, parts) if executor is None else executor.map(self._look, parts)

    def _look(self, part: _Part) -> WeightwireError | None:
        try:
            self._fetch(part)
        except (StoreUnavailable, StoreRefused):
            raise
        except WeightwireError as error:
            return error
        return None

    def _read(self, part: _Part) -> bytes:
        raw = self._fetch(part)
        self._count(part)
        return raw

    def _count(self, part: _Part) -> None:
        self.n_objects += part.is_last
        self.n_bytes += part.n_bytes
        self._progress(part.n_bytes)

    def _fetch(self, part: _Part) -> bytes:
        for _ in range(_N_TRIES - 1):
            try:
                return self._fetch_once(part)
            except (TruncatedFile, HashMismatch):
                continue
        return self._fetch_once(part)

    def _fetch_once(self, part: _Part) -> bytes:
        # One byte beyond the end, so that an object that is too long shows itself.
        stop = part.start + part.n_bytes + part.is_last
        raw = self._run.store.read(part.key, part.start, stop)
        if len(raw) < part.n_bytes:
            n_there = part.start + len(raw)
            raise TruncatedFile(
                f"{part.key}: ends after {n_there} bytes, {part.start + part.n_bytes} should be there"
            )
        if len(raw) > part.n_bytes:
            raise HashMismatch(f"{part.key}: longer than the {stop - 1} bytes it should have")
        if sha256(raw) != part.sha256:
            raise HashMismatch(
                f"{part.key}: bytes {part.start} to {part.start + part.n_bytes} have another SHA-256"
                " than the one written down for them"
            )
        return raw


def _chunks(key: str, file: AnchorFile) -> Iterator[_Part]:
    if not file.chunks:
        yield _Part(key, 0, 0, sha256(b""))
    for number, expected in enumerate(file.chunks):
        start, stop = file.chunk_range(number)
        yield _Part(key, start, stop - start, expected, stop == file.n_bytes)


def _check_promise(index: PatchIndex, ref: PatchRef, step: Step) -> None:
    """The record is what was signed, so the index must agree with it."""
    if (index.base_digest, index.target_digest) != (ref.base_digest, step.digest):
        raise BaseMismatch(
            f"{ref.folder}: leads from {index.base_digest} to {index.target_digest}, its record says"
            f" {ref.base_digest} to {step.digest}"
        )
    sizes = (index.n_bytes + ref.n_index_bytes, len(index.buckets), index.n_changed)
    if sizes != (ref.n_bytes, ref.n_buckets, ref.n_changed):
        raise MalformedHeader(f"{ref.folder}: its record and its index disagree about its size")


def _first_of_each(damages: Iterable[Damage]) -> list[Damage]:
    """One entry per object: a file that is not there lacks all of its chunks."""
    found: dict[str, Damage] = {}
    for damage in damages:
        found.setdefault(damage.key, damage)
    return list(found.values())
