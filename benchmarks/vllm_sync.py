"""How long a vLLM server pauses for a new version, beside loading it anew. One machine, real server.

    python tests/loopback_only.py python benchmarks/vllm_sync.py [--hidden 768] [--layers 12] [--ranks 1]

Makes a Qwen3-shaped model with random weights, serves it, and publishes versions that real AdamW
steps made. Ways to the next version, each from the moment nothing is generated until the server
runs again: Weightwire's activation; vLLM's own reload of a checkpoint folder into the running
server, read from the disk as a checkpoint that has just arrived, and from the page cache, as fast
as that can ever be; and a restart. Beside them a pause in which nothing is done, which costs what
vLLM's own pause and resume cost. Needs vLLM, transformers and torch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "integrations")]

from tiny_models import Shape, Training, new_model, save  # noqa: E402
from vllm_servers import Server, running  # noqa: E402

import weightwire as ww  # noqa: E402
from weightwire.engines.vllm import VllmServer  # noqa: E402

N_VERSIONS = 5


def main() -> None:
    """Measure, and print one line per way."""
    options = parse_options()
    shape = Shape(
        "qwen3",
        hidden=options.hidden,
        n_layers=options.layers,
        n_heads=options.hidden // 64,
        n_kv_heads=max(options.hidden // 128, options.ranks),
        vocabulary=options.vocabulary,
    )
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(shape, options.ranks, Path(folder))
    for name, value in rows.items():
        print(f"{name:52} {value}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def measure(shape: Shape, n_ranks: int, folder: Path) -> dict[str, Any]:
    """Publish, follow, reload; all on one server."""
    training = Training(new_model(shape), learning_rate=1e-6)
    n_parameters = sum(p.numel() for p in training.model.parameters())
    save(training.model, folder / "checkpoint")
    store = str(folder / "run")
    with (
        ww.Publisher(store, training.weights) as publisher,
        running(folder / "checkpoint", folder / "server.log", n_ranks=n_ranks) as server,
    ):
        publisher.publish().result()
        client = VllmServer(server.url)
        client.connect(store)
        pauses, published = follow(training, publisher, client)
        save(training.model, folder / "newest")
        held = server.checksums()
        reloads = [reload(server, folder / "newest", is_cold=True) for _ in range(3)]
        cached = [reload(server, folder / "newest") for _ in range(3)]
        empties = [reload(server, None) for _ in range(5)]
        if server.checksums() != held:
            raise SystemExit("the reloaded server holds other bits than the patched one")
        client.close()
        pause_s = statistics.median(pause.total_s for pause in pauses)
        reload_s, cached_s = statistics.median(reloads), statistics.median(cached)
        empty_s = statistics.median(empties)
        return {
            "parameters": f"{n_parameters:,}",
            "ranks": n_ranks,
            "changed elements": f"{published.density:.2%}",
            "patch": f"{published.n_bytes:,} of {published.n_state_bytes:,} bytes",
            "staging, while it serves": f"{statistics.median(p.stage_s for p in pauses) * 1e3:.0f} ms",
            "pause": f"{pause_s * 1e3:.1f} ms",
            "  until no further step was begun": f"{_median_ms(pauses, 'drain_s'):.1f} ms",
            "  overwriting": f"{_median_ms(pauses, 'activate_s'):.1f} ms",
            "a pause in which nothing is done": f"{empty_s * 1e3:.1f} ms",
            "reload from the disk": f"{reload_s * 1e3:.0f} ms",
            "reload from the page cache": f"{cached_s * 1e3:.0f} ms",
            "restart": f"{server.start_s * 1e3:.0f} ms",
            "reload from the disk / pause": f"{reload_s / pause_s:.1f} x",
            "reload from the page cache / pause": f"{cached_s / pause_s:.1f} x",
            "  both without the empty pause": (
                f"{(cached_s - empty_s) * 1e3 / _median_ms(pauses, 'activate_s'):.0f} x"
            ),
            "restart / pause": f"{server.start_s / pause_s:.0f} x",
        }


def follow(
    training: Training, publisher: ww.Publisher, client: VllmServer
) -> tuple[list[Any], ww.Published]:
    """A few versions, each activated as soon as it is published."""
    pauses = []
    for _ in range(N_VERSIONS):
        training.step()
        published = publisher.publish().result()
        pauses.append(client.update(published.version))
    return pauses, published


def reload(server: Server, folder: Path | None, *, is_cold: bool = False) -> float:
    """vLLM's own way: pause, load the folder into the running server if given, resume. Seconds."""
    if folder is not None and is_cold:
        forget_pages(folder)
    began = time.monotonic()
    server.post("/pause?mode=keep")
    if folder is not None:
        server.rpc("reload_weights", weights_path=str(folder))
    server.post("/resume")
    return time.monotonic() - began


def forget_pages(folder: Path) -> None:
    """Take a folder's files out of the page cache, as on a host that has just been sent them."""
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _median_ms(pauses: list[Any], name: str) -> float:
    return statistics.median(getattr(pause, name) for pause in pauses) * 1e3


if __name__ == "__main__":
    main()
