"""Tiny real models for the integration tests: made on the spot, trained for real, saved as bf16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
"""256 bytes, three marks, and spare tokens up to a number that two ranks can share."""
_MARKS = ("<bos>", "<eos>", "<pad>")


@dataclass(frozen=True)
class Shape:
    """What kind of model; the head size is 32 at least, because vLLM's CPU attention asks for it."""

    family: str = "qwen3"
    is_tied: bool = True
    hidden: int = 128
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    vocabulary: int = VOCABULARY


def new_model(shape: Shape, *, seed: int = 0) -> Any:
    """A fresh fp32 model with random weights, the same for the same seed."""
    import transformers

    prefix = {"qwen3": "Qwen3", "llama": "Llama"}[shape.family]
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 2,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        head_dim=shape.hidden // shape.n_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=shape.is_tied,
        initializer_range=0.1,  # enough that greedy tokens depend on every layer
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    torch.manual_seed(seed)
    return getattr(transformers, f"{prefix}ForCausalLM")(config).float()


def save(model: Any, folder: Path) -> Path:
    """The checkpoint any engine loads: bf16 weights, config and tokenizer."""
    import copy

    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder, model.config.vocab_size)
    return folder


def save_tokenizer(folder: Path, n_tokens: int = VOCABULARY) -> None:
    """One token per byte, made here: nothing is fetched from anywhere."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    spare = [f"<spare-{index}>" for index in range(len(letters) + len(_MARKS), n_tokens)]
    vocabulary = {token: index for index, token in enumerate([*letters, *_MARKS, *spare])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bos, eos, pad = _MARKS
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad
    ).save_pretrained(folder)


def as_bf16(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What is published: the fp32 masters rounded to bf16, tied tensors once."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach().to(torch.bfloat16)


class Training:
    """A model that takes real AdamW steps, at a learning rate as in RL: few bf16 weights move."""

    def __init__(self, model: Any, *, learning_rate: float = 1e-6, seed: int = 0) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self._chance = torch.Generator().manual_seed(seed)

    def step(self) -> float:
        """One step on random tokens; gives the loss."""
        size = self.model.config.vocab_size
        tokens = torch.randint(0, min(size, 256), (4, 48), generator=self._chance)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """For ``weightwire.Publisher``: a callable that gives the weights anew each time."""
        return as_bf16(self.model)


def file_names_of(folder: Path) -> list[str]:
    """The tensors of a checkpoint folder, from its safetensors headers."""
    names: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            n_bytes = int.from_bytes(opened.read(8), "little")
            names += [name for name in json.loads(opened.read(n_bytes)) if name != "__metadata__"]
    return names
