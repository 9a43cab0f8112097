"""Which transformers models can be published as they are, and the model inside its wrappers."""

from __future__ import annotations

from typing import Any

from weightwire.errors import UnsupportedLayout


def unwrap(model: Any) -> Any:
    """The model inside what accelerate and torch.compile wrapped around it."""
    from accelerate.utils import extract_model_from_parallel

    return extract_model_from_parallel(model, keep_torch_compile=False)


def refuse_what_is_not_whole(model: Any) -> None:
    """Refuse models whose own tensors are not the checkpoint's.

    Raises:
        UnsupportedLayout: says which kind of model, and what to use instead.
    """
    if hasattr(model, "peft_config") or getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedLayout(
            "this model has PEFT adapters: merging them for every version would round the weights that"
            " are trained. Publish the adapter alone: Publisher(store, lambda:"
            " get_peft_model_state_dict(model).items()), or merge_and_unload() before training"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedLayout("this model is quantised: train it in bf16 or fp32 to publish it")


def refuse_foreign_shards(model: Any) -> None:
    """Refuse models that are sharded in another way than FSDP2's; look at them before unwrapping.

    Raises:
        UnsupportedLayout: says by what, and what to use instead.
    """
    kind = ""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        kind = "FSDP1"
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        kind = "DeepSpeed ZeRO-3"
    if kind:
        raise UnsupportedLayout(
            f"this model is sharded by {kind}, and no rank holds a whole tensor: use FSDP2, which"
            " weightwire.trainers.sharded.ShardedPublisher publishes without gathering"
        )
