"""Where the time goes: every kernel of one encode and one decode, on the device's own clock.

python benchmarks/gpu/kernel_times.py [elements] [density] [bf16 | fp16 | fp32 | fp8]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import ours
import torch
from elements import ELEMENT_TYPES, ElementType
from states import Pair, flat_model, make_pair
from torch.profiler import ProfilerActivity, profile

N_ROWS = 14


def main(n_elements: int, density: float, element: ElementType) -> None:
    """Warm up, then look at one round of each."""
    model = flat_model(n_elements, element)
    old, new = (torch.empty(n_elements, dtype=element.bits, device="cuda") for _ in range(2))
    pair: Pair = make_pair(model, old, new, density)
    print(f"{n_elements:,} elements, {pair.n_changed:,} changed, {element.name}")
    olds, news = pair.pieces_of(pair.old), pair.pieces_of(pair.new)
    coded = ours.encode(olds, news, element, "compact", model.n_bytes)
    show("encode", lambda: ours.encode(olds, news, element, "compact", model.n_bytes))
    show("decode", lambda: ours.decode(olds, coded, element))
    show("digest", lambda: ours.digest(olds, pair.first_indices))


def show(name: str, work: Callable[[], object]) -> None:
    """One round: kernels by time, and the host's own clock beside them."""
    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall_ms = 1e3 * (time.perf_counter() - began)
    events = [e for e in found.key_averages() if e.device_time_total > 0]
    events.sort(key=lambda e: -e.device_time_total)
    total_ms = sum(e.device_time_total for e in events) / 1e3
    print(f"\n{name}: {wall_ms:.2f} ms by the host, {total_ms:.2f} ms in kernels")
    for event in events[:N_ROWS]:
        print(f"  {event.device_time_total / 1e3:9.3f} ms {event.count:5} × {event.key[:70]}")


if __name__ == "__main__":
    main(
        int(float(sys.argv[1])) if sys.argv[1:] else 1 << 28,
        float(sys.argv[2]) if sys.argv[2:] else 0.01,
        ELEMENT_TYPES[sys.argv[3] if sys.argv[3:] else "bf16"],
    )
