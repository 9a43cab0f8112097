"""A torch module as a target: bit for bit where its types are the run's, through its names where not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from weightwire.apply.staging import Staging
from weightwire.apply.targets import MemoryTarget, Ready, Target
from weightwire.diff.state import StateReader
from weightwire.errors import MissingTensor, UnsupportedLayout


class ModuleTarget:
    """Implements ``Target``; the first version that is staged shows which way is needed.

    A module of the run's own types is overwritten directly. One of wider types, such as an fp32
    module that follows a bf16 run, is written through a layout, in which each published element
    has one place. Which of the two it is cannot be known before the run's tensors are.
    """

    def __init__(self, module: Any, n_threads: int | None = None) -> None:
        self._module, self._n_threads = module, n_threads
        self._target: Target = MemoryTarget(module, n_threads)
        self._is_settled = False

    def open(
        self, names: Iterable[str] | None, ties: Mapping[str, str]
    ) -> AbstractContextManager[StateReader | None]:
        """The module's tensors, as far as they can be read as the run's."""
        try:
            return self._target.open(names, ties)
        except UnsupportedLayout:
            if self._is_settled:
                raise
            # A buffer that is no strided memory, for one: a layout need not look at those.
            self._target = layout_target(self._module, self._n_threads)
            return self._target.open(names, ties)

    def prepare(self, staging: Staging, digest: str, *, folder: Path | None) -> Ready:
        """Check that it fits.

        Raises:
            UnsupportedLayout: neither way fits; names the tensor.
        """
        try:
            ready = self._target.prepare(staging, digest, folder=folder)
        except UnsupportedLayout:
            if self._is_settled:
                raise
            target = layout_target(self._module, self._n_threads)
            ready = target.prepare(staging, digest, folder=folder)
            self._target = target
        self._is_settled = True
        return ready

    def activate(self, ready: Ready) -> None:
        """Overwrite."""
        self._target.activate(ready)

    def check(self, ready: Ready) -> None:
        """Read back.

        Raises:
            TargetMismatch: the module does not hold what was written to it.
        """
        self._target.check(ready)


def layout_target(module: Any, n_threads: int | None = None) -> Target:
    """A module seen through its own names, with exact casts where its types are wider."""
    from weightwire.apply.layouts.target import LayoutTarget

    tensors = live_tensors(module)
    return LayoutTarget(loader_by_name(tensors), tensors, n_threads=n_threads)


def live_tensors(module: Any) -> dict[str, Any]:
    """What a module serves from, by the names of its state dict: not copies."""
    return {name: tensor.detach() for name, tensor in module.state_dict(keep_vars=True).items()}


def loader_by_name(tensors: Mapping[str, Any]) -> Callable[[Iterable[tuple[str, Any]]], None]:
    """A loader as engines have them: takes pairs of name and tensor, and copies each to its place."""

    def load(pairs: Iterable[tuple[str, Any]]) -> None:
        for name, tensor in pairs:
            if name not in tensors:
                raise MissingTensor(f"the run has {name!r}, this module does not")
            tensors[name].copy_(tensor)

    return load


def tensors_of_state(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A host-side state as torch tensors that share its memory."""
    import torch  # noqa: F401  as_torch finds it where it was imported

    from weightwire.diff.views import TensorView, as_torch, view_tensor

    for name, array in state.items():
        view = view_tensor(name, array)
        yield name, as_torch(view.array, view.spec.dtype) if isinstance(view, TensorView) else array
