"""Weightwire: bit-exact sparse weight patches from RL trainers to inference engines."""

from __future__ import annotations

from importlib.metadata import version as _version

from weightwire import errors
from weightwire.codec.patch import Patch
from weightwire.diff.cast import cast
from weightwire.events import Published, Updated
from weightwire.kernels import available_backends, backend, use_backend
from weightwire.patching import Applied, apply, diff, digest, merge
from weightwire.publisher import Publisher
from weightwire.store.extras import AnchorPolicy
from weightwire.subscriber import Subscriber

__all__ = [
    "AnchorPolicy",
    "Applied",
    "Patch",
    "Published",
    "Publisher",
    "Subscriber",
    "Updated",
    "apply",
    "available_backends",
    "backend",
    "cast",
    "diff",
    "digest",
    "errors",
    "merge",
    "use_backend",
]
__version__ = _version("weightwire")
