"""Small engines whose loaders do what real ones do, and trainers that publish for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from sample_training import inline
from weightwire.apply.layouts.target import LayoutTarget
from weightwire.publisher import Publisher
from weightwire.store.memory import MemoryStore
from weightwire.subscriber import Subscriber

Checkpoint = dict[str, torch.Tensor]
N_VOCAB, N_HIDDEN, N_HEADS, N_KV, N_HEAD, N_MLP, N_EXPERTS = 37, 12, 4, 2, 6, 16, 3


def checkpoint(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Checkpoint:
    """A tiny model of one layer, by Hugging Face's names."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=source) * 0.02).to(dtype)

    q, kv = N_HEADS * N_HEAD, N_KV * N_HEAD
    tensors = {
        "model.embed_tokens.weight": draw(N_VOCAB, N_HIDDEN),
        "layer.q_proj.weight": draw(q, N_HIDDEN),
        "layer.k_proj.weight": draw(kv, N_HIDDEN),
        "layer.v_proj.weight": draw(kv, N_HIDDEN),
        "layer.o_proj.weight": draw(N_HIDDEN, q),
        "layer.gate_proj.weight": draw(N_MLP, N_HIDDEN),
        "layer.up_proj.weight": draw(N_MLP, N_HIDDEN),
        "layer.down_proj.weight": draw(N_HIDDEN, N_MLP),
        "layer.norm.weight": draw(N_HIDDEN),
        "layer.scale": draw(1),
        "layer.rotary.inv_freq": draw(4),
    }
    for expert in range(N_EXPERTS):
        tensors[f"experts.{expert}.gate"] = draw(N_MLP, N_HIDDEN)
        tensors[f"experts.{expert}.up"] = draw(N_MLP, N_HIDDEN)
        tensors[f"experts.{expert}.down"] = draw(N_HIDDEN, N_MLP)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def train(tensors: Checkpoint, seed: int, share: float = 0.05) -> None:
    """One optimizer step, in place: some bits move."""
    source = torch.Generator().manual_seed(1000 + seed)
    seen = set()
    for tensor in tensors.values():
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        bits = tensor.view(-1).view(
            {2: torch.int16, 4: torch.int32, 1: torch.uint8}[tensor.itemsize]
        )
        places = torch.randperm(bits.numel(), generator=source)[: max(1, int(share * bits.numel()))]
        bits[places] += 1


