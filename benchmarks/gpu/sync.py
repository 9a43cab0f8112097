"""A version from a trainer's GPU to an engine's, everything included: what each stage takes.

    python benchmarks/gpu/sync.py                           # Llama-3.1-8B, an engine of one rank
    python benchmarks/gpu/sync.py --layers 8 --ranks 2      # rank 0 of 2, of a shorter model
    python benchmarks/gpu/sync.py --on-host                 # and staged on the host, for comparison

Publisher and subscriber share this process, its GPU, and its memory as a store: nothing travels. The
engine's loader splits and fuses as vLLM's does. Every version is compared with a fresh load of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from states import SIZES

from weightwire.apply import device_staging
from weightwire.apply.layouts.target import LayoutTarget
from weightwire.events import Published, Updated
from weightwire.publisher import Publisher
from weightwire.store.memory import MemoryStore
from weightwire.subscriber import Subscriber

DENSITY = 0.01
N_VERSIONS = 5
_GIB = 1 << 30


FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
"""Parameters that hold rows of several tensors, one after the other."""
FUSED_IN = {name: fused for fused, names in FUSED.items() for name in names}
SPLIT_BY_COLUMNS = ("o", "down")


class Rank:
    """One rank's weights: rows of most matrices, fused; columns of those that follow them."""

    def __init__(self, rank: int, n_ranks: int, n_layers: int, device: torch.device) -> None:
        sizes = SIZES["llama-3.1-8b"]
        self._rank, self._n_ranks = rank, n_ranks
        hidden, inner, key_value = sizes.hidden, sizes.inner, sizes.key_value
        self.shapes = {"embed": (sizes.vocabulary, hidden)}
        for n in range(n_layers):
            rows = {"q": hidden, "k": key_value, "v": key_value, "gate": inner, "up": inner}
            self.shapes |= {f"{n}.{name}": (size, hidden) for name, size in rows.items()}
            self.shapes |= {f"{n}.o": (hidden, hidden), f"{n}.down": (hidden, inner)}
            self.shapes |= {f"{n}.norm": (hidden,)}
        self.tensors = {
            name: torch.zeros(shape, dtype=torch.bfloat16, device=device)
            for name, shape in self._held_shapes(n_layers).items()
        }

    def _held_shapes(self, n_layers: int) -> dict[str, tuple[int, ...]]:
        held: dict[str, tuple[int, ...]] = {"embed": self._split("embed", 0)}
        for n in range(n_layers):
            for fused, names in FUSED.items():
                parts = [self._split(f"{n}.{name}", 0) for name in names]
                held[f"{n}.{fused}"] = (sum(rows for rows, _ in parts), parts[0][1])
            held |= {f"{n}.{name}": self._split(f"{n}.{name}", 1) for name in SPLIT_BY_COLUMNS}
            held[f"{n}.norm"] = self.shapes[f"{n}.norm"]
        return held

    def _split(self, name: str, axis: int) -> tuple[int, ...]:
        shape = self.shapes[name]
        return tuple(n // self._n_ranks if at == axis else n for at, n in enumerate(shape))

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As an engine loads a checkpoint."""
        for name, tensor in pairs:
            short = name.rpartition(".")[2]
            if short == "norm":
                self.tensors[name].copy_(tensor)
                continue
            axis = int(short in SPLIT_BY_COLUMNS)
            size = tensor.shape[axis] // self._n_ranks
            self._room(name, short).copy_(tensor.narrow(axis, self._rank * size, size))

    def _room(self, name: str, short: str) -> torch.Tensor:
        """Where a tensor's share goes: all of a parameter, or some rows of it."""
        if short not in FUSED_IN:
            return self.tensors[name]
        layer, names = name.rpartition(".")[0], FUSED[FUSED_IN[short]]
        rows = [self._split(f"{layer}.{each}", 0)[0] for each in names]
        at = names.index(short)
        return self.tensors[f"{layer}.{FUSED_IN[short]}"].narrow(0, sum(rows[:at]), rows[at])


class Training:
    """Weights in bf16, of which a few move a step, published from the GPU."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        self._source = torch.Generator(device).manual_seed(0)
        self.state = {name: self._draw(shape, device) for name, shape in shapes.items()}
        self.store = MemoryStore()
        self.publisher = Publisher(self.store, self.state)
        self.publisher.publish().result()

    def _draw(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._source, device=device, dtype=torch.bfloat16)
        return drawn.mul_(0.02)

    def step(self) -> Published:
        """One weight in a hundred moves by the least there is; then all is published."""
        for tensor in self.state.values():
            bits = tensor.view(torch.int16).view(-1)
            n = max(1, int(DENSITY * len(bits)))
            places = torch.randint(len(bits), (n,), generator=self._source, device=bits.device)
            bits.index_add_(0, places, torch.ones_like(places, dtype=torch.int16))
        return self.publisher.publish().result()


@contextmanager
def staged_on_host(*, is_asked: bool) -> Iterator[None]:
    """Leave no room on the device for what is staged, as if it were full."""
    before = device_staging.HELD_BYTES, device_staging.HELD_SHARE
    if is_asked:
        device_staging.HELD_BYTES, device_staging.HELD_SHARE = 0, 0
    try:
        yield
    finally:
        device_staging.HELD_BYTES, device_staging.HELD_SHARE = before


def follow(training: Training, rank: Rank, check: Rank, *, on_host: bool) -> None:
    """Follow some versions, and print what each took."""
    target = LayoutTarget(rank.load, rank.tensors)
    where = "host" if on_host else "GPU"
    with Subscriber(training.store, target) as subscriber:
        subscriber.update()
        print(f"\n{where}: mirror of {target.n_mirror_bytes / _GIB:.2f} GiB in host memory")
        for _ in range(N_VERSIONS):
            published = training.step()
            with staged_on_host(is_asked=on_host):
                updated, n_peak = _updated(subscriber)
            _require_equal(training, rank, check)
            print(
                f"{published.n_bytes / 1e6:.1f} MB read and coded in {1e3 * published.read_s:.0f} ms,"
                f" committed in {1e3 * published.commit_s:.0f} ms; on the {where} staged in"
                f" {1e3 * updated.stage_s:.0f} ms, written in {1e3 * updated.activate_s:.2f} ms,"
                f" checked in {1e3 * updated.verify_s:.0f} ms, {n_peak / _GIB:.2f} GiB more"
            )


def _updated(subscriber: Subscriber) -> tuple[Updated, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    updated = subscriber.update()
    if updated is None:
        raise SystemExit("no version came")
    return updated, torch.cuda.max_memory_allocated() - before


def _require_equal(training: Training, rank: Rank, check: Rank) -> None:
    check.load(training.state.items())
    for name, tensor in rank.tensors.items():
        if not torch.equal(tensor.view(torch.int16), check.tensors[name].view(torch.int16)):
            raise SystemExit(f"{name} is not what a fresh load gives")


def main(arguments: list[str]) -> int:
    """Both ways, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=SIZES["llama-3.1-8b"].n_layers)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--on-host", action="store_true", help="stage on the host, too")
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    rank, check = (Rank(0, options.ranks, options.layers, device) for _ in range(2))
    began = time.perf_counter()
    training = Training(rank.shapes, device)
    n_held = sum(tensor.nbytes for tensor in rank.tensors.values())
    n_model = sum(tensor.nbytes for tensor in training.state.values())
    print(
        f"rank 0 of {options.ranks}: {n_held / _GIB:.2f} of {n_model / _GIB:.2f} GiB"
        f" (made in {time.perf_counter() - began:.0f} s)"
    )
    for on_host in (False, True) if options.on_host else (False,):
        follow(training, rank, check, on_host=on_host)
    training.publisher.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
