"""Does a patch only change values, or also which tensors there are?"""

from __future__ import annotations

from weightwire.codec.patch import Patch
from weightwire.codec.record import Kind, RecordHead


def restructures(patch: Patch) -> bool:
    """Whether the patch adds, removes, retypes or reshapes tensors, so that no overwriting can do."""
    return bool(patch.index.removed) or any(
        is_fresh(pieces[0][1]) for pieces in patch.heads.values()
    )


def is_fresh(head: RecordHead) -> bool:
    """Whether a tensor has to be made anew: it is new, or has another type or shape than before."""
    return head.kind is Kind.FULL or head.base_shape != head.spec.shape
