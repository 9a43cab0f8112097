"""vLLM: weight-transfer backend ``weightwire``, staged while requests run.

``register`` is the entry point that vLLM calls in each of its processes. A trainer or a sidecar
uses ``VllmServer`` and ``follow``, which need no vLLM themselves.

    engine.py    what vLLM calls in every rank: init, start, receive, finish
    worker.py    what we call in every rank beside that: stage, status, abort
    ranks.py     all ranks write, or none
    server.py    a running server, over HTTP; sidecar.py keeps it current; offline.py: vllm.LLM
"""

from __future__ import annotations

from typing import Any

from weightwire.engines.vllm.plugin import register

__all__ = ["OfflineEngine", "VllmServer", "follow", "register"]

_PLACES = {"VllmServer": "server", "follow": "sidecar", "OfflineEngine": "offline"}


def __getattr__(name: str) -> Any:
    """Names that vLLM's own processes do not need are imported when first used."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
