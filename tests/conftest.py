from __future__ import annotations

import json
from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many worlds were run and how many faults they met."""
    faults: Counter[str] = Counter()
    n_worlds = 0
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        found = dict(getattr(report, "user_properties", ()))
        if getattr(report, "when", "") == "call" and "faults" in found:
            faults.update(json.loads(str(found["faults"])))
            n_worlds += int(str(found["worlds"]))
    if n_worlds:
        terminalreporter.write_line(
            f"simulated worlds: {n_worlds:,}, with {faults.total():,} faults of {len(faults)} kinds"
        )
