"""Where a run's objects lie: a temporary folder, any store, and a slow link before it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from weightwire.clock import Clock
from weightwire.errors import StopError
from weightwire.testing.link import Link, LinkShape, open_link
from weightwire.testing.seaweed import seaweed_server

_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


@dataclass(frozen=True)
class Place:
    """A store, as the trainer and as the workers reach it."""

    url: str
    trainer_options: dict[str, str] = field(default_factory=dict)
    worker_options: dict[str, str] = field(default_factory=dict)
    link: Link | None = None


@contextmanager
def open_place(
    folder: Path, store: str | None, shape: LinkShape | None, clock: Clock
) -> Iterator[Place]:
    """The store that was asked for; under a name of its own, so that no two runs meet.

    Raises:
        StopError: a store that processes cannot share, or that no link can be put before.
        ExtraMissing, StoreRefused: the embedded server is not installed, or does not start.
    """
    if store is not None and store.startswith("memory:"):
        raise StopError("processes cannot share memory:// stores; give a folder or a bucket")
    url = f"{store.rstrip('/')}/demo-{clock.token()}" if store else str(folder / "store")
    if shape is None:
        yield Place(url)
        return
    with ExitStack() as stack:
        options: dict[str, str] = {}
        if store is None:
            server = stack.enter_context(seaweed_server(folder))
            url, options = server.url("demo"), server.options
        endpoint = options.get("endpoint") or _endpoint_of(url)
        parts = urlsplit(endpoint)
        link = stack.enter_context(open_link(parts.hostname or "", parts.port or 80, shape, clock))
        shaped = {**options, "endpoint": f"http://127.0.0.1:{link.port}"}
        yield Place(url, options, shaped, link)


def _endpoint_of(url: str) -> str:
    """The plain HTTP endpoint that a store's requests go to.

    Raises:
        StopError: there is none; a link cannot be put into an encrypted connection, or before files.
    """
    named = next((os.environ[name] for name in _ENDPOINT_VARIABLES if name in os.environ), "")
    if not url.startswith("s3://") or not named.startswith("http://"):
        raise StopError(
            f"--link shapes plain HTTP: give an s3:// store with AWS_ENDPOINT_URL=http://…,"
            f" not {url}; or leave --store away, and a server is started here"
        )
    return named
