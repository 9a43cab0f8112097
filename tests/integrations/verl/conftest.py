"""verl warns when it is imported, about Ray and about machines without an accelerator."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import verl.checkpoint_engine  # noqa: F401
