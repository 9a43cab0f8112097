"""What publishing and following cost, each beside what it replaces, in one run.

    python benchmarks/sync.py [--megabytes 1000] [--data CHAIN.npz] [--json FILE]

Publishing is measured against encoding alone, activation against loading the whole checkpoint
into the same module, a receiver far behind against the chain of single patches, and memory
against the weights themselves. Times are the best of several rounds, taken in turns. Needs
torch and safetensors, and about five times the megabytes of memory.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import weightwire as ww
from weightwire.bench.chain import make_chain, read_chain
from weightwire.bench.generate import generate_pair
from weightwire.diff.compare import diff_states
from weightwire.diff.memory import open_state
from weightwire.model import dtype_named
from weightwire.store.memory import MemoryStore
from weightwire.store.upload import NoUpload

N_TENSORS = 16
N_ROUNDS = 5
N_FAR = 64
CHAIN_SHAPES = {
    "embed": (512, 512),
    "layers.0.up": (1024, 512),
    "layers.0.k": (128, 512),
    "layers.1.up": (1024, 512),
    "norm": (512,),
}


@dataclass(frozen=True)
class Row:
    """One measured thing beside what it is compared with."""

    what: str
    ours: str
    other: str
    ratio: float


class Model(torch.nn.Module):
    """So many bf16 weights, in a few parameters."""

    def __init__(self, bits: np.ndarray) -> None:
        super().__init__()
        for number, part in enumerate(np.array_split(bits, N_TENSORS)):
            weight = torch.from_numpy(part.view(np.int16).copy()).view(torch.bfloat16)
            self.register_parameter(f"w{number}", torch.nn.Parameter(weight, requires_grad=False))

    def bits(self) -> list[np.ndarray]:
        """The weights as integers that share their memory."""
        return [weight.view(torch.int16).numpy().view(np.uint16) for weight in self.parameters()]


class Training:
    """Two versions of a model that take turns: every step changes the same share of elements."""

    def __init__(self, n_bytes: int) -> None:
        pair = generate_pair(n_bytes // 2, dtype_named("BF16"), 0.01, seed=7)
        self.model = Model(pair.old)
        changed = [np.flatnonzero(a != b) for a, b in self._parts(pair.old, pair.new)]
        old = [a[at] for at, (a, _) in zip(changed, self._parts(pair.old, pair.new), strict=True)]
        new = [b[at] for at, (_, b) in zip(changed, self._parts(pair.old, pair.new), strict=True)]
        self._changed, self._sides, self._turn = changed, (old, new), 0

    def step(self) -> None:
        """Move every changing element to its other value."""
        self._turn ^= 1
        for bits, at, side in zip(
            self.model.bits(), self._changed, self._sides[self._turn], strict=True
        ):
            bits[at] = side

    @staticmethod
    def _parts(old: np.ndarray, new: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return zip(np.array_split(old, N_TENSORS), np.array_split(new, N_TENSORS), strict=True)


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_publish(training: Training, folder: Path) -> Iterator[Row]:
    """Publishing to a local folder, until the version exists, against encoding alone."""
    with ww.Publisher(folder, training.model) as publisher:
        publisher.publish().result()
        alone, whole, returned = [], [], []
        for _ in range(N_ROUNDS):
            before = {n: w.clone() for n, w in training.model.state_dict().items()}
            training.step()
            state = open_state(training.model)
            alone.append(timed(partial(diff_states, open_state(before), state, NoUpload())))
            began = time.perf_counter()
            future = publisher.publish()
            returned.append(time.perf_counter() - began)
            future.result()
            whole.append(time.perf_counter() - began)
            del before
        publisher.wait()
    yield row("publish, until the version exists / encode alone", min(whole), min(alone))
    yield row("publish, until it returns / encode alone", min(returned), min(alone))


def measure_activate(training: Training, folder: Path) -> Iterator[Row]:
    """Pauses: writing what changed, exchanging two copies, loading everything."""
    file = folder / "model.safetensors"
    store = MemoryStore()
    engine = Model(np.concatenate(training.model.bits()))
    twice = Model(np.concatenate(training.model.bits()))
    save_file(training.model.state_dict(), file)
    with (
        ww.Publisher(store, training.model, skips=()) as publisher,
        _following(publisher, store, engine) as one,
        _following(publisher, store, twice, double_buffer=True) as other,
    ):
        pauses, exchanges, loads, checks = [], [], [], []
        for _ in range(N_ROUNDS):
            training.step()
            publisher.publish().result()
            for subscriber, times in ((one, pauses), (other, exchanges)):
                subscriber.stage()
                times.append(timed(subscriber.activate))
                done = subscriber.wait()
                checks.append(done.verify_s if done else 0.0)
            loads.append(timed(lambda: engine.load_state_dict(load_file(file))))
            training_bits = training.model.state_dict()
            engine.load_state_dict(training_bits)
        assert ww.digest(engine) == ww.digest(twice) == ww.digest(training.model)  # noqa: S101
    yield row("load everything / activate in place", min(loads), min(pauses))
    yield row("load everything / activate with double_buffer", min(loads), min(exchanges))


def _following(publisher: ww.Publisher, store: MemoryStore, model: Model, **options: Any) -> Any:
    if publisher.version < 0:
        publisher.publish().result()
    subscriber = ww.Subscriber(store, model, **options)
    subscriber.update()
    return subscriber


def measure_far_behind(folder: Path, data: Path | None) -> Iterator[Row]:
    """What a receiver downloads that is 64 versions behind, against all single patches."""
    path = folder / "chain.npz"
    make_chain(path, shapes=CHAIN_SHAPES, n_steps=N_FAR)
    yield _far_behind(path, (8, 64), f"{N_FAR} generated versions behind")
    if data is not None:
        yield _far_behind(data, (8,), "8 recorded versions behind")


def _far_behind(path: Path, skips: tuple[int, ...], what: str) -> Row:
    store, live = MemoryStore(), {}
    versions = read_chain(path).versions()
    state = next(versions)
    policy = ww.AnchorPolicy(every=1000, chain_share=1000)
    with ww.Publisher(store, state, anchors=policy, skips=skips) as publisher:
        publisher.publish().result()
        subscriber = ww.Subscriber(store, live)
        subscriber.update()
        n_chain_bytes = 0
        for version in versions:
            for name, bits in version.items():
                state[name][:] = bits
            n_chain_bytes += publisher.publish().result().n_bytes
        publisher.wait()
        done = subscriber.update()
    assert ww.digest(live) == ww.digest(state)  # noqa: S101
    n_bytes = done.n_bytes if done else 0
    return Row(
        f"{what}: download / chain",
        f"{n_bytes:,} B",
        f"{n_chain_bytes:,} B",
        n_bytes / n_chain_bytes,
    )


def measure_memory(training: Training, folder: Path) -> Iterator[Row]:
    """Peak memory while publishing and staging, beyond weights and baseline."""
    engine = Model(np.concatenate(training.model.bits()))
    n_state = sum(weight.nbytes for weight in engine.parameters())
    with ww.Publisher(folder, training.model, skips=()) as publisher:
        publisher.publish().result()
        subscriber = ww.Subscriber(folder, engine)
        subscriber.update()
        training.step()
        for what, work in (
            ("publisher beyond weights and baseline", lambda: publisher.publish().result()),
            ("subscriber beyond weights", subscriber.update),
        ):
            before = peak_reset()
            work()
            extra = peak() - before
            yield Row(
                f"{what} / weights",
                f"{extra / 1e6:.0f} MB",
                f"{n_state / 1e6:.0f} MB",
                extra / n_state,
            )
        subscriber.close()


def peak_reset() -> int:
    """Give unused memory back and forget the peak; gives what is resident now, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """The most that was resident since then, in bytes."""
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def row(what: str, one: float, other: float) -> Row:
    """Two times in milliseconds, and their ratio."""
    return Row(what, f"{one * 1e3:.1f} ms", f"{other * 1e3:.1f} ms", one / other)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--data", type=Path, help="a recorded chain of versions, .npz")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="weightwire-sync-"))
    try:
        training = Training(arguments.megabytes * 1_000_000)
        rows = [*measure_publish(training, folder / "publish")]
        rows += measure_activate(training, folder)
        rows += measure_memory(training, folder / "memory")
        rows += measure_far_behind(folder, arguments.data)
    finally:
        shutil.rmtree(folder)
    print("| what | | | ratio |\n|---|---:|---:|---:|")
    for each in rows:
        print(f"| {each.what} | {each.ours} | {each.other} | {each.ratio:.3g} |")
    if arguments.json:
        arguments.json.write_text(json.dumps([vars(each) for each in rows], indent=2))


if __name__ == "__main__":
    main()
