"""Weightwire in one minute: two versions of a checkpoint, a patch between them, proof that it is exact.

    python examples/demo.py [FOLDER]        FOLDER is ./demo-output unless given, and is emptied first

Makes a sharded bf16 checkpoint of a small language model and the next version of it, as one optimizer
step leaves it; runs ``weightwire diff``, ``inspect``, ``apply`` and ``verify``; compares the SHA-256 of
every file; and shows what six published encodings need for the same change. Then a trainer publishes
versions into a local folder and two ``weightwire follow`` processes keep up, one of them killed half way.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from run_demo import show_run

from weightwire import Patch
from weightwire.bench.generate import Pair, generate_pair
from weightwire.bench.sliced import published_contenders
from weightwire.container import build_header
from weightwire.model import Bits, TensorSpec, dtype_named

BF16 = dtype_named("BF16")
HIDDEN, INTERMEDIATE, KV, LAYERS, VOCAB = 1024, 2560, 512, 8, 24_576
DENSITY = 0.01
"""One weight in a hundred changes: a usual step of reinforcement learning at a rate of 1e-6."""
SHARD_BYTES = 100_000_000
SEED = 20_260
BAR_CELLS = 24
CONSOLE = Console(width=min(Console().width, 110) if Console().is_terminal else 110)


@dataclass(frozen=True)
class Version:
    """One version of the model: every tensor's spec and bits."""

    specs: tuple[TensorSpec, ...]
    bits: tuple[Bits, ...]


def main() -> None:
    """Run the demo and leave its files to look at."""
    began = time.perf_counter()
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-output")
    prepare(root)
    old, new = root / "step-1", root / "step-2"
    patch, applied = root / "step-2.patch", root / "step-2-applied"

    say("1. Two versions of a checkpoint, one optimizer step apart")
    before, after = make_versions()
    write_checkpoint(old, before)
    write_checkpoint(new, after)
    show_checkpoint(old)

    say("2. The patch between them")
    weightwire("diff", old, new, "-o", patch)

    say("3. What is in it")
    weightwire("inspect", patch, "--top", "8")

    say("4. Applied to the old version, it gives the new one")
    weightwire("apply", old, patch, "-o", applied)
    weightwire("verify", applied, patch)
    n_files = compare(new, applied)

    say("5. The same change in published encodings")
    show_sizes(before, after, Patch.load(patch))

    say("6. A trainer publishes, two engines follow, one is killed and comes back")
    show_run(CONSOLE, root)
    weightwire("log", root / "run", "--limit", "4")
    weightwire("verify", root / "run")
    CONSOLE.print()
    CONSOLE.print(
        f"[bold green]✔ Bit for bit the same:[/] {n_files} files with equal SHA-256,"
        f" in {time.perf_counter() - began:.0f} s. The files are in {root}/."
    )


def prepare(root: Path) -> None:
    """An empty folder; one that this demo did not make is never removed."""
    marker = root / ".weightwire-demo"
    if root.exists() and not marker.exists():
        raise SystemExit(f"{root} exists and was not made by this demo; name another folder")
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    marker.touch()


def say(title: str) -> None:
    """A heading."""
    CONSOLE.print()
    CONSOLE.print(Rule(Text(title, style="bold"), align="left", style="cyan"))


def weightwire(*arguments: object) -> None:
    """Run the command line as a user would, and stop if it fails."""
    texts = [str(argument) for argument in arguments]
    CONSOLE.print(f"[bold cyan]$[/] [bold]weightwire {' '.join(texts)}[/]", highlight=False)
    beside = Path(sys.executable).with_name("weightwire")
    program = str(beside) if beside.exists() else "weightwire"
    sys.stdout.flush()
    done = subprocess.run([program, *texts], check=False)
    if done.returncode:
        raise SystemExit(f"weightwire {texts[0]} failed with exit code {done.returncode}")


# --------------------------------------------------------------------------------- the checkpoints


