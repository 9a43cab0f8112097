"""Real vLLM servers for tests: one process tree each, on loopback, stopped whatever happens."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_S = 300.0
BACKEND = ("--weight-transfer-config", '{"backend": "weightwire"}')
EXTENSION = "weightwire.engines.vllm.worker.WeightwireWorker"


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    url: str
    model: str
    log: Path
    pid: int
    start_s: float

    def get(self, path: str) -> Any:
        """The answer to a GET."""
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def post(self, path: str, body: Any = None) -> Any:
        """The answer to a POST; an error status raises ``urllib.error.HTTPError``."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body or {}).encode(),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def rpc(self, method: str, **arguments: Any) -> list[Any]:
        """A worker's method, on every rank."""
        body = {"method": method, "kwargs": arguments}
        found = self.post("/collective_rpc", body)
        return list(found["results"]) if found else []

    def checksums(self) -> dict[str, str]:
        """SHA-256 of every runtime tensor of every rank, as vLLM computes it."""
        found = self.post("/weight_checker", {"action": "checksum"})
        return dict(found["checksums"])

    def greedy(self, prompt: list[int], n_tokens: int) -> list[int]:
        """The most likely tokens after a prompt."""
        answer = self.post(
            "/v1/completions",
            {
                "model": self.model,
                "prompt": prompt,
                "max_tokens": n_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        return list(answer["choices"][0]["token_ids"])


@contextmanager
def running(
    model: Path,
    log: Path,
    *,
    n_ranks: int = 1,
    extension: str = EXTENSION,
    arguments: tuple[str, ...] = BACKEND,
    python_path: Path | None = None,
) -> Iterator[Server]:
    """A server of a checkpoint folder, in fp32: what every CPU can do, and exact for bf16 weights."""
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--model", str(model)]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "512", "--max-num-seqs", "8", "-tp", str(n_ranks)]
    command += [*arguments, *(("--worker-extension-cls", extension) if extension else ())]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(n_ranks, python_path),
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(url, process, log)
        yield Server(url, "tiny", log, process.pid, time.monotonic() - began)
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server and every process it started: its group is its own."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(n_ranks: int, python_path: Path | None = None) -> dict[str, str]:
    """What vLLM needs to know on a small machine without a network."""
    paths = [str(python_path)] if python_path else []
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank) for rank in range(n_ranks)),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def _wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + _START_S
    while time.monotonic() < ends and process.poll() is None:
        try:
            urllib.request.urlopen(url + "/health", timeout=5).close()
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    raise RuntimeError(f"vLLM did not start; its log ends:\n{log.read_text()[-6000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
