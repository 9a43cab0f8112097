"""An engine's parameters while its loader runs dry: which memory is whose, and that it stays so."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from weightwire.apply.layouts.engine_memory import EngineMemory, memory_of
from weightwire.apply.layouts.layout import Place
from weightwire.errors import UnsupportedLayout


def signature(pairs: Iterable[tuple[str, Any]]) -> tuple[tuple[Any, ...], ...]:
    """Equal exactly as long as every parameter is the same memory, seen the same way."""
    return tuple((name, t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for name, t in pairs)


@contextmanager
def registrations_undone() -> Iterator[None]:
    """Modules have afterwards the parameters and buffers they had before, whatever was assigned."""
    from torch.nn.modules import module as modules

    before: dict[tuple[int, str], tuple[dict[str, Any], Any]] = {}
    mine = threading.get_ident()

    def note(module: Any, name: str, _: object) -> None:
        if threading.get_ident() != mine:
            return
        for owned in (module._parameters, module._buffers):
            if name in owned:
                before.setdefault((id(owned), name), (owned, owned[name]))

    hooks = (
        modules.register_module_parameter_registration_hook(note),
        modules.register_module_buffer_registration_hook(note),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for (_, name), (owned, tensor) in before.items():
            owned[name] = tensor


class EngineParameters:
    """A look-up of storages, for the time of one dry run."""

    def __init__(self, pairs: Iterable[tuple[str, Any]]) -> None:
        """Take note of every parameter.

        Raises:
            UnsupportedLayout: one is not strided memory.
        """
        self._pairs = [(name, tensor) for name, tensor in pairs if tensor.numel()]
        self._before = [(name, tensor, tensor.data) for name, tensor in self._pairs]
        self._numbers: dict[tuple[int, int], int] = {}
        self._owners: list[list[tuple[str, Any]]] = []
        for name, tensor in self._pairs:
            self._add(name, tensor.data)
        self._storages = {storage for storage, _ in self._numbers}

    @property
    def places(self) -> tuple[Place, ...]:
        """Every parameter."""
        return tuple(self._place(name, data) for name, _, data in self._before)

    def memories(self) -> tuple[EngineMemory, ...]:
        """Every storage, once."""
        return tuple(memory_of(owners[0][1]) for owners in self._owners)

    def sizes(self) -> tuple[int, ...]:
        """Elements in each storage."""
        return tuple(
            owners[0][1].untyped_storage().nbytes() // owners[0][1].element_size()
            for owners in self._owners
        )

    def owns(self, tensor: Any) -> bool:
        """Whether a tensor lies in a parameter's storage."""
        return hasattr(tensor, "untyped_storage") and _storage(tensor) in self._storages

    def memory(self, tensor: Any) -> int:
        """Which storage a tensor lies in.

        Raises:
            UnsupportedLayout: it sees the parameter as elements of another size.
        """
        key = (_storage(tensor), tensor.element_size())
        if key not in self._numbers:
            raise UnsupportedLayout(f"a parameter is written as {tensor.dtype}, and is not of it")
        return self._numbers[key]

    def place(self, tensor: Any) -> Place:
        """Where a tensor lies, with the name of the parameter around it."""
        owners, at = self._owners[self.memory(tensor)], tensor.storage_offset()
        around = [name for name, data in owners if _starts(data) <= at < _stops(data)]
        return self._place(around[0] if around else owners[0][0], tensor)

    def restore(self) -> str | None:
        """Give every parameter its memory back; names the first that had lost it."""
        moved = None
        for name, tensor, data in self._before:
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                tensor.data = data
                moved = moved or name
        return moved

    def _add(self, name: str, data: Any) -> None:
        if str(data.layout) != "torch.strided" or data.device.type == "meta":
            raise UnsupportedLayout(f"parameter {name!r:.200}: {data.layout} on {data.device}")
        key = (_storage(data), data.element_size())
        if key not in self._numbers:
            self._numbers[key] = len(self._owners)
            self._owners.append([])
        self._owners[self._numbers[key]].append((name, data))

    def _place(self, name: str, tensor: Any) -> Place:
        return Place(
            name,
            self.memory(tensor),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
        )


def _storage(tensor: Any) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _starts(data: Any) -> int:
    offset: int = data.storage_offset()
    return offset


def _stops(data: Any) -> int:
    reach: int = sum((n - 1) * s for n, s in zip(data.shape, data.stride(), strict=True))
    return _starts(data) + reach + 1
