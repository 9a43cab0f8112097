"""Which tensors of the baseline stay on their device: as many as memory there allows."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from weightwire.diff.held import Held, HeldOnDevice, HeldOnHost, as_bits, as_tensor
from weightwire.diff.page_locked import page_locked
from weightwire.diff.state import StateReader, device_bits, makes_device_bits
from weightwire.digest import piece_ranges
from weightwire.kernels.devices import is_out_of_memory
from weightwire.model import Bits, TensorSpec

if TYPE_CHECKING:
    import torch

log = logging.getLogger("weightwire.publisher")

DeviceBaseline: TypeAlias = bool | int | None
"""True: on the device. False: in page-locked host memory. A number: so many bytes on devices, all of
them together, and the rest on the host. None: on the device while ``FREE_SHARE`` of it stays free."""

FREE_SHARE = 0.1
"""Of a device's memory, what a baseline leaves for what training may still come to need."""


class DeviceRoom:
    """Counts what a baseline may still take of each device's memory."""

    def __init__(self, wanted: DeviceBaseline, held: Iterable[Held] = ()) -> None:
        """Begin with what the baseline holds already."""
        self._wanted = wanted
        self._left: dict[torch.device, float] = {}
        on_devices = [each.tensor for each in held if isinstance(each, HeldOnDevice)]
        self._n_held: int = sum(tensor.numel() * tensor.element_size() for tensor in on_devices)

    def hold(self, state: StateReader, spec: TensorSpec, device: torch.device | None) -> Held:
        """A copy of a state's tensor, as near to where it is worked on as there is room for."""
        if device is None:
            return HeldOnHost(
                _copied(state, spec, np.empty(spec.n_elements, spec.dtype.bits_dtype))
            )
        if self._take(device, spec.n_bytes):
            on_device = _copied_to_device(state, spec, device)
            if on_device is not None:
                return on_device
        return HeldOnHost(
            _copied(state, spec, page_locked(spec.n_elements, spec.dtype, device)), device
        )

    def _take(self, device: torch.device, n_bytes: int) -> bool:
        if isinstance(self._wanted, bool):
            return self._wanted
        if self._wanted is not None:
            is_room = self._n_held + n_bytes <= self._wanted
            self._n_held += n_bytes if is_room else 0
            return is_room
        if device not in self._left:
            self._left[device] = _spare_bytes(device)
        is_room = n_bytes <= self._left[device]
        self._left[device] -= n_bytes if is_room else 0
        return is_room


def _spare_bytes(device: torch.device) -> float:
    if device.type != "cuda":
        return float("inf")
    import torch

    n_free, n_total = torch.cuda.mem_get_info(device)
    return float(n_free - FREE_SHARE * n_total)


def _copied_to_device(
    state: StateReader, spec: TensorSpec, device: torch.device
) -> HeldOnDevice | None:
    import torch

    kind = as_tensor(np.empty(0, spec.dtype.bits_dtype)).dtype
    try:
        tensor = torch.empty(spec.n_elements, dtype=kind, device=device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        log.warning("%r of the baseline is kept on the host: %s", spec.name, error)
        return None
    for start, stop in _ranges(state, spec):
        piece = device_bits(state, spec.name, start, stop)
        if piece is None:
            piece = as_tensor(np.array(state.read(spec.name, start, stop)))
        tensor[start:stop].copy_(piece)
    return HeldOnDevice(tensor)


def _copied(state: StateReader, spec: TensorSpec, room: Bits) -> Bits:
    for start, stop in _ranges(state, spec):
        piece = device_bits(state, spec.name, start, stop)
        if piece is None:
            room[start:stop] = state.read(spec.name, start, stop)
        elif piece.device.type == "cpu":
            room[start:stop] = as_bits(piece)
        else:
            as_tensor(room)[start:stop].copy_(piece, non_blocking=True)
    return room


def _ranges(state: StateReader, spec: TensorSpec) -> list[tuple[int, int]]:
    """A tensor that is there is copied at once; what is made or read for it comes in pieces."""
    is_there = device_bits(state, spec.name, 0, 0) is not None
    if is_there and not makes_device_bits(state, spec.name):
        return [(0, spec.n_elements)]
    return piece_ranges(spec)
