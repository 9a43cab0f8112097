"""What an activation writes on devices: made ready while the engine serves, then only launched."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from weightwire.apply.device_stream import SideStreams

if TYPE_CHECKING:
    import torch

    from weightwire.kernels.triton.scatter import Scatter, Write

    NamedWrite: TypeAlias = tuple[str, Write]
    """A write, and what a message calls the memory it goes to."""


@dataclass(frozen=True)
class DeviceWrites:
    """One launch for each device and element size; allocates nothing, waits for nothing.

    Whoever calls ``write`` waits for the devices before and after: see ``device_stream.settle``.
    """

    scatters: tuple[Scatter, ...] = ()
    owners: tuple[tuple[str, ...], ...] = ()
    """Whose memory each write of each scatter goes to."""

    @property
    def devices(self) -> frozenset[torch.device]:
        """Where it writes."""
        return frozenset(scatter.device for scatter in self.scatters)

    def write(self) -> None:
        """Overwrite; safe to repeat."""
        if self.scatters:
            from weightwire.kernels.triton.scatter import write

            for scatter in self.scatters:
                write(scatter)

    def first_wrong(self) -> str | None:
        """Read back, beside the engine's work: the first owner whose memory holds something else."""
        for scatter, owners in zip(self.scatters, self.owners, strict=True):
            with SideStreams().on(scatter.device):
                counts = _mismatches(scatter)
            wrong = [owner for owner, n in zip(owners, counts, strict=True) if n]
            if wrong:
                return wrong[0]
        return None


def prepare_writes(writes: Iterable[NamedWrite]) -> DeviceWrites:
    """Check writes and bring all that launching them needs to their devices.

    Raises:
        StopError: a position past its memory's end.
    """
    by_device: dict[torch.device, list[NamedWrite]] = {}
    for owner, write in writes:
        by_device.setdefault(write[0].device, []).append((owner, write))
    if not by_device:
        return DeviceWrites()
    from weightwire.kernels.triton.scatter import prepare_scatter

    streams, scatters = SideStreams(), []
    for device, found in by_device.items():
        with streams.on(device):
            scatters.append(prepare_scatter([write for _, write in found]))
    streams.wait()
    owners = tuple(tuple(owner for owner, _ in found) for found in by_device.values())
    return DeviceWrites(tuple(scatters), owners)


def _mismatches(scatter: Scatter) -> list[int]:
    from weightwire.kernels.triton.scatter import matches

    counts: list[int] = matches(scatter).tolist()
    return counts
