"""From what a user writes to a store: one readable choice."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from weightwire.errors import ExtraMissing, StoreRefused
from weightwire.store.contract import ObjectStore
from weightwire.store.memory import MemoryStore

_LOG = logging.getLogger("weightwire.store")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_CLOUDS = {"s3", "s3a", "gs", "az", "azure", "abfs", "abfss"}
_ENDPOINT_OPTIONS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

_memory: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def open_store(
    url: str | os.PathLike[str] | ObjectStore, *, options: Mapping[str, str] | None = None
) -> ObjectStore:
    """The store behind a path or URL; a store passes through.

    ``folder`` and ``file:///folder``: a local folder. ``memory://NAME``: this process's memory,
    shared by name; ``memory://`` alone is a new one each time. ``s3://bucket/prefix``,
    ``gs://bucket/prefix``, ``az://container/prefix``: a cloud, with ``options`` in obstore's words
    (``endpoint``, ``region``, ``access_key_id`` …) over the usual environment variables.
    ``hf://buckets/OWNER/NAME/prefix``: a Hugging Face bucket. Nothing is sent yet.

    Raises:
        StoreRefused: a URL or option that cannot work.
        ExtraMissing: the library for this kind of store is not installed.
    """
    if not isinstance(url, (str, os.PathLike)):
        return url
    text = os.fspath(url)
    store = _choose(text, dict(options or {}))
    _LOG.info("store %s: %r", _shown(text), store)
    return store


def _choose(text: str, options: dict[str, str]) -> ObjectStore:
    """The one place where a kind of store is chosen."""
    scheme = text.partition("://")[0].lower() if _SCHEME.match(text) else ""
    if scheme in {"", "file"}:
        return _open_folder(text)
    if scheme == "memory":
        return _open_memory(text.partition("://")[2].strip("/"))
    if scheme in _CLOUDS:
        return _open_cloud(text, options)
    if scheme == "hf":
        return _open_hub(text)
    raise StoreRefused(
        f"{_shown(text)}: no store for {scheme}:// URLs;"
        " give a folder, or file://, memory://, s3://, gs://, az:// or hf://buckets/"
    )


def _open_folder(text: str) -> ObjectStore:
    """A folder by path or by ``file://`` URL."""
    from weightwire.store.folder import FolderStore

    if not _SCHEME.match(text):
        return FolderStore(Path(text).expanduser())
    parts = urlsplit(text)
    if parts.netloc not in {"", "localhost"} or not parts.path:
        raise StoreRefused(f"{_shown(text)}: a file URL has three slashes: file:///the/folder")
    return FolderStore(Path(unquote(parts.path)))


def _open_memory(name: str) -> MemoryStore:
    """The store of this name in this process; without a name, one nobody else has."""
    if not name:
        return MemoryStore()
    with _memory_lock:
        return _memory.setdefault(name, MemoryStore())


def _open_cloud(text: str, options: dict[str, str]) -> ObjectStore:
    """A bucket through obstore."""
    parts = urlsplit(text)
    if "@" in parts.netloc or parts.query or parts.fragment or not parts.netloc:
        raise StoreRefused(
            f"{_shown(text)}: give scheme, bucket and prefix only;"
            " credentials belong in the environment or in options"
        )
    _need("obstore")
    from weightwire.store.objects import connect

    return connect(text.rstrip("/"), text.rstrip("/"), options, _is_plain_http(options))


def _open_hub(text: str) -> ObjectStore:
    """A Hugging Face bucket."""
    found = re.fullmatch(r"hf://buckets/([\w.-]+/[\w.-]+)(?:/(.*))?", text)
    if found is None:
        raise StoreRefused(f"{_shown(text)}: write hf://buckets/OWNER/NAME or …/NAME/prefix")
    _need("huggingface_hub")
    from weightwire.store.hub import HubStore

    return HubStore(found[1], (found[2] or "").strip("/"))


def _is_plain_http(options: Mapping[str, str]) -> bool:
    """Whether the endpoint is an ``http://`` one: who wrote that has allowed it."""
    lowered = {key.lower(): value for key, value in options.items()}
    given = [lowered[key] for key in _ENDPOINT_OPTIONS if key in lowered]
    known = [os.environ[key] for key in _ENDPOINT_VARIABLES if key in os.environ]
    return next(iter(given + known), "").lower().startswith("http://")


def _need(module: str) -> None:
    """Say what to install before an import fails.

    Raises:
        ExtraMissing: it is not installed.
    """
    if find_spec(module) is None:
        raise ExtraMissing(f"this kind of store needs {module}: pip install {module}")


def _shown(text: str) -> str:
    """A URL as it may stand in a log or a message: without user, password, query and fragment."""
    bare = re.split(r"[?#]", text, maxsplit=1)[0] if _SCHEME.match(text) else text
    return re.sub(r"://[^/]*@", "://", bare)
