"""The files beside a transformers model's weights, so that an anchor is a folder any engine loads."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

log = logging.getLogger("weightwire.trainers")

_CONFIG_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def save_companions(folder: Path, model: Any, processing_class: Any, dtype: str | None) -> None:
    """Write config, generation config and tokenizer files; the config names the published type.

    The model's own config is left alone: it says what the trainer trains in.
    """
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = _CONFIG_NAMES.get(dtype, dtype) if dtype else str(model.dtype).split(".")[1]
    config.save_pretrained(folder)
    _save_generation_config(folder, model)
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(folder)


def _save_generation_config(folder: Path, model: Any) -> None:
    """transformers refuses to save some settings it accepts; an anchor is complete without them."""
    if getattr(model, "generation_config", None) is None:
        return
    try:
        model.generation_config.save_pretrained(folder)
    except ValueError as error:
        log.warning("anchors get no generation_config.json: %s", error)
