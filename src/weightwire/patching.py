"""The calls most users need: diff, apply, merge, digest, on live tensors or on anything readable."""

from __future__ import annotations

from weightwire.apply.memory import Applied, apply
from weightwire.codec.merge import merge_states
from weightwire.codec.patch import MemoryBuckets, Patch
from weightwire.codec.writer import MemorySink
from weightwire.diff.compare import diff_states
from weightwire.diff.memory import State, open_state
from weightwire.digest import digest_state

__all__ = ["Applied", "apply", "diff", "digest", "merge"]


def diff(
    base: State, target: State, *, codec: str = "compact", n_threads: int | None = None
) -> Patch:
    """The patch that turns ``base`` into ``target``, bit for bit.

    States are mappings of names to NumPy arrays, torch tensors or DLPack objects, torch
    modules, iterables of (name, tensor), or readers such as ``weightwire.checkpoint.Checkpoint``.

    Raises:
        StopError: an element type, layout or codec that is not supported.
    """
    sink = MemorySink()
    index = diff_states(open_state(base), open_state(target), sink, codec, n_threads=n_threads)
    return Patch(index, MemoryBuckets(sink.files))


def merge(base: State | None, *patches: Patch, codec: str | None = None) -> Patch:
    """The net patch over a chain; plain patches can be merged with ``base=None``.

    Raises:
        IncompatiblePatches: not a chain, or compact patches without a base.
        BaseMismatch: not the base of the first patch.
    """
    sink = MemorySink()
    reader = None if base is None else open_state(base)
    index = merge_states(reader, patches, sink, codec)
    return Patch(index, MemoryBuckets(sink.files))


def digest(state: State) -> str:
    """A 128-bit fingerprint of a state's names, types, shapes and bits, as 32 hex digits."""
    return digest_state(open_state(state))[0]
