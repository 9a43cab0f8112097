"""Draws ``overview.svg``, the picture of the README: the data's path, and what a change costs.

    python docs/images/draw_overview.py

The bars are bytes per changed element on eight single steps of a recorded GRPO run (BF16, 1.63 % of
elements changed per step), as ``weightwire bench codec --data`` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 960, 600
INK, SOFT, PALE, LINE = "#1b2430", "#5b6775", "#eef2f6", "#c9d2dc"
OURS, OURS_PALE, OTHERS = "#0b7a75", "#dff3f1", "#9fb0c3"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


@dataclass(frozen=True)
class Box:
    """One stage of the data's path."""

    title: str
    lines: tuple[str, ...]
    is_ours: bool = True


@dataclass(frozen=True)
class Bar:
    """One encoding's bytes per changed element."""

    name: str
    users: str
    n_bytes: float
    is_ours: bool = False


PATH = (
    Box("trainer", ("old weights,", "new weights"), is_ours=False),
    Box("diff", ("which bits", "changed?")),
    Box("codec", ("0.82 bytes", "per change")),
    Box("patch", ("safetensors", "buckets + index")),
    Box("apply", ("prove base,", "prove target")),
    Box("engine", ("new weights,", "bit for bit"), is_ours=False),
)
BARS = (
    Bar("int32 position + value", "vLLM sparse_nccl, verl, prime-rl", 6.00),
    Bar("u16 gap + value", "TRL delta sync", 4.00),
    Bar("LEB128 gap + value", "SparrowRL, AuroraRL", 3.13),
    Bar("dense XOR + zstd", "slime, miles, SkyRL", 2.62),
    Bar("u8/u16 gap + value + zstd", "PULSE, grail", 2.61),
    Bar("u16 gap + XOR + zstd", "NeMo-RL", 1.74),
    Bar("Weightwire", "compact codec", 0.82, is_ours=True),
)


def text(
    x: float,
    y: float,
    words: str,
    size: int = 14,
    color: str = INK,
    *,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    """One line of text."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" text-anchor="{anchor}"'
        f' font-weight="{weight}">{escape(words)}</text>'
    )


def rectangle(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    stroke: str = "none",
    radius: int = 8,
) -> str:
    """A rounded rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"'
        f' fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>'
    )


def draw_path(top: float) -> list[str]:
    """The boxes from trainer to engine, with arrows between them."""
    width, gap, height = 124.0, 23.2, 92.0
    parts = []
    for number, box in enumerate(PATH):
        x = 50 + number * (width + gap)
        fill, stroke = (OURS_PALE, OURS) if box.is_ours else (PALE, LINE)
        parts.append(rectangle(x, top, width, height, fill, stroke, 10))
        center = x + width / 2
        parts.append(text(center, top + 31, box.title, 17, INK, anchor="middle", weight=700))
        for line, words in enumerate(box.lines):
            parts.append(text(center, top + 55 + 18 * line, words, 13, SOFT, anchor="middle"))
        if number:
            parts.append(arrow(x - gap + 3, x - 3, top + height / 2))
    return parts


def arrow(start: float, stop: float, y: float) -> str:
    """A short arrow to the right."""
    return (
        f'<path d="M{start:g} {y:g}H{stop - 5:g}M{stop - 7:g} {y - 5:g}l7 5l-7 5"'
        f' fill="none" stroke="{SOFT}" stroke-width="2" stroke-linecap="round" stroke-linejoin="round"/>'
    )


def draw_bars(top: float) -> list[str]:
    """One bar per encoding, ours last and in colour."""
    left, unit, pitch = 390.0, 78.0, 40.0
    parts = []
    for number, bar in enumerate(BARS):
        y = top + pitch * number
        color = OURS if bar.is_ours else OTHERS
        weight = 700 if bar.is_ours else 500
        parts.append(text(left - 14, y + 13, bar.name, 14, INK, anchor="end", weight=weight))
        parts.append(text(left - 14, y + 28, bar.users, 11, SOFT, anchor="end"))
        parts.append(rectangle(left, y + 1, unit * bar.n_bytes, 25, color, radius=4))
        label = f"{bar.n_bytes:.2f}"
        parts.append(text(left + unit * bar.n_bytes + 9, y + 19, label, 15, INK, weight=weight))
    return parts


def draw() -> str:
    """The whole picture."""
    title = "Weightwire: the data's path, and bytes per changed element against published encodings"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" font-family="{FONT}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        rectangle(1, 1, WIDTH - 2, HEIGHT - 2, "#ffffff", LINE, 14),
        text(50, 46, "Only what changed travels, and every bit of it is proven", 20, weight=700),
        *draw_path(68),
        f'<path d="M50 192H910" stroke="{LINE}" stroke-width="1"/>',
        text(50, 230, "Bytes per changed element", 20, weight=700),
        text(
            50,
            253,
            "eight single steps of a recorded GRPO run, bf16, 1.63 % of elements changed per step",
            13,
            SOFT,
        ),
        *draw_bars(276),
        text(
            50,
            578,
            "Published encodings rewritten bit-exactly and measured side by side; shorter is better.",
            12,
            SOFT,
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "overview.svg").write_text(draw(), encoding="utf-8")
