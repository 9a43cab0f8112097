from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from sample_engines import Engine, bits_in, checkpoint
from torch import nn

from weightwire.apply.layouts.layout import Layout
from weightwire.apply.layouts.trace import trace
from weightwire.apply.layouts.writes import fill_paddings, load_parts
from weightwire.diff.memory import open_state
from weightwire.errors import UnsupportedLayout

Pairs = Iterable[tuple[str, torch.Tensor]]


class Holder(nn.Module):
    """Two parameters, filled by whatever loader a test gives it."""

    def __init__(self, load: Callable[[Holder, torch.Tensor], object], *shape: int) -> None:
        super().__init__()
        self.load = load
        self.w = nn.Parameter(torch.full(shape or (4, 6), 9.0), requires_grad=False)
        self.other = nn.Parameter(torch.full((3,), 9.0), requires_grad=False)

    def load_weights(self, pairs: Pairs) -> None:
        for _, tensor in pairs:
            self.load(self, tensor)


def traced(holder: Holder, tensor: torch.Tensor | None = None) -> Layout:
    tensor = torch.arange(24.0).reshape(4, 6) if tensor is None else tensor
    specs = open_state({"t": tensor}).specs
    before = bits_in(holder)
    try:
        return trace(holder.load_weights, specs, holder.named_parameters)
    finally:
        assert bits_in(holder) == before


def refused(load: Callable[[Holder, torch.Tensor], object], match: str, *shape: int) -> None:
    with pytest.raises(UnsupportedLayout, match=match):
        traced(Holder(load, *shape))


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_dry_run_leaves_an_engine_bit_for_bit_as_it_is(n_ranks: int) -> None:
    engine = Engine(n_ranks - 1, n_ranks)
    tensors = checkpoint()
    reader = open_state(tensors)
    before = bits_in(engine)
    layout = trace(engine.load_weights, reader.specs, engine.tensors, reader.ties)
    assert bits_in(engine) == before
    assert layout.untouched == ("cache",)
    assert "layer.rotary.inv_freq" not in layout.parts


def test_loader_that_dies_half_way_leaves_everything_as_it_was_and_is_quoted() -> None:
    def load(holder: Holder, tensor: torch.Tensor) -> None:
        holder.w.data[:2].copy_(tensor[:2])
        raise KeyError("no such layer")

    refused(load, "KeyError: 'no such layer'")


OUTSIDE = torch.zeros(4, 6)

REFUSED: dict[str, tuple[Callable[[Holder, torch.Tensor], object], str]] = {
    "computes": (lambda h, t: h.w.data.copy_(t * 2), r"'w'.*mul"),
    "computes in place": (lambda h, t: h.w.data.copy_(t.mul_(2)), r"'w'.*mul_"),
    "computes with torch": (lambda h, t: h.w.data.copy_(torch.softmax(t, 0)), r"'w'.*softmax"),
    "gathers": (lambda h, t: h.w.data.copy_(t[[1, 0, 2, 3]]), r"'w'.*index"),
    "adds to it": (lambda h, t: h.w.data.add_(t), r"'w'.*add_"),
    "scatters": (
        lambda h, t: h.w.data.index_put_((torch.tensor([0, 1]),), t[:2]),
        r"'w'.*index_put",
    ),
    "writes by out": (lambda h, t: torch.add(t, 1, out=h.w.data), r"'w'.*add"),
    "forgets half": (lambda h, t: h.w.data[:2].copy_(t[:2]), r"'w'.*12 of 24"),
    "fills over": (lambda h, t: (h.w.data.copy_(t), h.w.data[:1].fill_(0)), r"'w'.*fills over"),
    "rounds": (lambda h, t: h.w.data.copy_(t.to(torch.bfloat16)), r"'w'.*F32 to BF16"),
    "reads itself": (lambda h, _: h.w.data.copy_(h.w.data + 1), r"'w'.*add"),
    "copies itself": (lambda h, _: h.w.data[:1].copy_(h.w.data[1:2]), r"'w'.*reading a parameter"),
    "replaces memory": (lambda h, t: setattr(h.w, "data", t), r"'w'.*replaces"),
    "replaces it": (lambda h, t: setattr(h, "w", nn.Parameter(t)), r"'w'.*replaces"),
    "computes a number": (lambda h, t: h.w.data.fill_(t[0, 0].item() * 2), r"'w'.*number"),
    "computes a tensor of numbers": (
        lambda h, t: h.w.data.copy_(torch.full((4, 6), t[0, 0].item() + 1)),
        r"'w'.*number",
    ),
    "decides by values": (lambda h, t: h.w.data.copy_(t) if (t > 0).any() else None, "decides"),
    "compares": (lambda h, t: h.w.data.copy_(t) if torch.equal(t, t) else None, "aten::equal"),
    "fills something else": (
        lambda h, t: (h.w.data.copy_(t), OUTSIDE.copy_(t)),
        r"'t'.*not among.*buffers",
    ),
    "adds to something else": (
        lambda h, t: (h.w.data.copy_(t), OUTSIDE.add_(t)),
        r"'t'.*not among.*buffers",
    ),
    "swallows errors": (lambda h, t: _try(lambda: h.w.data.copy_(t * 2)), r"'w'.*mul"),
    "views other bits": (
        lambda h, t: h.w.data.copy_(t.view(torch.int16)[:, ::2]),
        r"'w'.*other bits",
    ),
    "loads twice": (
        lambda h, t: (h.w.data.copy_(t), h.w.data[:2].copy_(t[2:])),
        r"'w'.*same place",
    ),
}


