"""A Hugging Face bucket as an object store, for one writer.

Buckets have no conditional write: ``create`` looks, writes, reads back and compares. That finds a
second writer only if it is not at the very same moment, so a run in a bucket has **one** publisher;
whoever starts a second must have stopped the first. Ranges are cut from a downloaded file, since the
interface gives whole files only; the file read last is kept, so reading an object in parts fetches
it once. Deletes and uploads are not transactions. All this is tested against a stand-in with the
call signatures of huggingface_hub 2.4.0, never against the hub itself.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from weightwire.errors import ObjectMissing, StoreUnavailable
from weightwire.store.contract import ObjectInfo
from weightwire.store.folder_reading import read_file
from weightwire.store.hub_errors import mapped_errors
from weightwire.store.keys import check_key
from weightwire.store.source import Source

_DELETE_BATCH = 1000


class HubClient(Protocol):
    """The four calls of ``huggingface_hub.HfApi`` that are used; ``Any`` stands for its types."""

    def batch_bucket_files(
        self, bucket_id: str, *, add: Any = None, delete: list[str] | None = None
    ) -> Any:
        """Upload ``(bytes or path, name)`` pairs, delete names; not a transaction."""

    def download_bucket_files(
        self, bucket_id: str, files: list[Any], *, raise_on_missing_files: bool = False
    ) -> None:
        """Download ``(file, path)`` pairs."""

    def list_bucket_tree(
        self, bucket_id: str, prefix: str | None = None, *, recursive: bool | None = None
    ) -> Iterable[Any]:
        """Files, and folders unless ``recursive``, below a folder."""

    def get_bucket_paths_info(self, bucket_id: str, paths: Iterable[str]) -> Iterable[Any]:
        """The files of these names; names without a file are passed over."""


class HubStore:
    """``hf://buckets/OWNER/NAME/prefix``: read by many, written by one."""

    def __init__(self, bucket_id: str, prefix: str = "", client: HubClient | None = None) -> None:
        self._bucket = bucket_id
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = client or _default_client()
        self._lock = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="weightwire-hub-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._kept = self._folder / "kept"
        self._kept_is: tuple[str, str] | None = None

    def __repr__(self) -> str:
        return f"HubStore('hf://buckets/{self._bucket}/{self._prefix}')"

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Upload an object; an iterable goes through a temporary file, so memory stays small.

        Raises:
            StoreUnavailable, StoreRefused: as the contract says.
        """
        name, source = self._name(key), Source(data)
        with mapped_errors("write", self._bucket, name, source):
            if isinstance(data, (bytes, bytearray, memoryview)):
                self._client.batch_bucket_files(self._bucket, add=[(bytes(data), name)])
                return
            with tempfile.NamedTemporaryFile(dir=self._folder) as file:
                file.writelines(source)
                file.flush()
                self._client.batch_bucket_files(self._bucket, add=[(Path(file.name), name)])

    def create(self, key: str, data: bytes) -> bool:
        """Look, upload, read back, compare: right for one writer, see the module's text.

        Raises:
            StoreUnavailable, StoreRefused: as the contract says.
        """
        with self._lock:  # exact within this process, at least
            if self._find(key) is not None:
                return False
            self.put(key, data)
        try:
            return self.read(key) == data
        except ObjectMissing as error:
            raise StoreUnavailable(f"{key}: written, but not there yet; try again") from error

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of an object, or a range of them, cut from the whole file.

        Raises:
            ObjectMissing, StoreUnavailable, StoreRefused: as the contract says.
        """
        found = self._find(key)
        if found is None:
            raise ObjectMissing(
                f"hf://buckets/{self._bucket}/{self._name(key)}: no such object;"
                " it was collected, or never written"
            )
        with self._lock, mapped_errors("read", self._bucket, found.path):
            self._keep(found)
            return read_file(self._kept, start, stop)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects in key order, gathered before the first is given; the hub has no offset.

        Raises:
            StoreUnavailable, StoreRefused: as the contract says.
        """
        folder = f"{self._prefix}{prefix}".rpartition("/")[0] or None
        with mapped_errors("list", self._bucket, f"{self._prefix}{prefix}"):
            tree = self._client.list_bucket_tree(self._bucket, folder, recursive=True)
            files = [_info(each, self._prefix) for each in tree if each.type == "file"]
        wanted = (each for each in files if each.key.startswith(prefix) and each.key > after)
        yield from sorted(wanted, key=lambda each: each.key)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove those objects that are there; the hub reports an error for those that are not.

        Raises:
            StoreUnavailable, StoreRefused: as the contract says.
        """
        names = [self._name(key) for key in keys]
        for first in range(0, len(names), _DELETE_BATCH):
            batch = names[first : first + _DELETE_BATCH]
            with mapped_errors("delete", self._bucket, batch[0]):
                there = [
                    each.path for each in self._client.get_bucket_paths_info(self._bucket, batch)
                ]
                if there:
                    self._client.batch_bucket_files(self._bucket, delete=there)

    def _name(self, key: str) -> str:
        """A key's path in the bucket."""
        return f"{self._prefix}{check_key(key)}"

    def _find(self, key: str) -> Any | None:
        """What the hub says of an object, if it is there."""
        name = self._name(key)
        with mapped_errors("find", self._bucket, name):
            return next(iter(self._client.get_bucket_paths_info(self._bucket, [name])), None)

    def _keep(self, found: Any) -> None:
        """Download a file, unless it is the one read last; the lock is held."""
        if self._kept_is == (found.path, found.xet_hash):
            return
        self._kept_is = None
        # A fresh place: a download that breaks off must not leave half a file to be read.
        self._kept.unlink(missing_ok=True)
        self._client.download_bucket_files(
            self._bucket, [(found, self._kept)], raise_on_missing_files=True
        )
        self._kept_is = (found.path, found.xet_hash)


def _default_client() -> HubClient:
    """The real one, with the token the user is logged in with."""
    from huggingface_hub import HfApi

    client: HubClient = HfApi()
    return client


def _info(file: Any, prefix: str) -> ObjectInfo:
    """What a listing says of one file."""
    modified = file.uploaded_at or file.mtime
    return ObjectInfo(
        file.path.removeprefix(prefix), file.size, modified.timestamp() if modified else 0.0
    )