def layout() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a small language model, in the usual order."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", (KV, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", (KV, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
    yield "model.norm.weight", (HIDDEN,)


def make_versions() -> tuple[Version, Version]:
    """fp32 masters, rounded to bf16 before and after a step of about the learning rate."""
    specs = tuple(TensorSpec(name, BF16, shape) for name, shape in layout())
    n_matrix = sum(spec.n_elements for spec in specs if len(spec.shape) == 2)
    pair = generate_pair(n_matrix, BF16, DENSITY, SEED)
    olds, news, at = [], [], 0
    for spec in specs:
        if len(spec.shape) == 1:
            # A step of 1e-6 never moves a norm's weight near one by a whole bf16 unit.
            ones = np.full(spec.n_elements, 0x3F80, BF16.bits_dtype)
            olds.append(ones)
            news.append(ones)
            continue
        olds.append(pair.old[at : at + spec.n_elements])
        news.append(pair.new[at : at + spec.n_elements])
        at += spec.n_elements
    return Version(specs, tuple(olds)), Version(specs, tuple(news))


def write_checkpoint(folder: Path, version: Version) -> None:
    """A Hugging Face folder: shards, their index, and a configuration."""
    folder.mkdir()
    shards = list(cut_shards(version))
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update({spec.name: name for spec, _ in shard})
        with (folder / name).open("wb") as file:
            file.write(build_header([spec for spec, _ in shard], {"format": "pt"}))
            for _, bits in shard:
                file.write(bits.tobytes())
    total = sum(spec.n_bytes for spec in version.specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
    write_json(folder / "config.json", configuration())


def cut_shards(version: Version) -> Iterator[list[tuple[TensorSpec, Bits]]]:
    """Tensors in order, a new file whenever one is full."""
    shard, n_bytes = [], 0
    for spec, bits in zip(version.specs, version.bits, strict=True):
        if shard and n_bytes + spec.n_bytes > SHARD_BYTES:
            yield shard
            shard, n_bytes = [], 0
        shard.append((spec, bits))
        n_bytes += spec.n_bytes
    yield shard


def configuration() -> dict[str, object]:
    """What an engine would read to build the model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
    }


def write_json(path: Path, value: object) -> None:
    """JSON as Hugging Face writes it."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def show_checkpoint(folder: Path) -> None:
    """The files of a version."""
    table = Table.grid(padding=(0, 3))
    table.add_column(justify="left")
    table.add_column(justify="right")
    for path in sorted(folder.iterdir()):
        table.add_row(f"{folder.name}/{path.name}", megabytes(path.stat().st_size))
    CONSOLE.print(table)


# --------------------------------------------------------------------------------------- the proof


def compare(expected: Path, found: Path) -> int:
    """Stop unless two folders hold the same files with the same SHA-256; gives their number."""
    table = Table("file", "SHA-256 of step-2", "SHA-256 of step-2-applied", "")
    names = sorted(path.name for path in expected.iterdir())
    if names != sorted(path.name for path in found.iterdir()):
        raise SystemExit(f"{expected} and {found} do not hold the same files")
    for name in names:
        first, second = sha256(expected / name), sha256(found / name)
        if first != second:
            raise SystemExit(f"{found / name} is not the file it should be")
        table.add_row(name, f"{first[:20]}…", f"{second[:20]}…", "[green]same[/]")
    CONSOLE.print(table)
    return len(names)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, as hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# --------------------------------------------------------------------------------------- the sizes


def show_sizes(before: Version, after: Version, patch: Patch) -> None:
    """A table of what each encoding needs, largest first."""
    n_full = sum(spec.n_bytes for spec in after.specs)
    pairs = [
        Pair(old, new, BF16, DENSITY) for old, new in zip(before.bits, after.bits, strict=True)
    ]
    sizes = {}
    with ThreadPoolExecutor(2) as pool:
        for contender in published_contenders(2, pool):
            sizes[contender.name] = contender.encode(pairs).n_bytes
    table = Table()
    for title, side in (("encoding", "left"), ("size", "right"), ("bytes/change", "right")):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    table.add_column("")
    table.add_column("× smaller than full", justify="right")
    table.add_row("full checkpoint", megabytes(n_full), "", "", "1.0")
    largest = max(sizes.values())
    for name, n_bytes in sorted(sizes.items(), key=lambda item: -item[1]):
        add_size(table, name, n_bytes, largest, n_full, patch.n_changed, "")
    add_size(
        table,
        "Weightwire, all files",
        patch.n_bytes,
        largest,
        n_full,
        patch.n_changed,
        "bold green",
    )
    CONSOLE.print(table)
    CONSOLE.print(
        "[dim]Published encodings: their data streams alone. Weightwire: everything on disk, with"
        " headers, digests and index.[/]"
    )


def add_size(
    table: Table, name: str, n_bytes: int, largest: int, n_full: int, n_changed: int, style: str
) -> None:
    """One row with its bar."""
    bar = "█" * max(1, round(BAR_CELLS * n_bytes / largest))
    per_change = f"{n_bytes / n_changed:.2f}"
    table.add_row(name, megabytes(n_bytes), per_change, bar, f"{n_full / n_bytes:.1f}", style=style)


def megabytes(n_bytes: int) -> str:
    """A size for people."""
    return f"{n_bytes / 1e6:,.2f} MB" if n_bytes >= 100_000 else f"{n_bytes / 1e3:,.1f} kB"


if __name__ == "__main__":
    main()
