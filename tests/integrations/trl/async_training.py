"""What ``AsyncGRPOTrainer`` takes for granted and a CPU does not have: FLOPs tables and FlashAttention."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from tiny_models import Shape, new_model, save
from torch.nn import functional
from transformers import AutoTokenizer


def make_checkpoint(folder: Path) -> Path:
    """A tiny model with a chat template that TRL knows."""
    save(new_model(Shape()), folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text()
    tokenizer.save_pretrained(folder)
    return folder


def run_on_cpu(patch: pytest.MonkeyPatch) -> None:
    """Replace the two calls that need CUDA; everything else is TRL's own."""
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    patch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    kernel = SimpleNamespace(flash_attn_varlen_func=attend)
    patch.setattr(packing, "_flash_attn", lambda: kernel)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    *_: int,
    softmax_scale: float | None = None,
    **__: Any,
) -> torch.Tensor:
    """Attention of packed sequences, one after another; the last query sees the last key."""
    bounds = zip(
        query_starts.tolist(),
        query_starts[1:].tolist(),
        key_starts.tolist(),
        key_starts[1:].tolist(),
        strict=False,
    )
    parts = []
    for first, last, key_first, key_last in bounds:
        n_queries, n_keys = last - first, key_last - key_first
        mask = torch.ones(n_queries, n_keys, dtype=torch.bool).tril(n_keys - n_queries)
        parts.append(
            functional.scaled_dot_product_attention(
                query[first:last].transpose(0, 1),
                key[key_first:key_last].transpose(0, 1),
                value[key_first:key_last].transpose(0, 1),
                attn_mask=mask,
                scale=softmax_scale,
                enable_gqa=True,
            ).transpose(0, 1)
        )
    return torch.cat(parts)
