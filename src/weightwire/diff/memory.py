"""A state that lives in memory: a dict, a torch module, or pairs of name and tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from weightwire.diff.device_views import DeviceView
from weightwire.diff.state import DerivedState
from weightwire.diff.views import TensorView, is_torch, view_tensor
from weightwire.errors import DuplicateTensor
from weightwire.model import Bits, TensorSpec

if TYPE_CHECKING:
    import torch

State: TypeAlias = Any
"""Names and tensors: a mapping, a torch module, pairs, a reader, or a callable that gives one."""


class MemoryState:
    """Implements ``StateReader`` and ``DeviceReader`` over live tensors, without copying them."""

    def __init__(self, tensors: Iterable[tuple[str, Any]]) -> None:
        self.views: dict[str, TensorView | DeviceView] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._ties: dict[str, str] = {}
        self._torch_names: set[str] = set()
        first_name: dict[object, str] = {}
        for name, tensor in tensors:
            self._add(name, view_tensor(name, tensor), first_name)
            if is_torch(tensor):
                self._torch_names.add(name)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor that is not an alias."""
        return self._specs

    @property
    def ties(self) -> Mapping[str, str]:
        """Names of the same storage: a tied tensor is handled once."""
        return self._ties

    @property
    def torch_names(self) -> frozenset[str]:
        """The tensors that are torch's, to be rounded as torch rounds."""
        return frozenset(self._torch_names)

    def read(self, name: str, start: int, stop: int) -> Bits:
        """A view of live memory where it is contiguous."""
        return self.views[name].read(start, stop)

    def read_device(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """A view of a device's memory, where the tensor is there and contiguous."""
        view = self.views[name]
        return view.read_device(start, stop) if isinstance(view, DeviceView) else None

    def _add(self, name: str, view: TensorView | DeviceView, first_name: dict[object, str]) -> None:
        if name in self.views or name in self._ties:
            raise DuplicateTensor(f"{name!r} occurs twice in one state")
        if view.spec.n_elements and view.storage in first_name:
            self._ties[name] = first_name[view.storage]
            return
        first_name.setdefault(view.storage, name)
        self.views[name] = view
        self._specs[name] = view.spec


def tensors_of(state: State) -> Iterable[tuple[str, Any]]:
    """Names and tensors of whatever a user calls a state."""
    if isinstance(state, Mapping):
        return state.items()
    if hasattr(state, "state_dict"):
        # keep_vars: state_dict() would detach, which is right, but also copy on some modules.
        return dict(state.state_dict(keep_vars=True)).items()
    return state  # type: ignore[no-any-return]


def open_state(state: State) -> Any:
    """The state as a ``StateReader``: readers pass through, everything else is viewed as it is now."""
    if isinstance(state, DerivedState):
        return state.reader()
    if hasattr(state, "specs") and hasattr(state, "read"):
        return state
    if is_maker(state):
        return open_state(state())
    return MemoryState(tensors_of(state))


def is_maker(state: State) -> bool:
    """Whether it is called to give tensors; a module can be called too, but not for that."""
    return callable(state) and not hasattr(state, "state_dict")
