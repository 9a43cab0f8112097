"""Before the first remote call: was this server started for Weightwire, and what is it to follow?"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weightwire.engines.remote.calls import Routes
from weightwire.engines.vllm.plugin import BACKEND
from weightwire.errors import EngineRefused


def require_set_up(calls: Routes) -> None:
    """Look at a server's settings: a remote call that no worker has would upset it for good.

    Raises:
        EngineRefused: says how to start it.
    """
    config = calls.get("/server_info", config_format="json")["vllm_config"]
    transfer = config.get("weight_transfer_config") or {}
    extension = (config.get("parallel_config") or {}).get("worker_extension_cls")
    if transfer.get("backend") != BACKEND:
        raise EngineRefused(
            f"{calls.url} has weight-transfer backend {transfer.get('backend')!r}; start it with"
            f""" --weight-transfer-config '{{"backend": "{BACKEND}"}}'"""
        )
    if not extension:
        raise EngineRefused(
            f"{calls.url} has no worker extension; start it with"
            " --worker-extension-cls weightwire.engines.vllm.worker.WeightwireWorker"
        )


def connection_to(
    store: str | os.PathLike[str],
    *,
    key: str | None,
    worker: str | None,
    cache: str | os.PathLike[str] | None,
    options: Mapping[str, str] | None,
    retry_s: float | None,
) -> dict[str, Any]:
    """What the ranks are told, with a name for exactly that under ``connection``."""
    told = {
        "store": address(store),
        "key": key,
        "worker": worker,
        "cache": os.fspath(cache) if cache else None,
        "options": dict(options or {}),
        "retry_s": retry_s,
        "load": False,
    }
    name = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    return {**told, "connection": name}


def address(store: str | os.PathLike[str]) -> str:
    """A store as another process on this host would name it: relative folders made absolute."""
    text = os.fspath(store)
    return text if "://" in text else str(Path(text).expanduser().absolute())
