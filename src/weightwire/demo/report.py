"""The run as one HTML file that needs nothing else: claims, numbers, plots."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from weightwire.cli.numbers import bytes_text
from weightwire.demo.charts import Chart, Series, heat_map
from weightwire.demo.record import Record
from weightwire.demo.run import Outcome
from weightwire.demo.settings import Arm, Settings
from weightwire.testing.link import LinkShape

_N_ROWS = 40
"""Most rows of the heat map; a model with more tensors is shown by layer."""
_LAYER = re.compile(r"^(.*?layers\.\d+)\.")


def write_report(
    path: Path,
    outcome: Outcome,
    settings: Settings,
    summary: Mapping[str, Any],
    link: LinkShape | None,
) -> Path:
    """Write the page; gives where it is.

    Raises:
        OSError: it cannot be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(outcome, settings, summary, link), encoding="utf-8")
    return path.resolve()


def page(
    outcome: Outcome, settings: Settings, summary: Mapping[str, Any], link: LinkShape | None
) -> str:
    """The page's text."""
    verdict = "Every claim holds" if outcome.is_proven else "A claim does not hold"
    claims = "".join(
        f'<li class="{"yes" if each.holds else "no"}">{escape(str(each))}</li>'
        for each in outcome.verdicts
    )
    figures = "".join(
        f"<figure>{svg}</figure>" for svg in plots(outcome.record, settings, link).values()
    )
    return _PAGE.format(
        style=_STYLE,
        verdict=verdict,
        claims=claims,
        numbers=_numbers(summary),
        figures=figures,
        about=escape(_about(settings)),
    )


def plots(record: Record, settings: Settings, link: LinkShape | None) -> dict[str, str]:
    """Every plot by name."""
    drawn = {
        "reward": _both_runs(record, settings, "Reward, mean of each batch", "reward"),
        "loss": _both_runs(record, settings, "Loss of each step", "loss"),
        "density": _density(record),
        "bytes": _bytes(record),
        "timings": _timings(record, settings),
        "layers": _layers(record),
    }
    if link is not None:
        drawn["link"] = _over_link(record, link)
    return drawn


def _both_runs(record: Record, settings: Settings, title: str, what: str) -> str:
    """Patches as a line, whole files as dashes over it: where both are the same, one is seen."""
    names: dict[Arm, tuple[str, str]] = {
        "full": ("whole files", "second"),
        "patches": ("patches", "first"),
    }
    series = [
        Series(
            names[arm][0],
            names[arm][1],
            [(step, getattr(each, what)) for step, each in sorted(record.steps[arm].items())],
            is_dashed=arm == "patches" and "full" in settings.arms,
            is_wide=arm == "full",
        )
        for arm in ("full", "patches")
        if arm in settings.arms
    ]
    return Chart(title, series, x_title="step").svg()


def _density(record: Record) -> str:
    points = [
        (version, each.n_changed / each.n_elements)
        for version, each in sorted(record.sent["patches"].items())
        if version
    ]
    title = "Changed weights per version, after rounding to bf16"
    return Chart(title, [Series("density", "first", points)], "%", floor=0.0).svg()


def _bytes(record: Record) -> str:
    sent = [each for version, each in sorted(record.sent["patches"].items()) if version]
    patches = [(each.version, float(each.n_bytes)) for each in sent]
    whole = [(each.version, float(each.n_full_bytes)) for each in sent]
    series = [Series("patch", "first", patches), Series("all weights", "second", whole)]
    return Chart("Bytes per version (logarithmic)", series, "B", is_log=True).svg()


def _timings(record: Record, settings: Settings) -> str:
    sent = [each for version, each in sorted(record.sent["patches"].items()) if version]
    active = [each for each in record.activated["patches"] if not each.was_whole]
    series = [
        Series("publish", "first", [(e.version, 1e3 * (e.read_s + e.commit_s)) for e in sent]),
        Series("stage", "second", [(e.version, 1e3 * e.stage_s) for e in active], is_dotted=True),
        Series("pause", "third", [(e.version, 1e3 * e.pause_s) for e in active], is_dotted=True),
    ]
    if "full" in settings.arms:
        whole = [(e.version, 1e3 * e.pause_s) for e in record.activated["full"] if e.version]
        series.append(Series("pause, whole", "fourth", whole, is_dotted=True))
    return Chart("Times per version, all workers (logarithmic)", series, "ms", is_log=True).svg()


def _over_link(record: Record, link: LinkShape) -> str:
    active = [each for each in record.activated["patches"] if not each.was_whole]
    sent = record.sent["patches"]
    measured = [(each.version, 1e3 * each.stage_s) for each in active]
    computed = [
        (version, 1e3 * link.seconds_for(each.n_full_bytes))
        for version, each in sorted(sent.items())
        if version
    ]
    series = [
        Series("patch, measured", "first", measured, is_dotted=True),
        Series("whole file at best, computed", "second", computed),
    ]
    return Chart(f"To a worker over {link}", series, "ms", is_log=True).svg()


