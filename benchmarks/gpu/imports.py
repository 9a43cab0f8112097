"""Which modules load here: a bare machine lacks some, and a benchmark should say so first."""

from __future__ import annotations

import importlib
import sys

NEEDED = (
    "numpy",
    "torch",
    "triton",
    "weightwire.kernels",
    "weightwire.kernels.reference",
    "weightwire.codec.piece",
)
WANTED = (
    "weightwire.kernels.native",
    "weightwire.kernels.triton.launch",
    "weightwire.kernels.triton.digest",
    "weightwire.kernels.triton.scatter",
    "weightwire.kernels.triton.encode",
    "weightwire.kernels.triton.decode",
    "weightwire.digest",
    "ml_dtypes",
    "pytest",
    "hypothesis",
)


def load_error(name: str) -> str | None:
    """Why a module does not load; None if it does."""
    try:
        importlib.import_module(name)
    except Exception as error:  # A compiler's message is as welcome as a missing file's.
        return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    """Print what is missing; fail if the benchmark cannot do without it."""
    missing = {name: why for name in NEEDED + WANTED if (why := load_error(name)) is not None}
    for name, why in missing.items():
        print(f"import {name}: {why}")
    print(f"imports: {len(NEEDED) + len(WANTED) - len(missing)} load, {len(missing)} do not")
    return int(any(name in missing for name in NEEDED))


if __name__ == "__main__":
    sys.exit(main())
