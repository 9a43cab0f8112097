"""Real trainers and engines. They run where their packages are: ``make test-integrations``."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_NEEDED = {
    "vllm": ["vllm"],
    "trl": ["trl", "vllm"],
    "hf": ["transformers"],
    "ray": ["ray"],
    "torch_module": ["transformers"],
    "verl": ["verl", "ray"],
}
"""Folder of tests, and what must be installed for them."""


def _is_missing(package: str) -> bool:
    """A folder of tests with a package's name is not the package."""
    spec = find_spec(package)
    return spec is None or spec.origin is None


collect_ignore = [
    folder for folder, needed in _NEEDED.items() if any(_is_missing(each) for each in needed)
]


def pytest_report_header() -> list[str]:
    """Say what does not run, and how it would."""
    from loopback_only import is_isolated

    lines = []
    if collect_ignore:
        lines.append(
            f"integrations not run, packages missing: {', '.join(collect_ignore)};"
            " `make test-integrations` installs them"
        )
    if not is_isolated():
        lines.append(
            "this process sees a network: tests that start servers on all interfaces are refused;"
            " run them with `python tests/loopback_only.py pytest tests/integrations`"
        )
    return lines


@pytest.fixture(scope="session")
def isolated() -> None:
    """For whatever listens on every interface: only where there is none but loopback."""
    from loopback_only import is_isolated

    if not is_isolated():
        pytest.skip("needs a network of its own: python tests/loopback_only.py pytest …")
