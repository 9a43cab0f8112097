"""Looking again at weights that nobody changed: memory can go bad without anyone writing to it."""

from __future__ import annotations

from collections.abc import Mapping

from weightwire.apply.device_stream import SideStreams
from weightwire.apply.needs import SelfProving
from weightwire.diff.state import StateReader, device_bits
from weightwire.digest import TensorDigest, digest_tensor


class Scrub:
    """Goes around a state's tensors, a share of its bytes at a time."""

    def __init__(self, n_rounds: int) -> None:
        """Be around after ``n_rounds`` calls of ``next``."""
        self._n_rounds = max(1, n_rounds)
        self._at = 0

    def next(self, state: StateReader, digests: Mapping[str, TensorDigest]) -> str | None:
        """Compare the next tensors with their digests; gives the first name that is wrong."""
        names = [name for name in state.specs if name in digests]
        n_total = sum(state.specs[name].n_bytes for name in names)
        n_left, streams = -(-n_total // self._n_rounds), SideStreams()
        for _ in range(len(names)):
            name = names[self._at % len(names)]
            if not _is_sound(state, name, digests[name], streams):
                return name
            self._at = (self._at + 1) % len(names)
            n_left -= state.specs[name].n_bytes
            if n_left <= 0:
                break
        return None


def _is_sound(state: StateReader, name: str, digest: TensorDigest, streams: SideStreams) -> bool:
    """A state with only some of a tensor's elements proves itself."""
    if isinstance(state, SelfProving):
        return state.is_sound(name, digest)
    on_device = device_bits(state, name, 0, 0)
    if on_device is None:
        return digest_tensor(state, name) == digest
    with streams.on(on_device.device):
        return digest_tensor(state, name) == digest
