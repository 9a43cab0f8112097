"""Weightwire: bit-exact sparse weight patches from RL trainers to inference engines."""

from __future__ import annotations

from importlib.metadata import version as _version

from weightwire import errors
from weightwire.codec.patch import Patch
from weightwire.kernels import available_backends, backend, use_backend
from weightwire.patching import Applied, apply, diff, digest, merge

__all__ = [
    "Applied",
    "Patch",
    "apply",
    "available_backends",
    "backend",
    "diff",
    "digest",
    "errors",
    "merge",
    "use_backend",
]
__version__ = _version("weightwire")
