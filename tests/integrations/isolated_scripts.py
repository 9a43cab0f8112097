"""Scripts that the tests run as users would: in a process of their own, where nobody can reach it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LOOPBACK_ONLY = ROOT / "tests" / "loopback_only.py"


@contextmanager
def ray_environment() -> Iterator[dict[str, str]]:
    """Ray's files go to a folder of its own; a short name, because sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="ww-") as folder:
        yield {
            **os.environ,
            "HOME": folder,
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }


def run_isolated(script: Path, *arguments: object, environment: Mapping[str, str]) -> str:
    """Ray listens on all interfaces: it runs where there is only loopback, or not at all."""
    if not _can_isolate():
        pytest.skip("no network namespace can be made here, and Ray listens on all interfaces")
    return run_script(script, *arguments, environment=environment, before=(str(_LOOPBACK_ONLY),))


def run_script(
    script: Path,
    *arguments: object,
    environment: Mapping[str, str],
    before: tuple[str, ...] = (),
    timeout_s: float = 400,
) -> str:
    """What a script prints; it must end well."""
    prefix = [sys.executable, *before] if before else []
    done = subprocess.run(
        [*prefix, sys.executable, str(script), *map(str, arguments)],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def example_of(page: str, name: str) -> Path:
    """An example's file, once it is certain that the page shows just that."""
    example = ROOT / "docs" / "examples" / "integrations" / name
    text = (ROOT / "docs" / "integrations" / page).read_text()
    assert f"```python\n{example.read_text()}```" in text, f"{page} does not show {name} as it is"
    return example


@cache
def _can_isolate() -> bool:
    look = f"import sys; sys.path.insert(0, {str(_LOOPBACK_ONLY.parent)!r}); import loopback_only;"
    command = [sys.executable, "-c", f"{look} sys.exit(not loopback_only.isolate())"]
    return subprocess.run(command, check=False).returncode == 0
