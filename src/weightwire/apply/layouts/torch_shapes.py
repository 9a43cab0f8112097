"""Torch shapes without the elements: what a dry run makes instead of results.

Only imported where torch is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def written_by(func: Any, args: tuple[Any, ...], kwargs: Any) -> list[torch.Tensor]:
    """The tensors an operation writes to."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return found


def shape_only(value: Any) -> Any:
    """A tensor without memory, of the same shape and strides; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def without_device(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an operation that also make sense without memory."""
    return {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory", "non_blocking")}


def untouched_like(shape: Any, source: torch.Tensor, kwargs: Mapping[str, Any]) -> Any:
    """Memory for a shape, on the device the operation would have used; nobody has written to it."""
    if not isinstance(shape, torch.Tensor):
        return shape
    device = kwargs.get("device") or source.device
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)
