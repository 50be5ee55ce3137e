import json
import logging

import pytest
import torch
from kimi_k3_models import FP32_PARTS, pack_experts, released_tensors, tiny_config, tiny_k3, write_released
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from blockdraft.configuration.build_kimi_k3_dflash import build_kimi_k3_dflash_target_kwargs
from blockdraft.modeling.kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM, KimiK3Model

EXPERTS = "language_model.model.layers.1.block_sparse_moe.experts"


@pytest.fixture
def model() -> KimiK3ForCausalLM:
    return tiny_k3()


@pytest.fixture
def packed(model) -> dict[str, torch.Tensor]:
    return pack_experts(released_tensors(model))


def load(folder, **kwargs) -> tuple[KimiK3ForCausalLM, dict]:
    kwargs = build_kimi_k3_dflash_target_kwargs(AutoConfig.from_pretrained(folder)) | kwargs
    return KimiK3ForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)


def decoded(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """MXFP4 number by number."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    rows = []
    for codes, exponents in zip(packed.tolist(), scale.tolist(), strict=True):
        nibbles = [nibble for byte in codes for nibble in (byte % 16, byte // 16)]
        values = [
            (-1) ** (n // 8) * magnitudes[n % 8] * 2.0 ** (exponents[c // 32] - 127) for c, n in enumerate(nibbles)
        ]
        rows.append(values)
    return torch.tensor(rows)


def expected_experts(packed: dict[str, torch.Tensor], layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    stem = EXPERTS.replace("layers.1", f"layers.{layer}")
    experts = {
        projection: [
            decoded(*(packed[f"{stem}.{e}.{projection}.weight_{part}"] for part in ("packed", "scale")))
            for e in range(6)
        ]
        for projection in ("w1", "w2", "w3")
    }
    gate_up = [torch.cat(pair) for pair in zip(experts["w1"], experts["w3"], strict=True)]
    return torch.stack(gate_up), torch.stack(experts["w2"])


@pytest.mark.parametrize("shards", [1, 3])
def test_released_checkpoint_loads_bit_equal(model, tmp_path, shards):
    write_released(tmp_path, model.config, released_tensors(model), shards)
    loaded, info = load(tmp_path, dtype=torch.float32)
    assert not any(info.values())
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    assert type(loaded.config) is type(model.config)


def test_auto_classes_open_the_multimodal_checkpoint_as_its_text_model(model, tmp_path):
    write_released(tmp_path, model.config, released_tensors(model))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(loaded) is KimiK3ForCausalLM
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    base = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(base) is KimiK3Model and torch.equal(base.norm.weight, model.model.norm.weight)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16  # the outer file's `dtype`


@pytest.mark.parametrize("shards, dtype", [(1, torch.bfloat16), (2, torch.float32)])
def test_mxfp4_experts_are_decoded_on_load(model, packed, tmp_path, shards, dtype):
    write_released(tmp_path, model.config, packed, shards)
    loaded, info = load(tmp_path, dtype=dtype)
    assert not any(info.values())
    for layer in range(1, 5):
        experts = loaded.model.layers[layer].mlp.experts
        gate_up, down = expected_experts(packed, layer)
        assert experts.gate_up_proj.dtype == dtype
        assert torch.equal(experts.gate_up_proj.float(), gate_up) and torch.equal(experts.down_proj.float(), down)
    for name, tensor in loaded.state_dict().items():
        if ".experts." not in name:
            assert tensor.dtype == (torch.float32 if name.endswith(FP32_PARTS) else dtype), name
            assert torch.equal(tensor, model.state_dict()[name].to(tensor.dtype)), name


def test_what_is_saved_is_a_plain_text_checkpoint(model, packed, tmp_path):
    write_released(tmp_path / "released", model.config, packed)
    loaded, _ = load(tmp_path / "released")
    loaded.save_pretrained(tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    expected = {
        name.removeprefix("language_model.") for name in released_tensors(model) if name.startswith("language_model.")
    }
    assert stored.keys() == expected
    a_log = stored["model.layers.0.self_attn.A_log"]
    assert torch.equal(a_log[:4], model.model.layers[0].self_attn.A_log) and a_log.shape == (128,)
    assert not a_log[4:].any()
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["model_type"] == "kimi_k3_text" and "quantization_config" not in config

    again, info = KimiK3ForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()) and again.dtype == torch.bfloat16
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_a_log_needs_no_padding_and_pads_beyond_128(tmp_path):
    heads = {"head_dim": 1, "num_heads": 130, "kda_layers": [1], "full_attn_layers": [2]}
    model = tiny_k3(num_hidden_layers=2, num_experts=None, linear_attn_config=heads)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.self_attn.A_log"].shape == (256,)
    released = released_tensors(tiny_k3())
    name = "language_model.model.layers.0.self_attn.A_log"
    released[name] = released[name][:4].clone()
    write_released(tmp_path / "unpadded", tiny_config(), released)
    loaded, info = load(tmp_path / "unpadded")
    assert not any(info.values())
    assert torch.equal(loaded.model.layers[0].self_attn.A_log, released[name])


@pytest.mark.parametrize("missing", ["weight_scale", "weight_packed"])
def test_half_a_pair_is_an_error_that_names_the_tensor(model, packed, tmp_path, missing):
    name = f"{EXPERTS}.3.w2.{missing}"
    del packed[name]
    write_released(tmp_path, model.config, packed)
    with pytest.raises(ValueError, match=f"lacks 1 of the 12 expert tensors.*`{name}`"):
        load(tmp_path)


def test_all_scales_missing_is_an_error_too(model, packed, tmp_path):
    packed = {name: tensor for name, tensor in packed.items() if not name.endswith("w3.weight_scale")}
    write_released(tmp_path, model.config, packed)
    with pytest.raises(ValueError, match=f"lacks 6 of the 24 expert tensors.*`{EXPERTS}.0.w3.weight_scale`"):
        load(tmp_path)


def test_missing_and_surplus_experts_are_named(model, tmp_path):
    released = released_tensors(model)
    # Equally many of both projections: stacking would pair the wrong ones.
    moved = {f"{EXPERTS}.2.w1.weight", f"{EXPERTS}.4.w3.weight"}
    write_released(tmp_path / "a", model.config, {k: v for k, v in released.items() if k not in moved})
    with pytest.raises(ValueError, match=f"lacks 2 of the 12 expert tensors.*`{EXPERTS}.2.w1.weight`"):
        load(tmp_path / "a")
    surplus = {f"{EXPERTS}.6.w2.weight": torch.zeros(64, 32)}
    write_released(tmp_path / "b", model.config, released | surplus)
    with pytest.raises(ValueError, match=f"too many, first `{EXPERTS}.6.w2.weight`"):
        load(tmp_path / "b")


def test_missing_and_unknown_tensors_are_reported(model, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    released = released_tensors(model)
    del released["language_model.model.layers.0.self_attn.A_log"]
    released["language_model.model.layers.0.self_attn.other.weight"] = torch.ones(3)
    released = {
        name: tensor for name, tensor in released.items() if not name.startswith(f"{EXPERTS}.") or "w2" not in name
    }
    write_released(tmp_path, model.config, released)
    _, info = load(tmp_path)
    assert info["missing_keys"] == {"model.layers.0.self_attn.A_log", "model.layers.1.mlp.experts.down_proj"}
    assert info["unexpected_keys"] == {"model.layers.0.self_attn.other.weight"}
    assert "MISSING" in caplog.text and "UNEXPECTED" in caplog.text and "vision_tower" not in caplog.text


def test_wrong_shapes_are_refused(model, tmp_path):
    released = released_tensors(model)
    released[f"{EXPERTS}.0.w1.weight"] = torch.zeros(30, 64)
    write_released(tmp_path, model.config, released)
    with pytest.raises(RuntimeError, match="conversion"):
        load(tmp_path)
