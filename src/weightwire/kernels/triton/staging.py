"""Page-locked memory to go through, kept: to lock pages takes longer than to copy what they hold."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

_kept = threading.local()


def to_host(tensor: torch.Tensor) -> Any:
    """A copy as an array; waits for this stream and no other."""
    if tensor.device.type == "cpu":
        return tensor.numpy()
    n_bytes = tensor.numel() * tensor.element_size()
    through = _page_locked("to host", n_bytes)[:n_bytes].view(tensor.dtype).view(tensor.shape)
    through.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return through.clone().numpy()


def send_joined(parts: Sequence[Any], device: torch.device) -> tuple[torch.Tensor, Any]:
    """32-bit words end to end: on the device as int32, and as they are on the host until the next time."""
    tensors = [torch.from_numpy(part.view(np.int32)) for part in parts]
    if device.type == "cpu":
        joined = torch.cat(tensors)
        return joined, joined.numpy().view(np.uint32)
    _await_last_sent()
    n_words = sum(len(tensor) for tensor in tensors)
    joined = _page_locked("to device", 4 * n_words)[: 4 * n_words].view(torch.int32)
    torch.cat(tensors, out=joined)
    sent = joined.to(device, non_blocking=True)
    _kept.last_sent = torch.cuda.Event()
    _kept.last_sent.record(torch.cuda.current_stream(device))
    return sent, joined.numpy().view(np.uint32)


def _await_last_sent() -> None:
    """What is still on its way must not be overwritten."""
    last_sent = getattr(_kept, "last_sent", None)
    if last_sent is not None:
        last_sent.synchronize()


def _page_locked(name: str, n_bytes: int) -> torch.Tensor:
    """This thread's own, of at least this size."""
    held: dict[str, torch.Tensor] = _kept.__dict__.setdefault("memory", {})
    if name not in held or len(held[name]) < n_bytes:
        held.pop(name, None)
        size = 1 << max(n_bytes - 1, 1 << 20).bit_length()
        held[name] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return held[name]
