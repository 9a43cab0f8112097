# ruff: noqa: ARG002 - the signatures are the hub's
"""Hugging Face buckets without the hub: same calls, same answers, files in a folder."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path

from huggingface_hub import BucketFile, BucketFolder
from huggingface_hub.errors import EntryNotFoundError

Source = str | Path | bytes


class StandInHub:
    """The calls of ``huggingface_hub.HfApi`` that ``HubStore`` makes, with their real signatures."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, tuple[Path, BucketFile]] = {}
        self._lock = threading.Lock()
        self.n_downloads = 0

    def batch_bucket_files(
        self,
        bucket_id: str,
        *,
        add: list[tuple[Source, str]] | None = None,
        copy: list[tuple[str, str, str, str]] | None = None,
        delete: list[str] | None = None,
        token: str | bool | None = None,
    ) -> None:
        with self._lock:
            for source, name in add or []:
                self._add(source, name)
            for name in delete or []:
                del self._files[name]

    def download_bucket_files(
        self,
        bucket_id: str,
        files: list[tuple[str | BucketFile, str | Path]],
        *,
        raise_on_missing_files: bool = False,
        token: str | bool | None = None,
    ) -> None:
        for file, target in files:
            name = file if isinstance(file, str) else file.path
            with self._lock:
                if name not in self._files:
                    raise EntryNotFoundError(name)
                self.n_downloads += 1
                shutil.copyfile(self._files[name][0], target)

    def list_bucket_tree(
        self,
        bucket_id: str,
        prefix: str | None = None,
        *,
        recursive: bool | None = None,
        token: str | bool | None = None,
    ) -> Iterable[BucketFile | BucketFolder]:
        with self._lock:
            found = [info for _, info in self._files.values()]
        return (info for info in found if prefix is None or info.path.startswith(f"{prefix}/"))

    def get_bucket_paths_info(
        self, bucket_id: str, paths: Iterable[str], *, token: str | bool | None = None
    ) -> Iterator[BucketFile]:
        with self._lock:
            found = [self._files[path][1] for path in set(paths) if path in self._files]
        return iter(found)

    def _add(self, source: Source, name: str) -> None:
        content = source if isinstance(source, bytes) else None
        place = self._folder / f"hub-{len(self._files)}-{hashlib.sha256(name.encode()).hexdigest()}"
        if content is None:
            shutil.copyfile(source, place)
        else:
            place.write_bytes(content)
        xet_hash = hashlib.sha256(place.read_bytes()).hexdigest()
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        facts = {"type": "file", "path": name, "size": place.stat().st_size, "xetHash": xet_hash}
        self._files[name] = (place, BucketFile(**facts, mtime=now, uploadedAt=now))
