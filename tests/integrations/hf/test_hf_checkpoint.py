"""Names and memory: wrappers, ties and stacked experts, and the models that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hf_training import moe_model
from tiny_models import Shape, new_model
from witnesses import assert_same_bits, saved

from weightwire.diff.cast import cast
from weightwire.errors import NotACheckpoint, UnsupportedLayout
from weightwire.trainers.hf_checkpoint import HfCheckpoint, architecture


def test_names_are_the_checkpoints_whatever_torch_compile_wraps(tmp_path: Path) -> None:
    model = new_model(Shape())
    names = sorted(saved(model, tmp_path))
    assert sorted(HfCheckpoint(torch.compile(model, backend="eager")).reader().specs) == names
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    assert any("_orig_mod" in name for name in model.state_dict())
    assert sorted(HfCheckpoint(model).reader().specs) == names


def test_tied_tensor_is_published_once_under_the_name_that_is_saved() -> None:
    specs = HfCheckpoint(new_model(Shape(is_tied=True))).reader().specs
    assert "model.embed_tokens.weight" in specs
    assert "lm_head.weight" not in specs
    assert "lm_head.weight" in HfCheckpoint(new_model(Shape(is_tied=False))).reader().specs


def test_tensors_are_read_where_they_lie() -> None:
    model = new_model(Shape())
    reader = HfCheckpoint(model).reader()
    for name, parameter in model.named_parameters():
        bits = reader.read(name, 0, parameter.numel())
        assert np.shares_memory(bits, parameter.detach().numpy()), name


def test_stacked_experts_are_taken_apart_one_tensor_at_a_time() -> None:
    model = moe_model("Qwen3Moe")
    reader = HfCheckpoint(model).reader()
    largest = max(p.numel() for name, p in model.named_parameters() if "experts" in name)
    n_apart = 0
    for name, spec in reader.specs.items():
        reader.read(name, 0, spec.n_elements)
        held = sum(tensor.numel() for tensor in reader._converted.values())
        assert held <= largest
        n_apart += "experts" in name
    assert n_apart == 2 * 4 * 3  # layers, experts, gate and up and down


def test_what_transformers_keeps_in_fp32_stays_so() -> None:
    model = new_model(Shape())
    model._keep_in_fp32_modules_strict = {"input_layernorm"}
    checkpoint = HfCheckpoint(model)
    wide = checkpoint.keeps_wide("bf16")
    specs = (
        cast(checkpoint.reader, "bf16", only=lambda n: not any(w in n for w in wide)).reader().specs
    )
    kept = {name for name, spec in specs.items() if spec.dtype.name == "F32"}
    assert kept == {f"model.layers.{layer}.input_layernorm.weight" for layer in range(2)}


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_tensors_that_come_one_by_one_get_the_checkpoints_names_from_a_config_alone(
    family: str, tmp_path: Path
) -> None:
    model = moe_model(family)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "model")
    names = architecture(tmp_path / "model")
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        found |= {each: part.to(torch.bfloat16) for each, part in names.pieces(name, parameter)}
    assert_same_bits(found, saved(model, tmp_path))


def test_model_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="no config to read"):
        architecture(tmp_path)


def test_tensor_that_was_replaced_is_read_anew() -> None:
    model = new_model(Shape())
    checkpoint = HfCheckpoint(model)
    checkpoint.reader()
    model.model.norm.weight = torch.nn.Parameter(torch.full((128,), 3.0))
    bits = checkpoint.reader().read("model.norm.weight", 0, 128)
    assert bits.view(np.float32).tolist() == [3.0] * 128


def test_adapters_are_refused_with_what_to_do_instead() -> None:
    model = new_model(Shape())
    model.peft_config = {"default": object()}
    with pytest.raises(UnsupportedLayout, match="merge_and_unload"):
        HfCheckpoint(model)


def test_zero3_shards_are_refused_and_the_sharded_publisher_named() -> None:
    model = new_model(Shape())
    next(model.parameters()).ds_id = 0
    with pytest.raises(UnsupportedLayout, match=r"ZeRO-3.*ShardedPublisher"):
        HfCheckpoint(model)


def test_quantised_model_is_refused() -> None:
    model = new_model(Shape())
    model.hf_quantizer = object()
    with pytest.raises(UnsupportedLayout, match="quantised"):
        HfCheckpoint(model)
