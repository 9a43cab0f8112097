"""The engine's own loader, run dry: what it would copy where, and nothing is copied.

The loader gets tensors of the right type and shape that nobody ever touches, so they cost address
space and no memory. Below Python, every operation passes by ``dry_run`` first. A copy from such a
*probe* to a parameter is written down instead of done: the strides of the two views say all there
is to say. What a loader computes from a probe is *unknown*, and refused if it goes to a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from weightwire.apply.layouts.engine_parameters import (
    EngineParameters,
    registrations_undone,
    signature,
)
from weightwire.apply.layouts.layout import DryRun, Layout, Padding, Part, check_layout
from weightwire.errors import UnsupportedLayout
from weightwire.model import TensorSpec

if TYPE_CHECKING:
    from weightwire.apply.layouts.dry_run import DryRunMode

Load = Callable[[Iterator[tuple[str, Any]]], object]
"""An engine's loader: takes checkpoint names and tensors, in any order, and fills parameters."""

ListParameters = Callable[[], Iterable[tuple[str, Any]]]
"""Gives an engine's parameters by name, as they are now."""


class _LoaderFailed(UnsupportedLayout):
    """The engine's loader raised an error of its own."""


def trace(
    load: Load,
    specs: Mapping[str, TensorSpec],
    parameters: ListParameters,
    ties: Mapping[str, str] | None = None,
) -> Layout:
    """Where an engine's loader would put a checkpoint; its parameters stay bit for bit as they are.

    ``ties`` are names of the run that share another one's bits. The loader is offered them too:
    an engine that does not tie them keeps a copy.

    Raises:
        UnsupportedLayout: names a parameter that cannot be followed.
    """
    aliases = dict(ties or {})
    try:
        first = _run(load, specs, parameters, aliases, seed=0)
    except _LoaderFailed:
        if not aliases:
            raise
        # Checkpoints do not have the aliases; a loader may not know them.
        aliases = {}
        first = _run(load, specs, parameters, aliases, seed=0)
    mode, run = first
    if mode.took_scalars:
        _, again = _run(load, specs, parameters, aliases, seed=1)
        _require_same(run, again)
    return check_layout(specs, run)


def _run(
    load: Load,
    specs: Mapping[str, TensorSpec],
    parameters: ListParameters,
    ties: Mapping[str, str],
    seed: int,
) -> tuple[DryRunMode, DryRun]:
    import torch

    from weightwire.apply.layouts.dry_run import DryRunMode

    pairs = [*parameters()]
    before, engine = signature(pairs), EngineParameters(pairs)
    mode, after = DryRunMode(engine, ties, seed), before
    try:
        with registrations_undone():
            with torch.no_grad(), mode:
                load(mode.probes(specs))
            after = signature(parameters())
    except Exception as error:
        raise mode.refusal or _failed(mode.latest, error) from error
    finally:
        moved = engine.restore()
    if mode.refusal is not None:
        raise mode.refusal
    _require_unmoved(moved, before, after)
    return mode, DryRun(mode.written, engine.places, engine.memories(), engine.sizes())


def _failed(name: str, error: Exception) -> _LoaderFailed:
    return _LoaderFailed(
        f"the engine's loader fails on the run's tensor {name!r:.200} in a dry run:"
        f" {type(error).__name__}: {error}"
    )


def _require_unmoved(
    moved: str | None, before: tuple[tuple[Any, ...], ...], after: tuple[tuple[Any, ...], ...]
) -> None:
    """A loader that swaps parameters for others leaves nothing to write to."""
    if moved is None and before == after:
        return
    names = [entry[0] for entry in {*before} ^ {*after}]
    raise UnsupportedLayout(
        f"parameter {moved or min(names, default='?')!r:.200}: its loader replaces the tensor"
        " instead of filling it; its new memory cannot be known before it is loaded"
    )


def _require_same(one: DryRun, other: DryRun) -> None:
    """Numbers taken from probes differ between two runs: so does whatever was computed from them."""
    if [_gist(w) for w in one.written] == [_gist(w) for w in other.written]:
        return
    pairs = zip(one.written, other.written, strict=False)
    names = [_name(a) for a, b in pairs if _gist(a) != _gist(b)]
    raise UnsupportedLayout(
        f"parameter {(names or ['?'])[0]!r:.200}: its loader computes with a number it loaded"
    )


def _name(written: Part | Padding) -> str:
    return written.parameter if isinstance(written, Part) else written.place.parameter


def _gist(written: Part | Padding) -> object:
    if isinstance(written, Part):
        return written
    return written.place, written.value.flatten().tolist()
