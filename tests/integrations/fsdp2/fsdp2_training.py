"""A small model trained with FSDP2 on several processes, publishing every step; or on one, plainly.

    python fsdp2_training.py --ranks 2 --store runs/many --report report

Without RANK in its environment the script starts the ranks. Every rank sees the same batch, so that
training on many ranks and on one gives the same weights, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import weightwire as ww
from weightwire import limits
from weightwire.errors import RankLost, WeightwireError
from weightwire.store.folder import FolderStore
from weightwire.trainers.sharded import ShardedPublisher


class Model(nn.Module):
    """Rows that do not divide evenly, a bias with fewer elements than ranks, a tie, a counter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(67, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.body = nn.Sequential(
            nn.Linear(width, width + 1), nn.Tanh(), nn.Linear(width + 1, width)
        )
        self.gate = nn.Linear(width, 1)
        self.head = nn.Linear(width, 67, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("n_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.n_seen += ids.numel()
        hidden = self.embed(ids)
        hidden = hidden + self.body(hidden) * torch.sigmoid(self.gate(hidden))
        logits: torch.Tensor = self.head(hidden)
        return logits


def make_model(width: int, mesh: Any = None) -> Model:
    torch.manual_seed(0)
    model = Model(width)
    if mesh is not None:
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train_step(model: Model, optimizer: torch.optim.Optimizer, step: int) -> None:
    ids = torch.randint(0, 67, (4, 16), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step()


def refuse_gather(*_: object, **__: object) -> None:
    raise AssertionError("the model was gathered")


def peak_bytes() -> int:
    """The most memory this process ever had since the last ``forget_peak``."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Deadly(FolderStore):
    """A store that kills its own process at one of its writes."""

    n_left = 0

    def put(self, key: str, data: Any) -> None:
        Deadly.n_left -= 1
        if Deadly.n_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        super().put(key, data)


def publish_all(options: argparse.Namespace, mesh: Any) -> dict[str, Any]:
    """Train and publish on this rank; gives what happened."""
    model = make_model(options.width, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    store: Any = options.store
    if options.die_at and dist.get_rank() == 1:
        store, Deadly.n_left = Deadly(Path(options.store)), options.die_at
    report: dict[str, Any] = {"versions": [], "peaks": [], "lost": ""}
    state = ww.cast(model, "bf16") if options.cast else model
    publisher: Any = (
        ww.Publisher(store, state)
        if mesh is None
        else ShardedPublisher(store, state, anchors=ww.AnchorPolicy(every=options.anchor_every))
    )
    DTensor.full_tensor = refuse_gather
    for step in range(options.steps):
        train_step(model, optimizer, step)
        forget_peak()
        before = peak_bytes()
        try:
            done = publisher.publish(step=step).result()
            publisher.wait()
        except RankLost as error:
            report["lost"] = str(error)
            break
        report["versions"].append([done.version, done.digest, done.n_changed, done.step])
        report["peaks"].append(peak_bytes() - before)
    try:
        publisher.close()
    except WeightwireError as error:
        report["close"] = str(error)
    report["n_bytes"] = sum(t.numel() for t in model.parameters()) * (2 if options.cast else 4)
    return report


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    limits.PIECE_ELEMENTS = options.piece
    mesh = None
    if options.ranks > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (options.ranks,))
    report = publish_all(options, mesh)
    rank = int(os.environ["RANK"])
    Path(f"{options.report}-{rank}.json").write_text(json.dumps(report))
    # Not destroy_process_group: it waits for ranks that may be gone.
    sys.stdout.flush()
    os._exit(0)


def start_ranks(n_ranks: int) -> int:
    """Start every rank and wait; a rank that was killed on purpose is no failure."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env={**shared, "RANK": str(rank)})
        for rank in range(n_ranks)
    ]
    try:
        codes = [rank.wait(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return max(code for code in codes if code != -signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--store", required=True)
    parser.add_argument("--report", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--width", type=int, default=33)
    parser.add_argument("--piece", type=int, default=limits.PIECE_ELEMENTS)
    parser.add_argument("--anchor-every", type=int, default=64)
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--cast", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options)
    sys.exit(start_ranks(options.ranks))


if __name__ == "__main__":
    main()
