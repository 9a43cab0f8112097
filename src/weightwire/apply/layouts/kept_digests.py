"""Digests of what an engine keeps of its tensors: on a device many at once, on the host in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from weightwire.apply.device_stream import SideStreams
from weightwire.apply.layouts.regions import AT_ONCE
from weightwire.apply.needs import Span
from weightwire.codec.piece import piece_elements
from weightwire.diff.device_digest import digests_of
from weightwire.diff.state import DeviceReader, StateReader, makes_device_bits
from weightwire.digest import TensorDigest, digest_bits
from weightwire.kernels.devices import unless_out_of_memory

if TYPE_CHECKING:
    import torch

_MADE_BYTES = 256 << 20
"""Of memory that is made to be digested, so much at a time."""

_Stretch = tuple[str, int, "torch.Tensor"]
"""A tensor's name, the index of a first element, and the bits from there on."""


def kept_digests(
    state: StateReader, spans: Mapping[str, Span], streams: SideStreams
) -> dict[str, TensorDigest]:
    """Digests of a span of each of these tensors; on the host where a device has no memory left.

    Raises:
        BaseMismatch: live memory holds bits that nobody published.
    """
    found = dict.fromkeys(spans, TensorDigest())
    left = unless_out_of_memory(lambda: _OnDevice(state, streams).add_up(spans, found))
    for name in spans if left is None else left:
        found[name] = digest_span(state, name, spans[name])
    return found


def digest_span(state: StateReader, name: str, span: Span) -> TensorDigest:
    """Digest of a run of elements, read in pieces."""
    total = TensorDigest()
    for start in range(span.start, span.stop, AT_ONCE):
        stop = min(start + AT_ONCE, span.stop)
        total += digest_bits(state.read(name, start, stop), start)
    return total


class _OnDevice:
    """Digests stretches of tensors that are on devices, with few launches and few waits."""

    def __init__(self, state: StateReader, streams: SideStreams) -> None:
        self._state, self._streams = state, streams
        self._waiting: dict[torch.device, list[_Stretch]] = {}
        self._n_made = 0

    def add_up(self, spans: Mapping[str, Span], found: dict[str, TensorDigest]) -> list[str]:
        """Add to what is found; gives the tensors that only the host can digest."""
        left = [name for name, span in spans.items() if not self._takes(name, span, found)]
        self._flush(found)
        return left

    def _takes(self, name: str, span: Span, found: dict[str, TensorDigest]) -> bool:
        """Digest one tensor with others; False, and no trace of it, if the host must."""
        if not isinstance(self._state, DeviceReader):
            return False
        probe = self._state.read_device(name, span.start, span.start)
        if probe is None:
            return False
        is_made, before = makes_device_bits(self._state, name), found[name]
        for start, stop in _stretches(self._state, name, span, is_made=is_made):
            with self._streams.on(probe.device):
                bits = self._state.read_device(name, start, stop)
            if bits is None:  # never published: the host says which
                self._forget(name)
                found[name] = before
                return False
            self._waiting.setdefault(bits.device, []).append((name, start, bits))
            self._n_made += bits.nbytes if is_made else 0
            if self._n_made > _MADE_BYTES:
                self._flush(found)
        return True

    def _forget(self, name: str) -> None:
        self._waiting = {
            device: [each for each in stretches if each[0] != name]
            for device, stretches in self._waiting.items()
        }

    def _flush(self, found: dict[str, TensorDigest]) -> None:
        for device, stretches in self._waiting.items():
            if not stretches:
                continue
            from weightwire.kernels.triton.digest import digest_all

            names, firsts, bits = zip(*stretches, strict=True)
            with self._streams.on(device):
                digests = digests_of(digest_all(bits, firsts))
            for name, digest in zip(names, digests, strict=True):
                found[name] += digest
        self._waiting, self._n_made = {}, 0


def _stretches(
    state: StateReader, name: str, span: Span, *, is_made: bool
) -> Iterator[tuple[int, int]]:
    """What is shown in place is digested in one go, what must be made in pieces."""
    size = piece_elements(state.specs[name].dtype) if is_made else max(span.stop - span.start, 1)
    for start in range(span.start, span.stop, size):
        yield start, min(start + size, span.stop)
