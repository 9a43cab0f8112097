"""The files beside the weights: configuration, tokenizer and the like, copied as they are."""

from __future__ import annotations

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path

from weightwire.checkpoint.file_names import is_leftover
from weightwire.checkpoint.regular_file import real_path, stays_inside
from weightwire.durable import sync_folder

_STALE = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.gguf",
    "tf_model.h5",
    "flax_model.msgpack",
    ".git",
    ".cache",
)
"""Weights in any format, and version-control data: next to new weights they would be lies."""


def copy_companions(source: Path, target: Path) -> None:
    """Copy everything in a checkpoint folder but weights and leftovers; subfolders in full."""
    for entry in _companions(source):
        _copy(entry, target / entry.name, source)


def companion_files(source: Path) -> list[Path]:
    """The regular files among them, at the folder's top; links that lead out of it are left out."""
    return [
        entry
        for entry in _companions(source)
        if not is_leftover(entry.name) and entry.is_file() and stays_inside(source, entry)
    ]


def _companions(source: Path) -> list[Path]:
    entries = sorted(source.iterdir())
    return [e for e in entries if not any(fnmatch(e.name, pattern) for pattern in _STALE)]


def _copy(entry: Path, target: Path, root: Path) -> None:
    """Pipes, sockets and devices are passed over: reading them could block or never end."""
    if is_leftover(entry.name):
        return
    if entry.is_symlink() and not (entry.is_file() and stays_inside(root, entry)):
        _copy_link(entry, target, root)
    elif entry.is_dir():
        _copy_folder(entry, target, root)
    elif entry.is_file():
        _copy_file(entry, target)


def _copy_link(entry: Path, target: Path, root: Path) -> None:
    """Links out of the folder stay links: copying would publish what they point to."""
    target.symlink_to(entry.readlink() if stays_inside(root, entry) else real_path(entry))


def _copy_folder(entry: Path, target: Path, root: Path) -> None:
    target.mkdir()
    for child in sorted(entry.iterdir()):
        _copy(child, target / child.name, root)
    sync_folder(target)


def _copy_file(entry: Path, target: Path) -> None:
    shutil.copyfile(entry, target)
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    shutil.copymode(entry, target)