class Engine(nn.Module):
    """Fused qkv and gate_up, row and column shards, padded vocabulary, stacked experts."""

    def __init__(
        self,
        rank: int = 0,
        n_ranks: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        *,
        ties_head: bool = True,
    ) -> None:
        super().__init__()
        self.rank, self.n_ranks = rank, n_ranks
        q, kv = N_HEADS * N_HEAD // n_ranks, N_KV * N_HEAD // n_ranks
        n_padded = 64 // n_ranks
        self.sizes = (q, kv, kv)

        def make(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, 7.0, dtype=dtype), requires_grad=False)

        self.embed = make(n_padded, N_HIDDEN)
        self.head = self.embed if ties_head else make(n_padded, N_HIDDEN)
        self.qkv = make(q + 2 * kv, N_HIDDEN)
        self.o = make(N_HIDDEN, q)
        self.gate_up = make(2 * N_MLP // n_ranks, N_HIDDEN)
        self.down = make(N_HIDDEN, N_MLP // n_ranks)
        self.norm = make(N_HIDDEN)
        self.scale = make(N_MLP)
        self.w13 = make(N_EXPERTS, N_HIDDEN, 2 * N_MLP // n_ranks)
        self.w2 = make(N_EXPERTS, N_MLP // n_ranks, N_HIDDEN)
        self.register_buffer("cache", torch.full((5,), 3.0))

    def load_weights(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """The loader: as engines write theirs."""
        loaded = set()
        for name, tensor in pairs:
            *_, kind = name.removesuffix(".weight").split(".")
            if name.startswith("experts."):
                self._load_expert(int(name.split(".")[1]), kind, tensor)
            elif kind in ("q_proj", "k_proj", "v_proj"):
                self._load_fused(self.qkv, tensor, "qkv".index(kind[0]), self.sizes)
            elif kind in ("gate_proj", "up_proj"):
                sizes = (N_MLP // self.n_ranks,) * 2
                self._load_fused(self.gate_up, tensor, int(kind == "up_proj"), sizes)
            elif kind in ("o_proj", "down_proj"):
                self._load_rows({"o_proj": self.o, "down_proj": self.down}[kind], tensor)
            elif kind in ("embed_tokens", "lm_head"):
                if kind == "lm_head" and self.head is self.embed:
                    continue
                self._load_vocabulary(self.embed if kind == "embed_tokens" else self.head, tensor)
            elif kind == "norm":
                self.norm.data.copy_(tensor)
            elif kind == "scale":
                self.scale.data.fill_(tensor.item())
            loaded.add(name)
        return loaded

    def _load_fused(
        self, param: nn.Parameter, tensor: torch.Tensor, number: int, sizes: tuple[int, ...]
    ) -> None:
        room = param.data.narrow(0, sum(sizes[:number]), sizes[number])
        shard = tensor.narrow(0, self.rank * sizes[number], sizes[number])
        assert room.shape == shard.shape
        room.copy_(shard)

    def _load_rows(self, param: nn.Parameter, tensor: torch.Tensor) -> None:
        n = param.shape[1]
        param.data.copy_(tensor.narrow(1, self.rank * n, n))

    def _load_vocabulary(self, param: nn.Parameter, tensor: torch.Tensor) -> None:
        first = self.rank * param.shape[0]
        shard = tensor[first : first + param.shape[0]]
        param[: len(shard)].data.copy_(shard)
        param[len(shard) :].data.fill_(0)

    def _load_expert(self, expert: int, kind: str, tensor: torch.Tensor) -> None:
        n = N_MLP // self.n_ranks
        if kind == "down":
            self.w2.data[expert] = tensor.narrow(1, self.rank * n, n).t()
            return
        shard = tensor.to(self.w13.dtype).chunk(self.n_ranks, dim=0)[self.rank].t().contiguous()
        first = 0 if kind == "gate" else n
        self.w13.data[expert][:, first : first + n] = shard

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the engine serves from."""
        yield from self.named_parameters(remove_duplicate=False)
        yield from self.named_buffers()


def bits_in(engine: nn.Module) -> dict[str, bytes]:
    """Every parameter and buffer, bit for bit."""
    return {
        name: tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        for name, tensor in (*engine.named_parameters(), *engine.named_buffers())
    }


def loaded(engine: Engine, tensors: Checkpoint) -> dict[str, bytes]:
    """What a fresh engine holds after its own loader really ran."""
    fresh = Engine(
        engine.rank,
        engine.n_ranks,
        engine.norm.dtype,
        ties_head=engine.head is engine.embed,
    )
    fresh.load_weights(iter(tensors.items()))
    return bits_in(fresh)


class Training:
    """A trainer, its store, and receivers on demand."""

    def __init__(self, tensors: Checkpoint | None = None, **options: object) -> None:
        self.store = MemoryStore()
        self.tensors = checkpoint() if tensors is None else tensors
        self.publisher = Publisher(self.store, self.tensors, background=inline, **options)  # type: ignore[arg-type]
        self.publisher.publish().result()
        self.n_steps = 0

    def step(self, n: int = 1) -> None:
        for _ in range(n):
            self.n_steps += 1
            train(self.tensors, self.n_steps)
            self.publisher.publish().result()

    def follow(self, engine: Engine, **options: object) -> tuple[Subscriber, LayoutTarget]:
        target = LayoutTarget(engine.load_weights, engine.tensors)
        subscriber = Subscriber(self.store, target, background=inline, **options)  # type: ignore[arg-type]
        return subscriber, target
