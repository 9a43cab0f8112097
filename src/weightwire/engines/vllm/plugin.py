"""The entry point in group ``vllm.general_plugins``: vLLM calls ``register`` in each of its processes.

It runs in every vLLM of the environment, whether that uses Weightwire or not: it must be quick,
may be called twice, and must not change or break anything for those who do not ask for it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

BACKEND = "weightwire"
"""``--weight-transfer-config '{"backend": "weightwire"}'``"""

_MATRIX = 2

log = logging.getLogger("weightwire.vllm")


def register() -> None:
    """Make the backend known, and keep weights patchable on CPUs for servers that use it."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

        if BACKEND not in Factory._registry:
            Factory.register_engine(BACKEND, "weightwire.engines.vllm.engine", "WeightwireEngine")
        _keep_linear_weights_alive()
    except Exception as error:
        # Whoever asks this vLLM for the backend is told by vLLM that there is none such.
        log.info("this vLLM has no weight-transfer backends that Weightwire knows: %r", error)


def _keep_linear_weights_alive() -> None:
    """On CPUs vLLM repacks Linear weights when it loads them; servers that use us keep them plain.

    A packed copy would go on serving the old version after the weight was patched. The choice is
    made per layer at load, so it is there that we look whether this server uses the backend.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils as layers

    original = layers.dispatch_cpu_unquantized_gemm
    if hasattr(original, "is_weightwire"):
        return

    @functools.wraps(original)
    def dispatch(layer: Any, remove_weight: bool) -> None:
        if _is_asked_for() and layer.weight.ndim == _MATRIX:
            layer.cpu_linear = _plain_linear()
        else:
            original(layer, remove_weight)

    dispatch.is_weightwire = True  # type: ignore[attr-defined]
    layers.dispatch_cpu_unquantized_gemm = dispatch


def _plain_linear() -> Any:
    from torch.nn.functional import linear

    return linear


def _is_asked_for() -> bool:
    """Whether the server whose model is being loaded uses this backend."""
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    transfer = getattr(config, "weight_transfer_config", None)
    return getattr(transfer, "backend", None) == BACKEND
