"""A stand-in for a model of SGLang: fused and tensor-parallel parameters, filled by ``load_weights``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

VOCABULARY, WIDTH, N_LAYERS = 64, 32, 2
_FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
_FUSED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
_BY_ROW = ("o_proj", "down_proj")


def checkpoint(seed: int = 0) -> dict[str, torch.Tensor]:
    """The whole model, in bf16, by Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).to(torch.bfloat16)

    state = {"model.embed_tokens.weight": draw(VOCABULARY, WIDTH)}
    for layer in range(N_LAYERS):
        root = f"model.layers.{layer}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            state[f"{root}.self_attn.{name}.weight"] = draw(WIDTH, WIDTH)
        for name in ("gate_proj", "up_proj"):
            state[f"{root}.mlp.{name}.weight"] = draw(2 * WIDTH, WIDTH)
        state[f"{root}.mlp.down_proj.weight"] = draw(WIDTH, 2 * WIDTH)
        state[f"{root}.norm.weight"] = draw(WIDTH)
    return state


class StandInModel(torch.nn.Module):
    """One rank's share."""

    def __init__(self, rank: int, n_ranks: int) -> None:
        super().__init__()
        self.rank, self.n_ranks = rank, n_ranks
        self._held: dict[str, torch.nn.Parameter] = {}
        self._add("model.embed_tokens.weight", VOCABULARY // n_ranks, WIDTH)
        for layer in range(N_LAYERS):
            root = f"model.layers.{layer}"
            self._add(f"{root}.self_attn.qkv_proj.weight", 3 * WIDTH // n_ranks, WIDTH)
            self._add(f"{root}.self_attn.o_proj.weight", WIDTH, WIDTH // n_ranks)
            self._add(f"{root}.mlp.gate_up_proj.weight", 4 * WIDTH // n_ranks, WIDTH)
            self._add(f"{root}.mlp.down_proj.weight", WIDTH, 2 * WIDTH // n_ranks)
            self._add(f"{root}.norm.weight", WIDTH)

    def named_parameters(
        self, *_: object, **__: object
    ) -> Iterable[tuple[str, torch.nn.Parameter]]:  # type: ignore[override]
        return iter(self._held.items())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As SGLang's models do it: by name, each rank its own share."""
        for name, tensor in weights:
            part = name.split(".")[-2]
            fused, place = _FUSED.get(part, (part, 0))
            parameter = self._held[name.replace(part, fused)].data
            if part in _BY_ROW:
                share = tensor.chunk(self.n_ranks, dim=1)[self.rank]
            elif part == "norm":
                share = tensor
            else:
                share = tensor.chunk(self.n_ranks, dim=0)[self.rank]
            parameter.narrow(0, place * share.shape[0], share.shape[0]).copy_(share)

    def sha256s(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(p.detach().view(torch.int16).numpy().tobytes()).hexdigest()
            for name, p in self._held.items()
        }

    def _add(self, name: str, *shape: int) -> None:
        self._held[name] = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
