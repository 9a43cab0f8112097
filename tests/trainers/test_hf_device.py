"""A transformers model on a device is published from there, stacked experts too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import weightwire as ww
from hand_clock import HandClock
from sample_training import bits_of, inline
from weightwire.diff.cast import CastReader
from weightwire.diff.fp8 import Fp8Reader, fp8
from weightwire.diff.memory import open_state
from weightwire.store.memory import MemoryStore
from weightwire.trainers import hf_checkpoint

pytest.importorskip("triton", reason="GPU kernels need triton")
transformers = pytest.importorskip("transformers", reason="the models are transformers' own")

HfCheckpoint, HfReader = hf_checkpoint.HfCheckpoint, hf_checkpoint.HfReader
VIEWS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda state: state,
    "cast": lambda state: ww.cast(state, "bf16"),
    "fp8": lambda state: fp8(state, block=8),
}


def new_model(device: torch.device, *, n_layers: int = 2) -> Any:
    """A tiny mixture of experts: its checkpoint has other tensors than the model."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=12,
        num_hidden_layers=n_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).float().to(device)


def train(model: Any) -> None:
    """Some weights of every tensor move."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::7].mul_(1.01)


def refused(*_: Any) -> Any:
    raise AssertionError("this should not have been asked for")


def whole(reader: Any) -> dict[str, bytes]:
    return {n: reader.read(n, 0, spec.n_elements).tobytes() for n, spec in reader.specs.items()}


def published(model: Any, view: Callable[[Any], Any], live: Any) -> dict[str, bytes]:
    """Everything that was published in two versions; ``live`` follows them."""
    store = MemoryStore()
    with ww.Publisher(
        store,
        view(HfCheckpoint(model).reader),
        codec="plain",
        background=inline,
        clock=HandClock(),
        n_threads=1,
    ) as publisher:
        publisher.publish().result()
        train(model)
        publisher.publish().result()
    found = {each.key: store.read(each.key) for each in store.list("")}
    ww.Subscriber(store, live, background=inline).update()
    return found


def test_every_tensor_is_shown_on_the_device_with_the_hosts_bits(device: torch.device) -> None:
    reader = HfCheckpoint(new_model(device)).reader()
    expected = whole(reader)
    for name, spec in reader.specs.items():
        bits = reader.read_device(name, 0, spec.n_elements)
        assert bits is not None
        assert bits.device.type == device.type
        assert bits.dtype is torch.int32
        assert bits.cpu().numpy().tobytes() == expected[name]
        part = reader.read_device(name, 3, 7)
        assert part is not None
        assert part.cpu().numpy().tobytes() == expected[name][12:28]


def test_only_what_is_taken_apart_is_made(device: torch.device) -> None:
    model = new_model(device)
    reader = HfCheckpoint(model).reader()
    shown = reader.read_device("model.norm.weight", 0, 16)
    assert shown is not None
    assert shown.data_ptr() == model.model.norm.weight.data_ptr()
    made = {name for name in reader.specs if reader.makes_device_bits(name)}
    assert made == {name for name in reader.specs if ".experts." in name}
    assert len(made) == 2 * 2 * 3  # layers, experts, gate and up and down


def test_looking_for_a_device_converts_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = HfCheckpoint(new_model(device)).reader()
    monkeypatch.setattr(hf_checkpoint, "as_saved", refused)
    probes = [reader.read_device(name, 0, 0) for name in reader.specs]
    assert {(each.numel(), each.dtype) for each in probes if each is not None} == {(0, torch.int32)}
    assert len(probes) == sum(each is not None for each in probes)


def test_pieces_of_a_group_outlive_the_next_one(device: torch.device) -> None:
    reader = HfCheckpoint(new_model(device)).reader()
    expected = whole(reader)
    made = [name for name in reader.specs if reader.makes_device_bits(name)]
    held = {name: reader.read_device(name, 0, reader.specs[name].n_elements) for name in made}
    for name, bits in held.items():
        assert bits is not None
        assert bits.cpu().numpy().tobytes() == expected[name]


def test_what_does_not_lie_in_a_row_goes_through_the_host(device: torch.device) -> None:
    model = new_model(device)
    gate = model.model.layers[0].self_attn.q_proj
    expected = whole(HfCheckpoint(model).reader())
    gate.weight = torch.nn.Parameter(gate.weight.detach().t().contiguous().t())
    reader = HfCheckpoint(model).reader()
    assert reader.read_device("model.layers.0.self_attn.q_proj.weight", 0, 0) is None
    assert whole(reader) == expected


def test_a_model_on_the_host_has_nothing_on_a_device() -> None:
    reader = HfCheckpoint(new_model(torch.device("cpu"))).reader()
    assert {reader.read_device(name, 0, 0) for name in reader.specs} == {None}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("as it is", marks=pytest.mark.long),
        "cast",
        pytest.param("fp8", marks=pytest.mark.long),
    ],
)
def test_a_publisher_never_asks_the_host(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, there = VIEWS[name], new_model(device, n_layers=1)
    host = copy.deepcopy(there).cpu()
    with monkeypatch.context() as patch:
        patch.setattr("weightwire.kernels.devices.TYPES", {"cuda"})
        expected = published(host, view, {})
        bits = whole(open_state(view(HfCheckpoint(host).reader)))
    for reader in (HfReader, CastReader, Fp8Reader):
        monkeypatch.setattr(reader, "read", refused)
    live: dict[str, np.ndarray] = {}
    assert published(there, view, live) == expected
    assert bits_of(live) == bits


def test_another_stream_converts_for_itself(device: torch.device) -> None:
    """It could not know when what the first one converts is there."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    reader = HfCheckpoint(new_model(device)).reader()
    expected = whole(reader)
    name = "model.layers.0.mlp.experts.0.gate_proj.weight"
    reader.read_device("model.layers.1.mlp.experts.0.gate_proj.weight", 0, 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(1 << 29)
        reader.read_device(name, 0, 1)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        bits = reader.read_device(name, 0, reader.specs[name].n_elements)
        assert bits is not None
        assert bits.cpu().numpy().tobytes() == expected[name]
