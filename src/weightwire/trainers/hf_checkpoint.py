"""A transformers model as the checkpoint ``save_pretrained`` would write, without writing or copying it.

Inside a process a model has other names than on disk: tied tensors twice, wrappers' prefixes, and
experts stacked that the checkpoint keeps apart. Engines read checkpoints, so those are the names that
are published. Tensors are viewed where they lie; only stacked ones are taken apart, one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightwire.diff.device_streams import stream_now
from weightwire.diff.device_views import as_integers, empty_integers
from weightwire.diff.views import torch_bits, torch_element_type
from weightwire.errors import ExtraMissing, NotACheckpoint, UnsupportedLayout
from weightwire.kernels.devices import is_reached
from weightwire.model import Bits, TensorSpec
from weightwire.trainers.hf_models import (
    refuse_foreign_shards,
    refuse_what_is_not_whole,
    unwrap,
)

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What torch.compile and activation checkpointing put into names."""

_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Group:
    """Tensors of the model, and the tensors of the checkpoint that are made of them together."""

    sources: tuple[str, ...]
    shapes: _Shapes


@dataclass(frozen=True)
class _Plan:
    """Which tensor of the checkpoint comes from where; holds until the model's structure changes."""

    structure: _Shapes
    renamed: dict[str, str]
    """Checkpoint name to model name, where it is the same tensor."""
    groups: tuple[_Group, ...]


class HfCheckpoint:
    """The checkpoint of a live model; ``reader`` opens it as it is now."""

    def __init__(self, model: Any) -> None:
        """Take a ``PreTrainedModel``, wrapped or not.

        Raises:
            UnsupportedLayout: adapters, quantised or sharded weights: ``save_pretrained`` would write
                something that is not this model's bits.
        """
        refuse_foreign_shards(model)
        self.model = unwrap(model)
        refuse_what_is_not_whole(self.model)
        self._plan: _Plan | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of it, as FSDP2 does it."""
        return any(hasattr(parameter, "device_mesh") for parameter in self.model.parameters())

    def reader(self) -> HfReader:
        """The tensors as they are now; for ``Publisher`` and ``cast``."""
        tensors = _plain_names(self.model.state_dict())
        return HfReader(self.model, tensors, self._planned(tensors))

    def shards(self) -> dict[str, Any]:
        """This rank's shards as they are now, by the checkpoint's names; for ``ShardedPublisher``.

        Raises:
            UnsupportedLayout: a tensor that the checkpoint has in another shape.
        """
        tensors = _plain_names(self.model.state_dict())
        plan = self._planned(tensors)
        for group in plan.groups:
            raise UnsupportedLayout(
                f"{group.sources[0]!r} is sharded, and is saved as {len(group.shapes)} tensors:"
                " stacked experts are published where a rank holds them whole"
            )
        return {name: tensors[source] for name, source in plan.renamed.items()}

    def pieces(self, name: str, tensor: Any) -> Iterable[tuple[str, Any]]:
        """What one tensor of the model is in the checkpoint, for trainers that give them one by one.

        Raises:
            UnsupportedLayout: it is saved together with others, which are not at hand.
        """
        plan = self._plan or self._planned(_plain_names(self.model.state_dict()))
        if name not in plan.structure:
            return [(name, tensor)]
        saved_as = [each for each, source in plan.renamed.items() if source == name]
        if saved_as:
            return [(saved_as[0], tensor)]
        return self._apart(name, tensor, plan)

    def _planned(self, tensors: Mapping[str, Any]) -> _Plan:
        structure = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if self._plan is None or self._plan.structure != structure:
            self._plan = _make_plan(self.model, tensors, structure)
        return self._plan

    def _apart(self, name: str, tensor: Any, plan: _Plan) -> Iterable[tuple[str, Any]]:
        groups = [group for group in plan.groups if name in group.sources]
        if groups and len(groups[0].sources) > 1:
            raise UnsupportedLayout(
                f"{name!r} is saved together with {len(groups[0].sources) - 1} other tensors, and"
                " this trainer gives them one by one: use weightwire.trainers.hf.WeightwireCallback"
            )
        return as_saved(self.model, {name: tensor.detach()}).items() if groups else []

    def keeps_wide(self, dtype: str) -> tuple[str, ...]:
        """Parts of names that transformers keeps in fp32 when it loads a model in ``dtype``."""
        parts = set(getattr(self.model, "_keep_in_fp32_modules_strict", None) or ())
        if dtype in {"fp16", "float16"}:
            parts |= set(getattr(self.model, "_keep_in_fp32_modules", None) or ())
        return tuple(sorted(parts))


def architecture(model: str | os.PathLike[str]) -> HfCheckpoint:
    """The checkpoint of a model that has no memory: its names, from its config alone.

    Raises:
        NotACheckpoint: there is no config that transformers reads.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(os.fspath(model))
    except (OSError, ValueError) as error:
        raise NotACheckpoint(f"{os.fspath(model)!r} has no config to read: {error}") from error
    kind = getattr(
        transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM
    )
    make = getattr(kind, "from_config", kind)
    with torch.device("meta"):
        return HfCheckpoint(make(config))


