"""Rollouts by a real vLLM server, one per worker, synced through Weightwire's vLLM integration."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weightwire.clock import Clock
from weightwire.demo.engine import Answers, Order, Proof
from weightwire.demo.receiving import Patience, Received
from weightwire.demo.settings import Settings
from weightwire.engines.vllm.server import VllmServer
from weightwire.errors import EngineUnavailable, ExtraMissing
from weightwire.store.run import find_identity

_START_S = 300.0
_ANSWER_S = 300.0
_NAME = "policy"


class VllmEngine:
    """A server in a process of its own; it starts with random weights, so all it knows came by sync."""

    def __init__(self, settings: Settings, worker: int, clock: Clock) -> None:
        """Start it, and wait until it answers.

        Raises:
            ExtraMissing: vLLM is not installed.
            EngineUnavailable: it does not start; the message has the end of its log.
        """
        if find_spec("vllm") is None:
            raise ExtraMissing("--engine vllm needs vLLM: pip install vllm")
        self._settings, self._worker, self._clock = settings, worker, clock
        self._url = f"http://127.0.0.1:{_free_port()}"
        self._process = _launch(settings, worker, self._url)
        self._wait_until_up()
        self._server = VllmServer(self._url)
        self._staging = ThreadPoolExecutor(1, "stage")
        self._coming: Future[None] | None = None
        self._is_connected = False
        self._version, self._digest = -1, ""

    def expect(self, version: int) -> None:
        """Have every rank stage it while requests run."""
        if self._coming is None:
            self._coming = self._staging.submit(self._stage, version)

    def take(self, version: int) -> Received:
        """Pause the server, activate, and wait until it has read back what it wrote.

        Raises:
            WeightwireError: whatever the server ran into.
        """
        self.expect(version)
        if self._coming is not None:
            self._coming.result()
        self._coming = None
        pause = self._server.activate(version)
        checked = self._server.wait_checked()
        self._version, self._digest = version, checked.ranks[0].digest
        return Received(pause.n_bytes, pause.stage_s, 0.0, pause.total_s, was_whole=version == 0)

    def prove(self) -> Proof:
        """Have every rank read its live weights from scratch; theirs is the digest, or it raises.

        Raises:
            TargetMismatch: they hold something else.
            WeightwireError: whatever the server ran into.
        """
        self._server.prove(self._version, self._digest)
        return Proof(self._digest, is_exact=True)

    def sample(self, orders: Sequence[Order]) -> list[Answers]:
        """One request per prompt, all at once: the server batches them."""
        with ThreadPoolExecutor(len(orders)) as pool:
            return list(pool.map(self._ask, orders))

    def close(self) -> None:
        """End the server."""
        self._staging.shutdown(wait=False, cancel_futures=True)
        self._server.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _stage(self, version: int) -> None:
        patience = Patience(self._clock)
        store = self._settings.open("patches", for_worker=True)
        key = f"log/{version:012d}-commit.json"
        while find_identity(store) is None or not any(store.list(key)):
            patience.wait()
        if not self._is_connected:
            options = self._settings.worker_options
            url = self._settings.run_url("patches")
            self._server.connect(
                url, worker=f"worker-{self._worker}", options=options, update=False
            )
            self._is_connected = True
        self._server.stage(version)
        self._server.wait_staged(version)

    def _ask(self, order: Order) -> Answers:
        body = {
            "model": _NAME,
            "prompt": order.prompt_ids,
            "n": order.n_answers,
            "max_tokens": order.n_tokens,
            "temperature": 1.0,
            "seed": order.seed % (1 << 31),
            "logprobs": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        choices = self._post("/v1/completions", body)["choices"]
        choices = sorted(choices, key=lambda choice: int(choice["index"]))
        return Answers(
            [list(choice["token_ids"]) for choice in choices],
            [list(choice["logprobs"]["token_logprobs"]) for choice in choices],
        )

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                return json.load(answer)
        except (OSError, urllib.error.URLError) as error:
            raise EngineUnavailable(f"{self._url}{path}: {error}") from error

    def _wait_until_up(self) -> None:
        ends = self._clock.monotonic() + _START_S
        while self._clock.monotonic() < ends and self._process.poll() is None:
            try:
                urllib.request.urlopen(self._url + "/health", timeout=5).close()
                return
            except OSError:
                self._clock.sleep(0.2)
        log = _log_of(self._settings, self._worker).read_text(errors="replace")
        raise EngineUnavailable(f"vLLM did not start; its log ends:\n{log[-2000:]}")


def _launch(settings: Settings, worker: int, url: str) -> subprocess.Popen[bytes]:
    """In fp32, which holds bf16 weights exactly and which every CPU can do."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    command += ["--model", str(settings.model_folder), "--served-model-name", _NAME]
    command += ["--load-format", "dummy", "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "64", "--max-num-seqs", "64"]
    command += ["--weight-transfer-config", '{"backend": "weightwire"}']
    command += ["--worker-extension-cls", "weightwire.engines.vllm.worker.WeightwireWorker"]
    cores = os.cpu_count() or 1
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str((worker + 1) % cores),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with _log_of(settings, worker).open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )


def _log_of(settings: Settings, worker: int) -> Path:
    return Path(settings.folder) / f"vllm-{worker}.log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