def _layers(record: Record) -> str:
    sent = [each for version, each in sorted(record.sent["patches"].items()) if version]
    names = list(sent[0].changed_by_tensor) if sent else []
    rows = {name: [each.changed_by_tensor[name] for each in sent] for name in names}
    if len(rows) > _N_ROWS:
        rows = _by_layer(rows)
    shown = [name.removeprefix("model.").removesuffix(".weight") for name in rows]
    return heat_map("Changed share by tensor and version", shown, list(rows.values()))


def _by_layer(rows: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """The mean over a layer's tensors; tensors of no layer stay."""
    grouped: dict[str, list[list[float]]] = defaultdict(list)
    for name, row in rows.items():
        found = _LAYER.match(name)
        grouped[found[1] if found else name].append(row)
    return {
        name: [sum(column) / len(some) for column in zip(*some, strict=True)]
        for name, some in grouped.items()
    }


def _numbers(summary: Mapping[str, Any]) -> str:
    shown = {
        "parameters": f"{summary['n_parameters']:,}",
        "learning rate": f"{summary['learning_rate']:g}",
        "steps, workers, staleness": (
            f"{summary['n_steps']}, {summary['n_workers']}, {summary['staleness']}"
        ),
        "reward, first and last fifth": (
            f"{summary['reward_first']:.3f} → {summary['reward_last']:.3f}"
        ),
        "changed per version": f"{summary['density']:.2%}",
        "patch, mean": bytes_text(summary["n_patch_bytes"]),
        "all weights": bytes_text(summary["n_full_bytes"]),
        "bytes per change": f"{summary['bytes_per_change']:.2f}",
        "publish, stage, pause (medians)": ", ".join(
            f"{summary[name] * 1e3:.1f} ms" for name in ("publish_s", "stage_s", "pause_s")
        ),
        "workers killed": str(summary["n_killed"]),
        "seconds": f"{summary['seconds']:.0f}",
    }
    rows = (f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in shown.items())
    return "".join(rows)


def _about(settings: Settings) -> str:
    return (
        f"A GRPO trainer with fp32 AdamW masters and {settings.n_workers} rollout processes with"
        f" their own copies of the model ({settings.model}, {settings.engine}), seed"
        f" {settings.seed}. Batch k was generated by version max(0, k − {settings.staleness}). The"
        f" share of weights that change follows from the learning rate: at"
        f" {settings.learning_rate:g} a step moves a weight by about that much, and bf16 shows it"
        " once it crosses a rounding boundary. Rates of large models, around 1e-6, change fewer"
        " weights; a model this small would learn nothing from them in so few steps."
        if settings.model == "tiny"
        else f"SmolLM2-135M at learning rate {settings.learning_rate:g}, {settings.n_workers} rollout"
        f" processes, seed {settings.seed}. Its weights were once 4-bit: fine to see a real model"
        " synced, not to judge how weights of full precision compress."
    )


_STYLE = """
:root{--page:#ffffff;--ink:#1f2328;--soft:#59636e;--grid:#d8dee4;--first:#0969da;--second:#bc4c00;
--third:#1a7f37;--fourth:#8250df;--bad:#cf222e}
@media (prefers-color-scheme:dark){:root{--page:#0d1117;--ink:#e6edf3;--soft:#9198a1;--grid:#30363d;
--first:#58a6ff;--second:#f0883e;--third:#3fb950;--fourth:#bc8cff;--bad:#ff7b72}}
body{margin:0 auto;max-width:1360px;padding:24px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:28px 0 8px}p{max-width:80ch}
ul{list-style:none;padding:0}li::before{content:"✓ ";color:var(--third)}
li.no{color:var(--bad)}li.no::before{content:"✗ ";color:var(--bad)}
th{text-align:left;font-weight:400;color:var(--soft);padding-right:24px}
td{font-variant-numeric:tabular-nums}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,520px),1fr));gap:24px}
figure{margin:0}svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:12px}
svg .title{fill:var(--ink);font-size:13px;font-weight:600}
.grid{stroke:var(--grid);fill:none}.line{fill:none;stroke-width:2}
.line.wide{stroke-width:6;stroke-opacity:.5}.heat{fill:var(--first)}
.line.first{stroke:var(--first)}.line.second{stroke:var(--second)}.line.third{stroke:var(--third)}
.line.fourth{stroke:var(--fourth)}.dot.first{fill:var(--first)}.dot.second{fill:var(--second)}
.dot.third{fill:var(--third)}.dot.fourth{fill:var(--fourth)}
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Weightwire demo</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark"><style>{style}</style></head>
<body><h1>Weightwire demo: {verdict}</h1><p>{about}</p>
<h2>Claims</h2><ul>{claims}</ul>
<h2>Numbers</h2><table>{numbers}</table>
<h2>Plots</h2><main>{figures}</main></body></html>
"""
