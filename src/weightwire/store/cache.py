"""What a receiver keeps on disk, so that it need not fetch it again after a restart.

    anchors/<name>/   plain Hugging Face checkpoint folders
    patches/<name>/   plain patch folders
    seen.json         the newest version ever seen, so that an old copy of the store is noticed

Nothing here is trusted: patches are checked by hash when they are read, states by digest when
they are used. A folder appears under its name when it is complete. Several receivers may share a
cache: what one of them uses, the others leave alone.
"""

from __future__ import annotations

import errno
import json
import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

from weightwire.codec.index import INDEX_FILE, BucketEntry, PatchIndex, index_bytes, seal
from weightwire.codec.patch import Patch
from weightwire.container import parse_json
from weightwire.container.fields import HEX_128, HEX_256, Fields
from weightwire.durable import make_folder
from weightwire.errors import RetryError, StopError, WeightwireError
from weightwire.store.in_use import PARTIAL, InUse, remove, remove_unused
from weightwire.store.records import AnchorRef, PatchRef

log = logging.getLogger("weightwire.store")

_SEEN = "seen.json"


class Cache:
    """A folder of anchors and patches; without one, anchors go to a temporary folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self._keeps_patches = folder is not None
        self._noted: tuple[str, int, str] | None = None
        self._in_use = InUse()
        self._root = folder or Path(tempfile.mkdtemp(prefix="weightwire-"))
        self._remove: Callable[[], object] = lambda: None
        if folder is None:
            # Also when nobody calls close: a receiver usually lives as long as its process.
            self._remove = weakref.finalize(self, shutil.rmtree, self._root, ignore_errors=True)
        for name in ("anchors", "patches"):
            make_folder(self._root / name, parents=True)

    def at_hand(self) -> frozenset[str]:
        """Folders of the store that need not be fetched."""
        return frozenset(
            f"{kind}/{path.name}/"
            for kind in ("anchors", "patches")
            for path in (self._root / kind).iterdir()
            if path.is_dir() and not path.name.endswith(PARTIAL)
        )

    def load_patch(self, ref: PatchRef) -> Patch | None:
        """A kept patch, if it is whole enough to be opened and is the one its record names."""
        path = self._path(ref.folder)
        if not path.is_dir():
            return None
        try:
            patch = Patch.load(path)
        except (WeightwireError, OSError):
            self.discard(ref.folder)
            return None
        if (patch.index.base_digest, patch.n_bytes) != (ref.base_digest, ref.n_bytes):
            self.discard(ref.folder)
            return None
        return patch

    def add_bucket(self, folder: str, entry: BucketEntry, raw: bytes) -> None:
        """Keep one bucket of a patch that is being fetched, if the disk allows it."""
        if not self._keeps_patches:
            return
        partial = self._partial(folder)
        try:
            make_folder(partial)
            (partial / entry.file).write_bytes(raw)
        except OSError as error:
            # A patch that is not kept costs a download after a restart, and nothing else.
            log.warning("%s is not kept: %s", folder, error)
            remove(partial)

    def finish_patch(self, ref: PatchRef, index: PatchIndex) -> None:
        """Give a patch its name, if all of its buckets are here."""
        path, partial = self._path(ref.folder), self._partial(ref.folder)
        if not self._keeps_patches or path.exists():
            return
        try:
            make_folder(partial)
            if all((partial / entry.file).is_file() for entry in index.buckets):
                (partial / INDEX_FILE).write_bytes(index_bytes(index))
                partial.rename(path)
        except OSError as error:
            log.warning("%s is not kept: %s", ref.folder, error)

    def begin_anchor(self, ref: AnchorRef) -> Path:
        """Where an anchor's files go, with what an earlier attempt left there; ours until tidied.

        Raises:
            OSError: the disk's own errors; FileNotFoundError if another receiver was faster.
        """
        folder = self._path(ref.folder)
        if not folder.is_dir():
            folder = self._partial(ref.folder)
            make_folder(folder)
        if not self._in_use.claim(ref.folder, folder):
            raise FileNotFoundError(errno.ENOENT, "removed while it was asked for", str(folder))
        return folder

    def finish_anchor(self, ref: AnchorRef) -> Path:
        """Give an anchor its name, now that its files are whole.

        Raises:
            OSError: the disk's own errors; FileNotFoundError if another receiver was faster.
        """
        path, partial = self._path(ref.folder), self._partial(ref.folder)
        if not path.is_dir():
            partial.rename(path)
        return path

    def discard(self, folder: str) -> None:
        """Forget what turned out to be damaged."""
        for path in (self._path(folder), self._partial(folder)):
            remove(path)
        self._in_use.release(folder)

    def keep_only(self, folders: Iterable[str]) -> None:
        """Remove everything a restart would not need, and no other receiver is using."""
        wanted = set(folders)
        self._in_use.release_all_but(wanted)
        for kind in ("anchors", "patches"):
            for path in list((self._root / kind).iterdir()):
                if f"{kind}/{path.name.removesuffix(PARTIAL)}/" not in wanted:
                    remove_unused(path)

    def seen(self) -> tuple[str, int, str] | None:
        """Run, version and record of the newest version seen by this receiver, ever."""
        try:
            raw = (self._root / _SEEN).read_bytes()
            if raw != seal(raw[: -len(seal(b"{}")) + 1] + b"}"):
                return None  # a damaged memory is none: it must not stop a receiver for ever
            fields = Fields(parse_json(raw, _SEEN, 1 << 12), _SEEN)
            return (
                fields.text("run", HEX_128),
                fields.count("version"),
                fields.text("record", HEX_256),
            )
        except (OSError, RetryError, StopError):
            return None

    def remember_seen(self, run: str, version: int, record: str) -> None:
        """Note the newest version seen; an idle receiver that looks often does not write each time."""
        if self._noted == (run, version, record):
            return
        fresh = self._root / f"{_SEEN}{PARTIAL}"
        try:
            noted = {"run": run, "version": version, "record": record}
            fresh.write_bytes(seal(json.dumps(noted).encode()))
            fresh.replace(self._root / _SEEN)
            self._noted = (run, version, record)
        except OSError as error:
            log.warning("%s is not kept: %s", _SEEN, error)

    def close(self) -> None:
        """Let go of what is used, and remove a temporary folder."""
        self._in_use.release_all_but(set())
        self._remove()

    def _path(self, folder: str) -> Path:
        return self._root / folder.rstrip("/")

    def _partial(self, folder: str) -> Path:
        return self._root / (folder.rstrip("/") + PARTIAL)
