"""TRL warns when it is imported and while it runs, about versions and settings that are not ours."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

# The examples of the pages; the rollout process imports their reward functions by name.
sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "examples" / "integrations"))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import trl.experimental.async_grpo
    import trl.trainer.grpo_trainer  # noqa: F401

_NOT_OURS = (
    "ignore:TRL currently supports vLLM:UserWarning",
    "ignore::DeprecationWarning:trl",
    "ignore::FutureWarning:trl",
    "ignore::FutureWarning:transformers",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let those pass, in this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for each in _NOT_OURS:
                item.add_marker(pytest.mark.filterwarnings(each))
