"""``model.safetensors.index.json``: which shard of a checkpoint holds which tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightwire import limits
from weightwire.checkpoint.file_names import WEIGHTS_SUFFIX
from weightwire.checkpoint.regular_file import open_regular
from weightwire.container import parse_json, read_bytes
from weightwire.errors import LimitExceeded, MalformedHeader
from weightwire.model import TensorSpec

_MAX_FILE_NAME_BYTES = 255


@dataclass(frozen=True)
class ShardIndex:
    """A checked index: every shard name is a plain file name."""

    weight_map: Mapping[str, str]
    metadata: Mapping[str, object]

    @property
    def shard_names(self) -> list[str]:
        """Each shard once, in the order of their numbers."""
        return sorted(set(self.weight_map.values()))


def read_index(path: Path) -> ShardIndex:
    """Read and check an index file.

    Raises:
        MalformedHeader: it does not parse, or names a shard outside its folder.
        LimitExceeded: longer than ``limits.MAX_HEADER_BYTES``, or too many tensors.
        NotACheckpoint: not a regular file.
    """
    where = str(path)
    value = parse_json(_read_capped(path), where, limits.MAX_HEADER_BYTES)
    if not isinstance(value, dict) or not isinstance(value.get("weight_map"), dict):
        raise MalformedHeader(f"{where}: has no weight_map; fetch the index again")
    weight_map = value["weight_map"]
    if len(weight_map) > limits.MAX_TENSORS:
        raise LimitExceeded(f"{where}: {len(weight_map)} tensors; cap {limits.MAX_TENSORS}")
    for name, shard in weight_map.items():
        _check_shard_name(name, shard, where)
    metadata = value.get("metadata")
    return ShardIndex(weight_map, metadata if isinstance(metadata, dict) else {})


def build_index(
    shards: Mapping[str, Sequence[TensorSpec]], base_metadata: Mapping[str, object]
) -> bytes:
    """The index of these shards, laid out as the transformers library writes it."""
    specs = [spec for shard in shards.values() for spec in shard]
    weight_map = {spec.name: shard for shard, group in shards.items() for spec in group}
    total_size = sum(spec.n_bytes for spec in specs)
    metadata = {**base_metadata, "total_size": total_size}
    # A parameter count that describes other tensors would be a lie; a loader does without it.
    if base_metadata.get("total_size") != total_size:
        metadata.pop("total_parameters", None)
    index = {"metadata": metadata, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _read_capped(path: Path) -> bytes:
    with open_regular(path, os.O_RDONLY) as descriptor:
        n_bytes = os.fstat(descriptor).st_size
        if n_bytes > limits.MAX_HEADER_BYTES:
            raise LimitExceeded(f"{path}: {n_bytes} bytes; at most {limits.MAX_HEADER_BYTES}")
        return read_bytes(descriptor, n_bytes, 0, str(path))


def _check_shard_name(name: str, shard: object, where: str) -> None:
    """Plain names only: an index must not make us read or write outside its folder."""
    if not isinstance(shard, str) or not _is_plain(shard):
        raise MalformedHeader(
            f"{where}: tensor {name!r:.200} is mapped to {shard!r:.200}; expected the name of a "
            f"*{WEIGHTS_SUFFIX} file in the same folder; fetch the index again"
        )


def _is_plain(shard: str) -> bool:
    hostile = any(character in shard for character in "/\\\0")
    short = len(shard.encode()) <= _MAX_FILE_NAME_BYTES
    return short and not hostile and not shard.startswith(".") and shard.endswith(WEIGHTS_SUFFIX)
