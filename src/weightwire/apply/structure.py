"""Does a patch only change values, or also which tensors there are?"""

from __future__ import annotations

from weightwire.codec.patch import Patch


def restructures(patch: Patch) -> bool:
    """Whether the patch adds, removes, retypes or reshapes tensors, so that no overwriting can do."""
    return bool(patch.index.removed) or any(
        pieces[0][1].is_fresh for pieces in patch.heads.values()
    )
