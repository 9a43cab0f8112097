"""Safetensors checkpoints on disk: read in pieces, written anew, or overwritten in place."""

from __future__ import annotations

from weightwire.checkpoint.journal import Recovered, overwrite_in_place, recover
from weightwire.checkpoint.reader import Checkpoint, ShardFile
from weightwire.checkpoint.writer import write_checkpoint

__all__ = [
    "Checkpoint",
    "Recovered",
    "ShardFile",
    "overwrite_in_place",
    "recover",
    "write_checkpoint",
]
