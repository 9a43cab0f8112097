"""SGLang: a custom weight loader that stages patches while requests run.

    python -m sglang.launch_server … --custom-weight-loader weightwire.engines.sglang.load

SGLang calls ``load`` in every tensor-parallel worker when ``/update_weights_from_tensor`` is asked
for with ``load_format=weightwire.engines.sglang.load``. What we send there are commands, not
tensors. A trainer or a sidecar uses ``SglangServer`` and ``follow``, which need no SGLang.

    command.py   what is told through SGLang: connect, activate
    mailbox.py   a folder both sides see: what is wanted, where each rank stands
    worker.py    what runs in every rank: the loader, and a thread that stages
    server.py    a running server, over HTTP; sidecar.py keeps it current
"""

from __future__ import annotations

from typing import Any

from weightwire.engines.sglang.worker import load

__all__ = ["SglangServer", "follow", "load"]


_PLACES = {"SglangServer": "server", "follow": "sidecar"}


def __getattr__(name: str) -> Any:
    """Names that SGLang's own processes do not need are imported when first used."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
