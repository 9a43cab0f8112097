"""The hot loops: ``reference`` is the definition, ``native`` is fast, one dispatch chooses.

``WEIGHTWIRE_BACKEND`` or ``use_backend`` forces one; asking for a missing one is an error, never a
silent fall-back. Both work in the host's memory; ``triton`` works beside either, on tensors that are
on a GPU.
"""

from __future__ import annotations

import importlib
import logging
import os
from functools import cache
from typing import Any

from weightwire.errors import BackendMissing
from weightwire.kernels import devices
from weightwire.kernels.contract import Kernels

__all__ = ["Kernels", "available_backends", "backend", "kernels", "native_module", "use_backend"]

_LOG = logging.getLogger(__name__)
_CLASSES = {"native": "NativeKernels", "reference": "ReferenceKernels"}
_forced: list[str] = []


def kernels() -> Kernels:
    """The host's backend: the forced one, else the native one."""
    return _load(_forced[-1] if _forced else os.environ.get("WEIGHTWIRE_BACKEND") or "native")


def native_module() -> Any | None:
    """The compiled loops that stand beside ``Kernels``; None where the reference backend runs."""
    is_reference = kernels().name == "reference"
    return None if is_reference else importlib.import_module("weightwire._native")


def backend() -> str:
    """What runs here: the host's backend, and ``+triton`` where there is a GPU it works beside."""
    return kernels().name + ("+triton" if devices.has_device() else "")


def available_backends() -> list[str]:
    """Names of the backends that load here."""
    return [name for name in _CLASSES if _loads(name)]


def use_backend(name: str | None) -> None:
    """Force a backend for this process, or with None let Weightwire choose again.

    Raises:
        BackendMissing: there is no such backend, or it does not load here.
    """
    if name is None:
        _forced.clear()
        return
    _load(name)
    _forced[:] = [name]


def _loads(name: str) -> bool:
    try:
        _load(name)
    except BackendMissing:
        return False
    return True


@cache
def _load(name: str) -> Kernels:
    if name not in _CLASSES:
        raise BackendMissing(f"no kernel backend {name!r}; choose one of: {', '.join(_CLASSES)}")
    try:
        module = importlib.import_module(f"weightwire.kernels.{name}")
    except ImportError as error:
        raise BackendMissing(
            f"the {name!r} kernels do not load ({error}); reinstall weightwire with a C++ compiler"
            " at hand, or set WEIGHTWIRE_BACKEND=reference (slow)"
        ) from error
    _LOG.info("kernel backend: %s", name)
    loaded: Kernels = getattr(module, _CLASSES[name])()
    return loaded
