"""The worker extension with eyes: looks at live weights when a forward pass begins and when it ends."""

from __future__ import annotations

import hashlib
import time
from typing import Any

from weightwire.engines.vllm.worker import WeightwireWorker


class ProbedWorker(WeightwireWorker):
    """Counts forward passes, those that saw weights change, and the states they saw."""

    _probe_begun = ""
    _probe_n_passes = 0
    _probe_n_torn = 0
    _probe_handles: Any = ()

    def probe_start(self) -> None:
        """Look at every forward pass from now on."""
        self.probe_stop()
        model = self._probe_model()
        self._probe_seen: list[str] = []
        self._probe_n_passes = self._probe_n_torn = 0
        self._probe_handles = (
            model.register_forward_pre_hook(self._probe_begin),
            model.register_forward_hook(self._probe_end),
        )

    def probe_stop(self) -> None:
        """Look no more."""
        for handle in self._probe_handles:
            handle.remove()
        self._probe_handles = ()

    def probe_report(self) -> dict[str, Any]:
        """What was seen."""
        return {
            "n_passes": self._probe_n_passes,
            "n_torn": self._probe_n_torn,
            "seen": self._probe_seen,
            "now": self._probe_digest(),
        }

    def probe_slow(self) -> None:
        """Take 20 ms more for every forward pass, so that a request stays in flight; until stopped."""
        model = self._probe_model()
        handle = model.register_forward_pre_hook(lambda *_: time.sleep(0.02))
        self._probe_handles = (*self._probe_handles, handle)

    def probe_damage(self) -> None:
        """Flip a bit of one live weight, as a fault in memory would."""
        import torch

        parameter = next(iter(self._probe_model().parameters()))
        parameter.data.view(torch.int32).view(-1)[7] ^= 1 << 20

    def probe_fail_activation(self) -> None:
        """Let this rank's next activation die half way, if it is rank 0."""
        engine = self.weight_transfer_engine  # type: ignore[attr-defined]
        if engine.status().rank != 0:
            return
        target = engine.receiver._target
        original = target.activate

        def fail(ready: Any) -> None:
            target.activate = original
            raise OSError("this rank's memory is read-only for a moment")

        target.activate = fail

    def _probe_begin(self, *_: Any) -> None:
        self._probe_begun = self._probe_digest()

    def _probe_end(self, *_: Any) -> None:
        ended = self._probe_digest()
        self._probe_n_passes += 1
        self._probe_n_torn += ended != self._probe_begun
        if not self._probe_seen or self._probe_seen[-1] != ended:
            self._probe_seen.append(ended)

    def _probe_digest(self) -> str:
        digest = hashlib.sha256()
        for parameter in self._probe_model().parameters():
            digest.update(parameter.detach().numpy().data)
        return digest.hexdigest()

    def _probe_model(self) -> Any:
        return self.model_runner.get_model()  # type: ignore[attr-defined]
