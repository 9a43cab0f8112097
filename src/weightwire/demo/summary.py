"""The run in a dozen numbers: for programs, for the last lines on a terminal, and for the report."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from weightwire.cli.numbers import bytes_text
from weightwire.demo.events import Sent
from weightwire.demo.run import Outcome
from weightwire.demo.settings import Settings
from weightwire.testing.link import LinkShape


def summary_of(outcome: Outcome, settings: Settings, link: LinkShape | None) -> dict[str, Any]:
    """Numbers by name, ready for JSON."""
    record = outcome.record
    sent = _without_first(record.sent["patches"].values())
    staged = [each for each in record.activated["patches"] if not each.was_whole]
    steps = [each for _, each in sorted(record.steps["patches"].items())]
    n_tail = max(1, len(steps) // 5)
    n_full_bytes = sent[-1].n_full_bytes if sent else 0
    return {
        "model": settings.model,
        "engine": settings.engine,
        "n_parameters": record.warmed_up.n_parameters if record.warmed_up else 0,
        "learning_rate": settings.learning_rate,
        "n_steps": settings.n_steps,
        "n_workers": settings.n_workers,
        "staleness": settings.staleness,
        "seed": settings.seed,
        "seconds": outcome.seconds,
        "reward_first": _mean(each.reward for each in steps[:n_tail]),
        "reward_last": _mean(each.reward for each in steps[-n_tail:]),
        "density": _mean(each.n_changed / each.n_elements for each in sent),
        "n_patch_bytes": _mean(each.n_bytes for each in sent),
        "n_full_bytes": n_full_bytes,
        "bytes_per_change": _mean(each.n_bytes / max(each.n_changed, 1) for each in sent),
        "publish_s": _median(each.read_s + each.commit_s for each in sent),
        "stage_s": _median(each.stage_s for each in staged),
        "pause_s": _median(each.pause_s for each in staged),
        "full_stage_s": _median(each.stage_s for each in record.activated["full"]),
        "full_pause_s": _median(each.pause_s for each in record.activated["full"]),
        "n_killed": len(record.killed),
        "n_activations": len(record.activated["patches"]) + len(record.activated["full"]),
        "link": str(link) if link else None,
        "link_full_s": link.seconds_for(n_full_bytes) if link else None,
        "is_proven": outcome.is_proven,
        "claims": [
            {"claim": each.claim, "holds": each.holds, "n_checked": each.n_checked}
            for each in outcome.verdicts
        ],
    }


def summary_text(summary: dict[str, Any], outcome: Outcome) -> str:
    """The same for people."""
    patch, full = summary["n_patch_bytes"], summary["n_full_bytes"]
    lines = [
        "",
        f"{summary['n_parameters']:,} parameters, learning rate {summary['learning_rate']:g},"
        f" {summary['n_steps']} steps, {summary['seconds']:.0f} s",
        f"reward {summary['reward_first']:.3f} → {summary['reward_last']:.3f}"
        f" (mean of the first and the last fifth)",
        f"{summary['density']:.2%} of the weights changed per step; a patch is {bytes_text(patch)},"
        f" a whole file {bytes_text(full)}: {full / max(patch, 1):.0f} × smaller,"
        f" {summary['bytes_per_change']:.2f} bytes per change",
        f"publish {_ms(summary['publish_s'])}, stage {_ms(summary['stage_s'])},"
        f" pause {_ms(summary['pause_s'])} (medians)",
    ]
    if summary["link"]:
        lines.append(_link_text(summary))
    if summary["engine"] == "vllm":
        lines.append(
            "vLLM batches by arrival, so two runs need not sample the same tokens:"
            " weights are compared, losses of a second run are not"
        )
    lines += ["", *(f"{'✓' if each.holds else '✗'} {each}" for each in outcome.verdicts)]
    return "\n".join(lines)


def _link_text(summary: dict[str, Any]) -> str:
    """Measured where it was measured; where only patches were sent, the other side is computed."""
    text = f"over {summary['link']}: {_ms(summary['stage_s'])} to stage a version"
    if summary["full_stage_s"]:
        return f"{text}, {_ms(summary['full_stage_s'])} as a whole file (both measured)"
    return f"{text} (measured), {_ms(summary['link_full_s'])} as a whole file at best (computed)"


def _without_first(sent: Iterable[Sent]) -> list[Sent]:
    """Version 0 is an anchor: everything is new in it."""
    return [each for each in sent if each.version]


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / len(found) if found else 0.0


def _median(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return median(found) if found else 0.0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
