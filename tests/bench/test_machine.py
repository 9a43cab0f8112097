"""A report names the GPU that Weightwire's kernels reach, and says nothing where there is none."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from weightwire.bench.machine import Gpu, describe_machine


def torch_with(n_gpus: int) -> SimpleNamespace:
    """As much of torch as a description asks."""
    cuda = SimpleNamespace(is_available=lambda: n_gpus > 0, get_device_name=lambda: "A Fine GPU")
    return SimpleNamespace(__version__="2.11.0", cuda=cuda)


@pytest.fixture(autouse=True)
def some_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is all that is asked of it."""
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr("weightwire.kernels.devices.is_ready", lambda: True)


def test_a_gpu_is_found_and_the_backend_is_still_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_with(n_gpus=1))
    machine = describe_machine(2)
    assert machine.gpu == Gpu("A Fine GPU", "2.11.0", "3.6.0")
    assert machine.backend == "native"


@pytest.mark.parametrize("torch", [torch_with(n_gpus=0), None], ids=["no GPU", "no torch"])
def test_without_a_gpu_or_torch_none_is_found(
    torch: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert describe_machine(2).gpu is None
