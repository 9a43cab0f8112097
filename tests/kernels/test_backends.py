"""Choosing a backend: forced, by environment, never silently another one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import weightwire as ww
from weightwire.errors import BackendMissing
from weightwire.kernels import kernels
from weightwire.kernels.devices import once


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about the host's backends, also where there is a GPU."""
    monkeypatch.setitem(sys.modules, "torch", torch_that_sees(n_gpus=0))


def torch_that_sees(n_gpus: int) -> SimpleNamespace:
    """As much of torch as the naming of backends asks."""
    return SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: n_gpus > 0))


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_both_backends_load_here() -> None:
    assert ww.available_backends() == ["native", "reference"]
    assert ww.backend() == "native"


def test_forced_backend_is_used_until_it_is_freed() -> None:
    ww.use_backend("reference")
    try:
        assert ww.backend() == "reference"
    finally:
        ww.use_backend(None)
    assert ww.backend() == "native"


@pytest.mark.parametrize("host", ["native", "reference"])
def test_a_gpu_that_kernels_reach_is_named_beside_the_hosts_backend(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_that_sees(n_gpus=1))
    monkeypatch.setattr("weightwire.kernels.devices.is_ready", lambda: True)
    ww.use_backend(host)
    try:
        assert ww.backend() == f"{host}+triton"
        assert kernels().name == host
    finally:
        ww.use_backend(None)


def test_a_gpu_without_triton_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_that_sees(n_gpus=1))
    monkeypatch.setattr("weightwire.kernels.devices.is_ready", lambda: False)
    assert ww.backend() == "native"


def test_asking_for_the_backend_loads_neither_torch_nor_triton() -> None:
    found = run_python(
        "import sys, weightwire; print(weightwire.backend(), {'torch', 'triton'} & {*sys.modules})"
    )
    assert found.stdout == "native set()\n"


@pytest.mark.parametrize("name", ["triton", "", "Native"])
def test_missing_backend_is_an_error(name: str) -> None:
    with pytest.raises(BackendMissing, match="choose one of"):
        ww.use_backend(name)
    assert ww.backend() == "native"


def test_environment_forces_a_backend() -> None:
    found = run_python(
        "import weightwire; print(weightwire.backend())", WEIGHTWIRE_BACKEND="reference"
    )
    assert found.stdout == "reference\n"


def test_missing_backend_in_the_environment_is_an_error() -> None:
    code = "import weightwire as ww, numpy as np; ww.digest({'a': np.zeros(3)})"
    found = run_python(code, WEIGHTWIRE_BACKEND="cuda")
    assert found.returncode == 1
    assert "BackendMissing" in found.stderr


def test_native_backend_that_does_not_load_is_an_error_and_not_the_slow_one() -> None:
    code = (
        "import sys; sys.modules['weightwire._native'] = None\n"
        "import weightwire as ww, numpy as np\n"
        "assert ww.available_backends() == ['reference']\n"
        "ww.digest({'a': np.zeros(3)})"
    )
    found = run_python(code)
    assert found.returncode == 1
    assert "BackendMissing" in found.stderr


def test_two_threads_that_are_first_at_the_same_time_get_the_same_thing() -> None:
    both_are_here = threading.Barrier(2)
    made: list[object] = []

    @once
    def make(name: str) -> object:
        del name
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    def ask(_: int) -> object:
        both_are_here.wait(10)
        return make("a")

    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(ask, range(2))
    assert one is other
    assert len(made) == 1
    assert make("b") is not one