def _try(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:
        return


@pytest.mark.parametrize("name", REFUSED)
def test_loader_that_cannot_be_followed_is_refused_by_the_parameters_name(name: str) -> None:
    refused(*REFUSED[name])


def test_published_type_that_the_engine_rounds_is_refused_by_name() -> None:
    holder = Holder(lambda h, t: h.w.data.copy_(t))
    with pytest.raises(UnsupportedLayout, match=r"'w'.*F64 to F32"):
        traced(holder, torch.zeros(4, 6, dtype=torch.float64))


def test_tensors_kept_apart_by_the_run_and_tied_by_the_engine_are_refused() -> None:
    holder = Holder(lambda h, t: h.w.data.copy_(t))
    specs = open_state({"a": torch.zeros(4, 6), "b": torch.ones(4, 6)}).specs
    with pytest.raises(UnsupportedLayout, match=r"'w'.*tie them"):
        trace(holder.load_weights, specs, holder.named_parameters)


def test_aliases_that_the_loader_does_not_know_are_not_offered_again() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    holder = Holder(lambda h, t: h.w.data.copy_(t))

    def load(pairs: Pairs) -> None:
        for name, each in pairs:
            if name != "t":
                raise KeyError(name)
            holder.w.data.copy_(each)

    specs = open_state({"t": tensor}).specs
    layout = trace(load, specs, holder.named_parameters, {"alias": "t"})
    assert [part.parameter for part in layout.parts["t"]] == ["w"]


def load_both(
    load: Callable[[Holder, torch.Tensor], object], tensor: torch.Tensor, *shape: int
) -> None:
    """A loader really run, and followed: the same bits."""
    real, followed = Holder(load, *shape), Holder(load, *shape)
    layout = traced(followed, tensor)
    real.load_weights([("t", tensor.clone())])
    fill_paddings(layout)
    load_parts(layout, open_state({"t": tensor}), "t")
    assert bits_in(real) == bits_in(followed)


FOLLOWED: dict[str, Callable[[Holder, torch.Tensor], object]] = {
    "copies": lambda h, t: h.w.data.copy_(t),
    "assigns": lambda h, t: h.w.data.__setitem__(slice(None), t),
    "assigns an element": lambda h, t: [
        h.w.data[i].__setitem__(j, t[i, j]) for i in range(4) for j in range(6)
    ],
    "casts": lambda h, t: h.w.data.copy_(t.double().float()),
    "joins": lambda h, t: h.w.data.copy_(torch.cat([t[2:], t[:2]])),
    "joins columns": lambda h, t: h.w.data.copy_(torch.cat([t[:, 3:], t[:, :3]], dim=-1)),
    "stacks": lambda h, t: h.w.data.copy_(torch.stack([t[3], t[1], t[2], t[0]])),
    "fills before": lambda h, t: (h.w.data.zero_(), h.w.data[:3].copy_(t[:3])),
    "fills after": lambda h, t: (h.w.data[:3].copy_(t[:3]), h.w.data[3:].fill_(-1.5)),
    "copies a constant": lambda h, t: (
        h.w.data[:3].copy_(t[:3]),
        h.w.data[3:].copy_(torch.arange(6.0)),
    ),
    "repeats a row": lambda h, t: h.w.data.copy_(t[2]),
    "repeats a number": lambda h, t: (h.w.data.copy_(t), h.other.data.fill_(t[1, 1].item())),
    "repeats an element": lambda h, t: (h.w.data.copy_(t), h.other.data.fill_(t[1, 1])),
    "asks for shapes": lambda h, t: h.w.data.copy_(t) if torch.zeros_like(t).sum() == 0 else None,
    "flattens a copy": lambda h, t: h.w.data.view(-1).copy_(t.t().contiguous().view(-1)),
    "transposes": lambda h, t: h.w.data.copy_(t.reshape(6, 4).t()),
}


def _collect(holder: Holder, tensor: torch.Tensor) -> None:
    whole = torch.empty(4, 6)
    whole[1:].copy_(tensor[:3])
    whole[:1] = tensor[3:]
    holder.w.data.copy_(whole)


FOLLOWED["collects"] = _collect


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed_loader_gives_the_bits_of_the_real_one(name: str) -> None:
    load_both(FOLLOWED[name], torch.arange(24.0).reshape(4, 6) + 100)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "t",
                "narrow",
                "half",
                "flat",
                "split",
                "copy",
                "dense",
                "step",
                "select",
                "swap",
                "cat",
            ]
        ),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=7,
)