class HfReader:
    """Implements ``StateReader``, ``DeviceReader`` and ``DeviceMaker`` over live tensors on any device.

    What kernels reach is shown to them where it lies; for the host it is copied, a piece at a time.
    Of tensors that must be taken apart, one group is converted at a time, on its own device and by the
    current stream. Pieces there are views of their group, and keep all of its memory: a run of them
    costs up to two groups beyond its own bytes, the one it begins in and the one it ends in.
    """

    def __init__(self, model: Any, tensors: Mapping[str, Any], plan: _Plan) -> None:
        self._model, self._tensors, self._plan = model, tensors, plan
        self._group_of = {name: group for group in plan.groups for name in group.shapes}
        self._specs = {spec.name: spec for spec in self._all_specs()}
        self._devices = dict(self._all_devices())
        self._group: tuple[_Group, Any] | None = None
        self._converted: dict[str, Any] = {}
        self._flat: tuple[tuple[str, Any], Any] | None = None

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor of the checkpoint."""
        return self._specs

    @property
    def ties(self) -> Mapping[str, str]:
        """None: a checkpoint has tied tensors once."""
        return {}

    @property
    def torch_names(self) -> frozenset[str]:
        """All of them are torch's."""
        return frozenset(self._specs)

    def read(self, name: str, start: int, stop: int) -> Bits:
        """A view of live memory where it is contiguous and the CPU's, else a copy of this piece."""
        return torch_bits(self._flattened(name)[start:stop].cpu(), self._specs[name].dtype)

    def read_device(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """A view of a device's memory, live or converted there; nothing is converted for no elements."""
        if name not in self._devices:
            return None
        dtype = self._specs[name].dtype
        if start == stop:
            return empty_integers(0, dtype, self._devices[name])
        return as_integers(self._flattened(name)[start:stop], dtype)

    def makes_device_bits(self, name: str) -> bool:
        """Whether it is taken apart from others: its group is made, and kept by its pieces."""
        return name in self._group_of

    def _all_specs(self) -> Iterable[TensorSpec]:
        for name, source in self._plan.renamed.items():
            tensor = self._tensors[source]
            yield TensorSpec(name, torch_element_type(name, tensor.dtype), tuple(tensor.shape))
        for group in self._plan.groups:
            dtype = torch_element_type(group.sources[0], self._tensors[group.sources[0]].dtype)
            for name, shape in group.shapes.items():
                yield TensorSpec(name, dtype, shape)

    def _all_devices(self) -> Iterable[tuple[str, torch.device]]:
        """Of the tensors that kernels reach, found out without converting any."""
        for name, source in self._plan.renamed.items():
            tensor = self._tensors[source]
            if tensor.is_contiguous() and is_reached(tensor):
                yield name, tensor.device
        for group in self._plan.groups:
            sources = [self._tensors[source] for source in group.sources]
            if len({each.device for each in sources}) == 1 and all(map(is_reached, sources)):
                yield from ((name, sources[0].device) for name in group.shapes)

    def _flattened(self, name: str) -> Any:
        key = (name, self._stream(name))
        if self._flat is None or self._flat[0] != key:
            self._flat = None  # a view of a group would keep it while the next one is made
            self._flat = (key, self._tensor(name).detach().reshape(-1).contiguous())
        return self._flat[1]

    def _tensor(self, name: str) -> Any:
        if name in self._plan.renamed:
            return self._tensors[self._plan.renamed[name]]
        group = self._group_of[name]
        key = (group, self._stream(name))
        if self._group != key:
            self._group = None
            self._converted.clear()  # before the next one is made: one group at a time
            sources = {source: self._tensors[source].detach() for source in group.sources}
            self._converted = as_saved(self._model, sources)
            self._group = key
        return self._converted[name]

    def _stream(self, name: str) -> Any:
        """Who makes what is made now: it is kept for that stream alone."""
        group = self._group_of.get(name)
        source = self._plan.renamed[name] if group is None else group.sources[0]
        return stream_now(self._tensors[source].device)


def as_saved(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """These tensors under the names and in the shapes that ``save_pretrained`` gives them.

    Raises:
        ExtraMissing: transformers is older than 5.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise ExtraMissing(
            f"needs transformers 5: pip install 'transformers>=5' ({error})"
        ) from None
    saved: dict[str, Any] = revert_weight_conversion(model, dict(tensors))
    return saved


def _plain_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, tensor in tensors.items():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")  # noqa: PLW2901
        plain[name] = tensor
    return plain


def _make_plan(model: Any, tensors: Mapping[str, Any], structure: _Shapes) -> _Plan:
    kept = {
        name: torch.empty_like(tensors[name], device="meta") for name in _untied(model, tensors)
    }
    saved = as_saved(model, kept)
    source_of = {id(tensor): name for name, tensor in kept.items()}
    renamed = {name: source_of[id(t)] for name, t in saved.items() if id(t) in source_of}
    others = {name: t for name, t in kept.items() if name not in set(renamed.values())}
    shapes = {name: tuple(t.shape) for name, t in saved.items() if name not in renamed}
    return _Plan(structure, renamed, tuple(_groups(model, others, shapes)))


def _without_memory(tensor: Any) -> Any:
    """A whole tensor, of a shard too: conversions are tried out on it."""
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")


def _untied(model: Any, tensors: Mapping[str, Any]) -> Iterable[str]:
    """Names that ``save_pretrained`` keeps: each storage once, and nothing that is never saved."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    saved = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    return list(remove_tied_weights_from_state_dict(saved, model))


def _groups(model: Any, sources: Mapping[str, Any], shapes: _Shapes) -> Iterable[_Group]:
    """One group per tensor where it can be converted by itself; what is left, together."""
    together, left = [], dict(shapes)
    for name, tensor in sources.items():
        alone = _converted_alone(model, name, tensor)
        if alone and all(left.get(each) == shape for each, shape in alone.items()):
            left = {each: shape for each, shape in left.items() if each not in alone}
            yield _Group((name,), alone)
        else:
            together.append(name)
    if together or left:
        yield _Group(tuple(together), left)


def _converted_alone(model: Any, name: str, tensor: Any) -> _Shapes:
    try:
        return {each: tuple(t.shape) for each, t in as_saved(model, {name: tensor}).items()}
    except (RuntimeError, ValueError, KeyError):
        return {}  # it needs its neighbours
