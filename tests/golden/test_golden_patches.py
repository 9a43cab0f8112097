"""The bytes of a small patch, for ever: a reader of today must read a patch of then."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_states import GOLDEN, base_state, found, target_state

import weightwire as ww
from weightwire.codec.index import parse_index
from weightwire.codec.patch import MemoryBuckets

EARLIER = Path(__file__).with_name("earlier_patches.json")
READABLE = {**json.loads(EARLIER.read_text()), **json.loads(GOLDEN.read_text())}
"""Earlier writers chose other models and chunks; what they wrote stays."""

both = pytest.mark.parametrize("backend", ["native", "reference"])
codecs = pytest.mark.parametrize("codec", ["compact", "plain"])


@both
@codecs
def test_small_patch_has_the_golden_bytes(codec: str, backend: str) -> None:
    golden = json.loads(GOLDEN.read_text())[codec]
    ww.use_backend(backend)
    try:
        assert found(codec) == golden
    finally:
        ww.use_backend(None)


@both
@pytest.mark.parametrize("name", [*READABLE])
def test_golden_bytes_lead_to_the_target(name: str, backend: str) -> None:
    golden = READABLE[name]
    buckets = {name: bytes.fromhex(text) for name, text in golden["buckets"].items()}
    live = base_state()
    ww.use_backend(backend)
    try:
        ww.apply(
            live, ww.Patch(parse_index(golden["index"].encode(), "golden"), MemoryBuckets(buckets))
        )
    finally:
        ww.use_backend(None)
    wanted = target_state()
    assert {n: t.tobytes() for n, t in live.items()} == {n: t.tobytes() for n, t in wanted.items()}