def walk(tensor: torch.Tensor, steps: list[tuple[str, int, int]]) -> torch.Tensor:
    """Views and copies, as the steps say; a pure function of the shape."""
    for step, a, b in steps:
        tensor = _step(tensor, step, a, b)
    return tensor


WALKS: dict[str, Callable[[torch.Tensor, int, int], torch.Tensor]] = {
    "t": lambda t, dim, b: t.transpose(dim, b % t.ndim),
    "narrow": lambda t, dim, b: t.narrow(dim, b % t.shape[dim], t.shape[dim] - b % t.shape[dim]),
    "half": lambda t, dim, _: t.chunk(2, dim)[0],
    "split": lambda t, dim, _: t.unflatten(dim, (-1, 2 - t.shape[dim] % 2)),
    "step": lambda t, dim, b: t[(slice(None),) * dim + (slice(b % t.shape[dim], None, 2),)],
    "select": lambda t, dim, b: t.select(dim, b % t.shape[dim]),
    "swap": lambda t, dim, _: t.movedim(dim, 0),
    "cat": lambda t, dim, _: torch.cat([t, t], dim),
    "flat": lambda t, *_: t.reshape(-1),
    "copy": lambda t, *_: t.clone(),
    "dense": lambda t, *_: t.contiguous(),
}


def _step(t: torch.Tensor, step: str, a: int, b: int) -> torch.Tensor:
    return WALKS[step](t, a % t.ndim, b) if t.ndim else t


@settings(deadline=None)
@given(st.sampled_from([(24,), (4, 6), (2, 3, 4), (2, 2, 3, 2)]), STEPS, STEPS)
def test_any_walk_of_views_and_copies_is_followed_to_the_bit_or_refused(
    shape: tuple[int, ...],
    steps: list[tuple[str, int, int]],
    places: list[tuple[str, int, int]],
) -> None:
    tensor = torch.arange(24.0).reshape(shape) + 100
    wanted = tuple(walk(tensor, steps).shape)

    def load(holder: Holder, source: torch.Tensor) -> None:
        room = holder.w.data.t() if places and len(wanted) == 2 else holder.w.data
        room.copy_(walk(source, steps))

    swapped = wanted[::-1] if places and len(wanted) == 2 else wanted
    try:
        load_both(load, tensor, *(swapped or (1,)))
    except UnsupportedLayout as error:
        why = str(error)
    else:
        why = "followed"
    event(why)
    assert why == "followed" or "view across a copy" in why
