"""``vllm.LLM`` in this process: the same calls, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightwire.clock import Clock, SystemClock
from weightwire.engines.vllm.pausing import Pausing
from weightwire.engines.vllm.server import VllmServer
from weightwire.errors import EngineRefused
from weightwire.workers import InlineExecutor


class OfflineEngine(VllmServer):
    """Keeps a ``vllm.LLM`` at the version it is told. Activate between two calls of ``generate``.

    Make it with ``weight_transfer_config={"backend": "weightwire"}`` and
    ``worker_extension_cls="weightwire.engines.vllm.worker.WeightwireWorker"``.
    """

    def __init__(self, llm: Any, *, timeout_s: float = 600.0, clock: Clock | None = None) -> None:
        """Nothing is done yet."""
        self._clock = clock or SystemClock()
        self._calls = _LlmCalls(llm)
        self._pausing = Pausing(self._calls, InlineExecutor())
        self._timeout_s, self._takeover_s = timeout_s, 0.0


class _LlmCalls:
    """A server's routes as methods of ``vllm.LLM``, which generates only when it is called."""

    url = "vllm.LLM"

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def get(self, path: str, **query: object) -> Any:
        """What is asked of a server, answered from the object."""
        del query
        if path == "/is_paused":
            return {"is_paused": False}
        config = self._llm.llm_engine.vllm_config
        transfer = config.weight_transfer_config
        return {
            "vllm_config": {
                "weight_transfer_config": {"backend": transfer.backend} if transfer else None,
                "parallel_config": {
                    "worker_extension_cls": config.parallel_config.worker_extension_cls
                },
            }
        }

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: object) -> Any:
        """What a server is told, done to the object.

        Raises:
            EngineRefused: vLLM's own errors, which have no common class.
        """
        del query
        try:
            return self._do(path.removeprefix("/"), dict(body or {}))
        except Exception as error:
            raise EngineRefused(f"{self.url}{path}: {error}") from error

    def _do(self, name: str, arguments: dict[str, Any]) -> Any:
        if name == "collective_rpc":
            method, texts = arguments["method"], arguments["kwargs"]
            return {"results": self._llm.collective_rpc(method, kwargs=texts)}
        if name == "pause":
            return self._llm.reset_prefix_cache()
        if name == "resume":
            return None
        if name in {"init_weight_transfer_engine", "update_weights"}:
            return getattr(self._llm, name)(arguments)
        return getattr(self._llm, name)(**arguments)

    def close(self) -> None:
        """Nothing is open."""
