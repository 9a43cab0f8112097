"""A rank whose shard is on a device publishes what it would publish from the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from spread_states import Cluster, received, shards_of

from sample_training import bits_of, train, weights
from weightwire.diff.device_room import DeviceBaseline
from weightwire.diff.held import HeldOnDevice
from weightwire.diff.views import as_torch, view_tensor
from weightwire.store.memory import MemoryStore

pytest.importorskip("triton", reason="GPU kernels need triton")

from weightwire.codec import device_pieces


def on_device(state: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in state.items():
        view = view_tensor(name, tensor)
        found[name] = as_torch(view.array.copy(), view.spec.dtype).to(device)
    return found


@pytest.mark.parametrize("device_baseline", [True, False])
def test_a_shard_on_a_device_is_coded_there_beside_one_on_the_host(
    device_baseline: DeviceBaseline, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank on a device and one not: Triton's interpreter runs in one thread at a time."""
    encode, sizes = device_pieces.encode_pieces, []

    def counted(olds: Any, *others: Any, **options: Any) -> Any:
        sizes.append([old.numel() for old in olds])
        return encode(olds, *others, **options)

    monkeypatch.setattr(device_pieces, "encode_pieces", counted)
    store, state = MemoryStore(), weights(n_elements=400)
    cluster = Cluster(store, state, 2, codec="plain", device_baseline=device_baseline)
    cluster.publishers[1]._state = lambda: shards_of(on_device(state, device), cluster.cuts, 1)
    for step in range(3):
        cluster.published()
        assert received(store) == bits_of(state)
        train(state, step)
    held = cluster.publishers[1]._baseline._held["mlp"]
    assert isinstance(held, HeldOnDevice) == device_baseline
    cluster.close()
    assert sizes == [[200], [200], [8]] * 2
