"""Write a language-model-like bf16 checkpoint of any size, and its next version, piece by piece.

    python benchmarks/make_checkpoint.py FOLDER --megabytes 4000

makes FOLDER/base and FOLDER/next in the form of a sharded Hugging Face checkpoint.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from weightwire.bench.generate import (
    BLOCK_ELEMENTS,
    draw_masters,
    draw_steps,
    format_of,
    random_source,
    rate_for,
    round_masters,
)
from weightwire.container import build_header
from weightwire.model import TensorSpec, dtype_named

BF16 = dtype_named("BF16")
VERSIONS = ("base", "next")
N_SHARDS = 4
VOCABULARY_PER_HIDDEN = 16
MLP_PER_HIDDEN = 3
SEED = 7


@dataclass(frozen=True)
class Shard:
    """A file of the checkpoint."""

    name: str
    specs: tuple[TensorSpec, ...]


def make_pair(folder: Path, n_bytes: int, density: float, hidden: int) -> None:
    """Write both versions; about ``density`` of the elements differ, norms not at all."""
    specs = list(plan_tensors(n_bytes, hidden))
    shards = cut_shards(specs)
    rate = rate_for(format_of(BF16), density, SEED, n_blocks=64)
    for version in VERSIONS:
        (folder / version).mkdir(parents=True)
        write_companions(folder / version, shards, hidden)
    seed = SEED
    for shard in shards:
        with ExitStack() as stack:
            files = [stack.enter_context(open_shard(folder / v, shard)) for v in VERSIONS]
            for spec in shard.specs:
                seed += 1
                write_tensor(files, spec, rate, seed)


def plan_tensors(n_bytes: int, hidden: int) -> Iterator[TensorSpec]:
    """Embedding, as many decoder layers as fit, final norm."""
    embedding = TensorSpec(
        "model.embed_tokens.weight", BF16, (VOCABULARY_PER_HIDDEN * hidden, hidden)
    )
    yield embedding
    n_left, number = n_bytes - embedding.n_bytes, 0
    while n_left > 0:
        layer = list(layer_tensors(f"model.layers.{number}", hidden))
        yield from layer
        n_left -= sum(spec.n_bytes for spec in layer)
        number += 1
    yield TensorSpec("model.norm.weight", BF16, (hidden,))


def layer_tensors(prefix: str, hidden: int) -> Iterator[TensorSpec]:
    """The tensors of one decoder layer."""
    wide = MLP_PER_HIDDEN * hidden
    shapes = {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, wide),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_proj": (hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden),
    }
    for name, shape in shapes.items():
        yield TensorSpec(f"{prefix}.{name}.weight", BF16, shape)


def cut_shards(specs: list[TensorSpec]) -> list[Shard]:
    """Spread the tensors over files of about the same size."""
    each = sum(spec.n_bytes for spec in specs) / N_SHARDS
    groups: list[list[TensorSpec]] = [[] for _ in range(N_SHARDS)]
    n_before = 0
    for spec in specs:
        groups[min(int(n_before / each), N_SHARDS - 1)].append(spec)
        n_before += spec.n_bytes
    groups = [group for group in groups if group]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, start=1)
    ]


def write_companions(folder: Path, shards: list[Shard], hidden: int) -> None:
    """The index and a configuration."""
    weight_map = {spec.name: shard.name for shard in shards for spec in shard.specs}
    total = sum(spec.n_bytes for shard in shards for spec in shard.specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {"hidden_size": hidden, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def open_shard(folder: Path, shard: Shard) -> BinaryIO:
    """A new file with its header written."""
    stream = (folder / shard.name).open("xb")
    stream.write(build_header(list(shard.specs), {"format": "pt"}))
    return stream


def write_tensor(files: list[BinaryIO], spec: TensorSpec, rate: float, seed: int) -> None:
    """A tensor's bits in both versions, a block at a time; norms are ones and stay so."""
    if len(spec.shape) == 1:
        ones = np.full(spec.n_elements, 0x3F80, BF16.bits_dtype).tobytes()
        for stream in files:
            stream.write(ones)
        return
    form = format_of(BF16)
    for index, start in enumerate(range(0, spec.n_elements, BLOCK_ELEMENTS)):
        source = random_source(seed, index)
        n_elements = min(BLOCK_ELEMENTS, spec.n_elements - start)
        masters = draw_masters(source, n_elements, form)
        files[0].write(round_masters(masters, form).tobytes())
        masters += draw_steps(source, n_elements, rate)
        files[1].write(round_masters(masters, form).tobytes())


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=4000)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--hidden", type=int, default=2048)
    options = parser.parse_args()
    make_pair(options.folder, options.megabytes * 10**6, options.density, options.hidden)


if __name__ == "__main__":
    main()
