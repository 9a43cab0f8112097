"""What is in a patch: sizes and densities by tensor, and by exponent as the coding model has them.

Patches are read one bucket at a time. Without the base, the model in each record says how likely
elements of each class change; with it, every element is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from weightwire.codec.class_costs import ClassTally, tally_counted, tally_modelled
from weightwire.codec.patch import Patch
from weightwire.codec.record import Kind, Record, record_bytes
from weightwire.diff.state import StateReader
from weightwire.model import DType, TensorSpec, dtype_named


@dataclass(frozen=True)
class TensorSummary:
    """One tensor's part of a patch."""

    spec: TensorSpec
    kind: Kind
    n_changed: int
    n_bytes: int

    @property
    def density(self) -> float:
        """Share of elements that changed."""
        return self.n_changed / self.spec.n_elements if self.spec.n_elements else 0.0

    @property
    def bits_per_change(self) -> float:
        """Size of the records over changed elements; 0 when none did."""
        return 8 * self.n_bytes / self.n_changed if self.n_changed else 0.0


@dataclass(frozen=True)
class ClassSummary:
    """All elements of one type and exponent, over the whole patch."""

    dtype: DType
    key: int
    n_elements: float
    n_changed: float
    n_bits: float

    @property
    def density(self) -> float:
        """Share of elements that changed: counted, or as the model expects."""
        return self.n_changed / self.n_elements if self.n_elements else 0.0

    @property
    def bits_per_change(self) -> float:
        """Code length over changes; 0 when none did."""
        return self.n_bits / self.n_changed if self.n_changed else 0.0

    @property
    def exponent(self) -> int | None:
        """The power of two that elements of the class lie at; None for what has no exponent."""
        if not self.dtype.key_mask or self.key == 0:
            return None
        return self.key - exponent_bias(self.dtype)


@dataclass(frozen=True)
class PatchSummary:
    """A patch, looked at."""

    tensors: tuple[TensorSummary, ...]
    """Those with records, in the patch's order."""
    classes: tuple[ClassSummary, ...]
    """By type and rising exponent; empty unless asked for, and for plain patches."""
    is_counted: bool
    """Whether ``classes`` were counted against the base; otherwise they are the model's."""


def inspect_patch(
    patch: Patch,
    base: StateReader | None = None,
    *,
    by_class: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> PatchSummary:
    """Read a whole patch and sum it up; ``progress`` is told the dense bytes records stand for.

    Raises:
        RetryError: the patch is damaged.
        BaseMismatch, MissingTensor: ``base`` is not the state the patch was made for.
    """
    tally = ClassTally()
    sizes: dict[str, int] = {}
    for record in patch.records():
        name = record.head.spec.name
        sizes[name] = sizes.get(name, 0) + len(record_bytes(record))
        if by_class and record.head.kind is Kind.COMPACT:
            _tally(tally, record, base)
        progress(record.head.n_elements * record.head.spec.dtype.n_bytes)
    return PatchSummary(
        tensors=tuple(_tensors(patch, sizes)),
        classes=tuple(_classes(tally)),
        is_counted=base is not None,
    )


def exponent_bias(dtype: DType) -> int:
    """What is taken off a float's exponent field; the types without negative zero have one more."""
    return dtype.key_mask // 2 + dtype.name.endswith("FNUZ")


def _tally(tally: ClassTally, record: Record, base: StateReader | None) -> None:
    if base is None:
        tally_modelled(tally, record)
    else:
        tally_counted(tally, record, base)


def _tensors(patch: Patch, sizes: dict[str, int]) -> Iterator[TensorSummary]:
    for name, pieces in patch.heads.items():
        n_changed = sum(head.n_changed for _, head in pieces)
        yield TensorSummary(pieces[0][1].spec, pieces[0][1].kind, n_changed, sizes[name])


def _classes(tally: ClassTally) -> Iterator[ClassSummary]:
    for (dtype_name, key), cost in sorted(tally.costs.items()):
        if cost.n_elements:
            yield ClassSummary(
                dtype_named(dtype_name), key, cost.n_elements, cost.n_changed, cost.n_bits
            )
