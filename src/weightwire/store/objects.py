"""S3, Google Cloud Storage and Azure, through obstore."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

from weightwire.store.contract import ObjectInfo
from weightwire.store.keys import check_key
from weightwire.store.object_errors import (
    mapped_errors,
    names_a_conflict,
    names_a_missing_bucket,
    names_an_empty_range,
)
from weightwire.store.source import Source

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Handle

PART_BYTES = 5 << 20
"""Size of one part of a streamed upload: S3's least, so a slow uplink finishes one in time."""

N_PARTS_AT_ONCE = 4
"""Parts on their way together; with ``PART_BYTES`` it bounds the memory of an upload."""

REQUEST_TIMEOUT = timedelta(seconds=120)
"""One request. Four parts at once need 1.4 Mbit/s to make it."""

CONNECT_TIMEOUT = timedelta(seconds=10)
"""Until a connection stands."""

DELETE_BATCH = 1000
"""Most keys S3 takes in one request to delete."""

_LIST_CHUNK = 1000


class ObstoreStore:
    """A bucket or container, or a prefix in one.

    ``handle`` may repeat a request by itself, a little; ``create_handle`` never does. A create that
    is repeated after a lost reply would meet its own object and report that someone else won.
    ``connect`` makes both.

    A put of an iterable is uploaded in parts; if the iterable raises, the upload is aborted. A
    process that is killed meanwhile leaves parts that are never listed but do cost space: give the
    bucket a lifecycle rule that drops unfinished uploads.
    """

    def __init__(self, handle: Handle, create_handle: Handle, name: str) -> None:
        self._handle = handle
        self._create_handle = create_handle
        self._name = name

    def __repr__(self) -> str:
        return f"ObstoreStore({self._name!r})"

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Write an object, in parts if it is large or an iterable.

        Raises:
            StoreUnavailable, StoreRefused: as the contract says.
        """
        check_key(key)
        source = Source(data)
        whole = data if isinstance(data, (bytes, bytearray, memoryview)) else iter(source)
        with mapped_errors("write", self._name, key, source):
            self._handle.put(key, whole, chunk_size=PART_BYTES, max_concurrency=N_PARTS_AT_ONCE)

    def create(self, key: str, data: bytes) -> bool:
        """Write an object with ``If-None-Match: *``.

        Raises:
            StoreUnavailable, StoreRefused: as the contract says.
        """
        from obstore.exceptions import AlreadyExistsError

        check_key(key)
        with mapped_errors("create", self._name, key):
            try:
                self._create_handle.put(key, data, mode="create")
            except AlreadyExistsError as error:
                if names_a_conflict(error):
                    raise
                return False
        return True

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of an object, or a range of them.

        An empty range is asked for as one byte: whether the object is there must be told all the
        same. Stores refuse a range that starts at the end or beyond; that means no bytes.

        Raises:
            ObjectMissing, StoreUnavailable, StoreRefused: as the contract says.
        """
        check_key(key)
        is_empty = stop is not None and stop <= start
        with mapped_errors("read", self._name, key):
            try:
                data = self._read(key, start, start + 1 if is_empty else stop)
            except Exception as error:
                if names_an_empty_range(error):
                    return b""
                raise
        return b"" if is_empty else data

    def _read(self, key: str, start: int, stop: int | None) -> bytes:
        """One request; obstore's own errors."""
        if stop is not None:
            return bytes(self._handle.get_range(key, start=start, end=stop))
        options: Any = {"range": {"offset": start}} if start else None
        return bytes(self._handle.get(key, options=options).bytes())

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        """Objects in key order, gathered before the first is given.

        S3 lists in the order of keys, but servers that keep keys as a tree do not: they give
        ``log/x`` before ``log-x``. So a listing is asked for from a place that is before its first
        key in both orders, filtered, and sorted. Thus ``log/boundary-`` is found without reading
        the log's other, many, records.

        Raises:
            StoreUnavailable, StoreRefused: as the contract says.
        """
        folder = prefix.rpartition("/")[0] or None
        offset = _before(max(prefix, after)) or None
        with mapped_errors("list", self._name, prefix):
            chunks = self._handle.list(folder, offset=offset, chunk_size=_LIST_CHUNK)
            found = [_info(meta) for chunk in chunks for meta in chunk]
        wanted = (each for each in found if each.key.startswith(prefix) and each.key > after)
        yield from sorted(wanted, key=lambda each: each.key)

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, many in one request.

        Raises:
            StoreUnavailable, StoreRefused: as the contract says.
        """
        left = (check_key(key) for key in keys)
        while batch := list(islice(left, DELETE_BATCH)):
            with mapped_errors("delete", self._name, batch[0]):
                self._delete(batch)

    def _delete(self, batch: Sequence[str]) -> None:
        """One request for all; where a missing object stops it, one request for each.

        Google and Azure report the first object that is not there and may leave the others.
        """
        try:
            self._handle.delete(batch)
        except FileNotFoundError as error:
            if names_a_missing_bucket(error):
                raise
            for key in batch if len(batch) > 1 else []:
                self._delete([key])


def connect(url: str, name: str, config: Mapping[str, Any], allow_http: bool) -> ObstoreStore:
    """A store for an ``s3://``, ``gs://`` or ``az://`` URL; nothing is sent yet.

    Args:
        name: the URL as messages may show it.

    Raises:
        StoreRefused: a setting obstore does not know or cannot use.
    """
    from obstore.store import from_url

    client: Any = {"timeout": REQUEST_TIMEOUT, "connect_timeout": CONNECT_TIMEOUT}
    if allow_http:
        client["allow_http"] = True

    def handle(n_retries: int) -> Handle:
        retry: Any = {"max_retries": n_retries, "retry_timeout": timedelta(seconds=15)}
        settings: Any = dict(config)
        return from_url(url, config=settings, client_options=client, retry_config=retry)

    with mapped_errors("open", name, ""):
        return ObstoreStore(handle(2), handle(0), name)


def _info(meta: Any) -> ObjectInfo:
    """What a listing says of one object."""
    return ObjectInfo(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _before(key: str) -> str:
    """A place shortly before ``key``, in the order of keys and in that of a tree.

    The two orders part ways at characters below the slash, so the place is taken before the first
    of them. And it is one step lower still: a tree that is asked to go on after ``log/7`` skips
    the whole folder ``log/7/``.
    """
    low = next((at for at, character in enumerate(key) if character < "/"), len(key))
    head = key[:low]
    while head and not "0" < head[-1] <= "~":
        head = head[:-1]
    return f"{head[:-1]}{chr(ord(head[-1]) - 1)}" if head else ""
