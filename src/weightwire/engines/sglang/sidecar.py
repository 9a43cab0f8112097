"""A sidecar for SGLang servers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from weightwire.engines.remote import sidecar
from weightwire.engines.remote.sidecar import Followed
from weightwire.engines.sglang.server import SglangServer


def follow(
    store: str | os.PathLike[str],
    servers: str | SglangServer | Sequence[str | SglangServer],
    **options: Any,
) -> Iterator[Followed]:
    """Every version from now on, as it reaches the servers; they may be given by URL.

    Options and errors are those of ``weightwire.engines.remote.sidecar.follow``.
    """
    return sidecar.follow(store, sidecar.servers_at(servers, SglangServer), **options)
