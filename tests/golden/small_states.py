"""Two small states made of integer formulas alone, so that they never change; and what they must give.

``python tests/golden/small_states.py`` writes ``patches.json`` anew, after a change of what is written.
What it held before goes to ``earlier_patches.json``: it must stay readable.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import weightwire as ww
from weightwire.codec.index import index_bytes

GOLDEN = Path(__file__).with_name("patches.json")


def base_state() -> dict[str, np.ndarray]:
    number = np.arange(3000, dtype=np.uint32)
    mixed = (number * np.uint32(2654435761)) >> np.uint32(13)
    bf16 = (mixed % 1280 + 0x3A00).astype(np.uint16) | (mixed.astype(np.uint16) << np.uint16(15))
    return {
        "bf16": bf16.reshape(60, 50).view(ml_dtypes.bfloat16),
        "f32": ((mixed[:500] % 5000) + np.uint32(0x3D000000)).view(np.float32),
        "f64": (number[:9].astype(np.uint64) << np.uint64(52)).view(np.float64),
        "dense": (number[:33] * np.uint32(977)).astype(np.uint8),
        "same": number[:7].astype(np.int16),
        "gone": number[:2].astype(np.int8),
    }


def target_state() -> dict[str, np.ndarray]:
    state = {name: array.copy() for name, array in base_state().items() if name != "gone"}
    state["bf16"].view(np.uint16).reshape(-1)[::23] += np.uint16(1)
    state["bf16"].view(np.uint16).reshape(-1)[5::61] -= np.uint16(2)
    state["f32"].view(np.uint32)[::7] ^= np.uint32(0x00010003)
    state["f64"].view(np.uint64)[4] += np.uint64(1)
    state["dense"] ^= np.uint8(0xA5)
    state["new"] = np.arange(5, dtype=np.uint16).view(np.float16)
    return state


def found(codec: str) -> dict[str, Any]:
    """Every byte of the patch between the two, and its hashes."""
    patch = ww.diff(base_state(), target_state(), codec=codec)
    files = {entry.file: patch._checked(entry) for entry in patch.index.buckets}
    return {
        "index": index_bytes(patch.index).decode(),
        "buckets": {name: raw.hex() for name, raw in files.items()},
        "sha256": {name: hashlib.sha256(raw).hexdigest() for name, raw in files.items()},
        "base_digest": ww.digest(base_state()),
        "target_digest": ww.digest(target_state()),
    }


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({c: found(c) for c in ("compact", "plain")}, indent=1) + "\n")
