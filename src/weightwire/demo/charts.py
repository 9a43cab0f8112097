"""Plots as plain SVG, in colours that the page chooses: readable on light and on dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

_WIDTH, _HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 68, 14, 34, 40
_N_TICKS = 5
_CELL_HEIGHT, _NAME_WIDTH = 15, 210
_N_SHADES = 100


@dataclass(frozen=True)
class Series:
    """One line: a name, a colour class of the page, and points."""

    name: str
    style: str
    points: Sequence[tuple[float, float]]
    is_dashed: bool = False
    is_wide: bool = False
    """A broad band, for another line to be drawn over it."""
    is_dotted: bool = False
    """Points instead of a line: for measurements that scatter."""


@dataclass(frozen=True)
class Axis:
    """From values to places on the page."""

    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.is_log:
            value, low, high = (math.log10(max(v, 1e-12)) for v in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return (value - low) / (high - low) if high > low else 0.5

    def ticks(self) -> list[float]:
        """Round values between the ends."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            powers = [10.0**power for power in range(first, last + 1)]
            return [value for value in powers if self.low * 0.999 <= value <= self.high * 1.001]
        step = _round_step((self.high - self.low) / _N_TICKS)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Chart:
    """Lines over steps."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    is_log: bool = False
    floor: float | None = None
    """A value that the axis must show, such as zero."""
    x_title: str = field(default="version")

    def svg(self) -> str:
        """The picture."""
        x_axis, y_axis = self._axes()
        parts = [_open(_WIDTH, _HEIGHT, self.title), *_grid(y_axis, self.unit)]
        for tick in x_axis.ticks():
            if tick % 1:
                continue  # there is no half version
            x = _x(x_axis, tick)
            parts.append(_text(x, _HEIGHT - _BOTTOM + 16, f"{tick:g}", "middle"))
        parts.append(_text((_WIDTH + _LEFT) / 2, _HEIGHT - 6, self.x_title, "middle"))
        for number, series in enumerate(self.series):
            parts += _drawn(series, x_axis, y_axis)
            parts += _legend(series, number, len(self.series))
        return "".join([*parts, "</svg>"])

    def _axes(self) -> tuple[Axis, Axis]:
        xs = [x for series in self.series for x, _ in series.points] or [0.0, 1.0]
        ys = [y for series in self.series for _, y in series.points] or [0.0, 1.0]
        ys += [self.floor] if self.floor is not None else []
        if self.is_log:
            ys = [y for y in ys if y > 0] or [1.0]
            low, high = (
                10 ** math.floor(math.log10(min(ys))),
                10 ** math.ceil(math.log10(max(ys))),
            )
            return Axis(min(xs), max(xs)), Axis(low, max(high, low * 10), is_log=True)
        low, high = min(ys), max(ys)
        margin = (high - low or abs(high) or 1.0) * 0.06
        is_floor = self.floor is not None and low >= self.floor
        return Axis(min(xs), max(xs)), Axis(low if is_floor else low - margin, high + margin)


def heat_map(title: str, names: Sequence[str], rows: Sequence[Sequence[float]]) -> str:
    """One row per name, one cell per version; the fullest is the largest of all."""
    height = _TOP + _CELL_HEIGHT * len(names) + _BOTTOM
    n_columns = max((len(row) for row in rows), default=1)
    cell = (_WIDTH - _NAME_WIDTH - _RIGHT) / max(n_columns, 1)
    largest = max((value for row in rows for value in row), default=0.0) or 1.0
    parts = [_open(_WIDTH, height, f"{title} (faint to full: 0 to {largest:.1%})")]
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        y = _TOP + number * _CELL_HEIGHT
        parts.append(_text(_NAME_WIDTH - 6, y + _CELL_HEIGHT - 4, name, "end"))
        for column, value in enumerate(row):
            shade = round(_N_SHADES * value / largest) / _N_SHADES
            parts.append(
                f'<rect class="heat" x="{_NAME_WIDTH + column * cell:.1f}" y="{y}"'
                f' width="{cell:.2f}" height="{_CELL_HEIGHT - 1}" fill-opacity="{shade}">'
                f"<title>{escape(name)}, version {column + 1}: {value:.2%}</title></rect>"
            )
    last = _NAME_WIDTH + cell * (n_columns - 0.5)
    bottom = height - _BOTTOM + 16
    parts.append(_text(_NAME_WIDTH + cell / 2, bottom, "1", "middle"))
    parts.append(_text(last, bottom, str(n_columns), "middle"))
    parts.append(_text((_NAME_WIDTH + last) / 2, bottom, "version", "middle"))
    return "".join([*parts, "</svg>"])


def _drawn(series: Series, x_axis: Axis, y_axis: Axis) -> list[str]:
    places = [(_x(x_axis, x), _y(y_axis, y)) for x, y in series.points]
    if series.is_dotted:
        return [
            f'<circle class="dot {series.style}" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>'
            for x, y in places
        ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashes = ' stroke-dasharray="7 5"' if series.is_dashed else ""
    return [f'<polyline class="{_line(series)}" points="{path}"{dashes}/>']


def _legend(series: Series, number: int, n_series: int) -> list[str]:
    """Names in the line below the title, evenly spread."""
    x = _LEFT + number * (_WIDTH - _LEFT - _RIGHT) / max(n_series, 1)
    dashes = ' stroke-dasharray="7 5"' if series.is_dashed else ""
    sample = f'<path class="{_line(series)}" d="M{x:.1f} 26 h22"{dashes}/>'
    return [sample, _text(x + 28, 30, series.name, "start")]


def _line(series: Series) -> str:
    return f"line {series.style} wide" if series.is_wide else f"line {series.style}"


def _grid(axis: Axis, unit: str) -> list[str]:
    parts = []
    for tick in axis.ticks():
        y = _y(axis, tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f} H{_WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, y + 4, _tick_text(tick, unit), "end"))
    return parts


def _tick_text(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:g}%"
    if unit != "B":
        return f"{value:.6g} {unit}".strip()
    for size, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= size:
            return f"{value / size:g} {name}"
    return f"{value:g} B"


def _round_step(rough: float) -> float:
    """The next of 1, 2, 5, 10, … at least as large."""
    power = 10 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _open(width: int, height: int, title: str) -> str:
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return head + f'<text class="title" x="4" y="14">{escape(title)}</text>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _x(axis: Axis, value: float) -> float:
    return _LEFT + axis.place(value) * (_WIDTH - _LEFT - _RIGHT)


def _y(axis: Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - axis.place(value) * (_HEIGHT - _TOP - _BOTTOM)
