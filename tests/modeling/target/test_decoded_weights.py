"""Every way of loading a target gives the same model, in every format; what nothing decodes is refused."""

import json
from pathlib import Path

import pytest
import torch
from kimi_k3_models import pack_experts, quantize_fp8, released_tensors, tiny_k3, write_released
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from blockdraft.configuration.build_kimi_k3_dflash import build_kimi_k3_dflash_target_kwargs
from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41Config, DeepseekV41TextConfig
from blockdraft.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM
from blockdraft.modeling.kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM, KimiK3Model
from blockdraft.modeling.target.decoded_weights import load_decoded
from blockdraft.trainer.loading import load_target

FP8 = {"quant_method": "fp8", "weight_block_size": [2, 2]}
MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
IDS = torch.arange(3, 11)[None]


def state_quantization(folder: Path, quantization: dict | None, place: str) -> None:
    """Puts a `quantization_config` outside or inside of the text side, or nowhere."""
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    stored.pop("quantization_config", None)
    stored["text_config"].pop("quantization_config", None)
    if quantization is not None:
        (stored if place == "outside" else stored["text_config"])["quantization_config"] = quantization
    path.write_text(json.dumps(stored))


def ways(folder: Path, chat_tokenizer, cls):
    """Every way in which a target is loaded, in fp32."""
    yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    yield cls.from_pretrained(folder, dtype=torch.float32)
    yield cls.from_pretrained(folder, config=AutoConfig.from_pretrained(folder), dtype=torch.float32)
    yield cls.from_pretrained(folder, config=cls.config_class.from_pretrained(folder), dtype=torch.float32)
    if cls is KimiK3ForCausalLM:
        kwargs = build_kimi_k3_dflash_target_kwargs(AutoConfig.from_pretrained(folder))
        yield cls.from_pretrained(folder, **kwargs | {"dtype": torch.float32})
    chat_tokenizer.save_pretrained(folder)
    yield load_target(str(folder), dtype="float32")[0]


@pytest.mark.parametrize(
    ("form", "place"),
    [("plain", "outside"), *((form, place) for form in ("mxfp4", "fp8") for place in ("outside", "inside"))],
)
def test_every_way_of_loading_k3_gives_the_same_logits(form, place, tmp_path, chat_tokenizer):
    model = tiny_k3()
    released = released_tensors(model)
    stored = plain = released
    if form == "fp8":
        stored, plain = quantize_fp8(released)
        assert sum(name.endswith("_scale_inv") for name in stored) > 100  # experts and all other matrices
    elif form == "mxfp4":
        stored = pack_experts(released)
        write_released(tmp_path / "packed", model.config, stored)
        decoded, _ = load_decoded(
            AutoModelForCausalLM.from_pretrained, tmp_path / "packed", dtype=torch.float32, output_loading_info=True
        )
        plain = released_tensors(decoded)
    write_released(tmp_path / "plain", model.config, plain)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)(IDS).logits
        folder = write_released(tmp_path / "stored", model.config, stored)
        state_quantization(folder, {"plain": None, "mxfp4": MXFP4, "fp8": FP8}[form], place)
        for loaded in ways(folder, chat_tokenizer, KimiK3ForCausalLM):
            assert type(loaded) is KimiK3ForCausalLM and torch.equal(loaded(IDS).logits, expected)
        loaded.save_pretrained(tmp_path / "again")
        again = KimiK3ForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
        assert torch.equal(again(IDS).logits, expected)


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_the_class_opens_a_multimodal_checkpoint_as_the_auto_class_does(place, tmp_path):
    """Its dtype too, where only the outer file states it."""
    model = tiny_k3()
    folder = write_released(tmp_path, model.config, released_tensors(model))
    state_quantization(folder, None, place)
    for cls, auto in ((KimiK3ForCausalLM, AutoModelForCausalLM), (KimiK3Model, AutoModel)):
        by_class, by_auto = cls.from_pretrained(folder), auto.from_pretrained(folder)
        assert by_class.dtype == by_auto.dtype == torch.bfloat16
        assert by_class.config.to_dict() == by_auto.config.to_dict()


@pytest.mark.parametrize(
    ("multimodal", "text", "own"),
    [(KimiK3Config, KimiK3TextConfig, MXFP4), (DeepseekV41Config, DeepseekV41TextConfig, {"quant_method": "fp8"})],
)
def test_settings_outside_of_the_text_side_hold_for_it(multimodal, text, own, tmp_path):
    other = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config = multimodal(text_config={}, quantization_config=other, dtype="float16")
    assert config.text_config.quantization_config == other and config.text_config.dtype == torch.float16
    assert not hasattr(multimodal(text_config=text(), quantization_config=own).text_config, "quantization_config")
    assert multimodal(text_config=text(), quantization_config=other).text_config.quantization_config == other
    nested = {"quantization_config": other, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
    config = multimodal(text_config=nested, quantization_config={"quant_method": "gptq"}, dtype="float16")
    assert config.text_config.quantization_config == other and config.text_config.dtype == torch.bfloat16
    config.save_pretrained(tmp_path)
    opened = text.from_pretrained(tmp_path, rms_norm_eps=0.5)
    assert type(opened) is text and opened.rms_norm_eps == 0.5
    assert opened.to_dict() | {"rms_norm_eps": None} == config.text_config.to_dict() | {"rms_norm_eps": None}
    opened.save_pretrained(tmp_path / "text")
    assert text.from_pretrained(tmp_path / "text").to_dict() == opened.to_dict()


def test_scales_that_nothing_reads_are_refused(tmp_path, chat_tokenizer):
    model = tiny_k3()
    stored, _ = quantize_fp8(released_tensors(model))
    folder = write_released(tmp_path / "k3", model.config, stored)
    chat_tokenizer.save_pretrained(folder)
    for load in (KimiK3ForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained, load_target):
        with pytest.raises(ValueError, match="lacks|tensors of quantised weights that nothing reads|too many"):
            load(str(folder))


# A target of transformers' own, too, where the command line loads it. What a cache's quantisation leaves is no weight.
@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", True),
        ("model.layers.0.self_attn.q_proj.weight_scale", True),
        ("model.layers.0.self_attn.q_proj.scale", True),
        ("model.layers.0.mlp.up_proj.qweight", True),
        ("model.layers.0.mlp.up_proj.weight.absmax", True),
        ("model.layers.0.self_attn.k_scale", False),
        ("model.layers.0.extra.scale", False),
        ("model.layers.0.extra.weight", False),
    ],
)
def test_any_targets_scales_are_read_or_refused(name, refused, tmp_path, chat_tokenizer):
    size = {"vocab_size": 400, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4}
    config = Qwen3Config(**size, num_attention_heads=2, num_key_value_heads=2)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    chat_tokenizer.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {name: torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    if refused:
        with pytest.raises(ValueError, match=f"{tmp_path} has 1 tensors of quantised weights.*`{name}`"):
            load_target(str(tmp_path))
    else:
        assert load_target(str(tmp_path))[0].config.hidden_size == 8


def test_loading_info_is_given_to_those_who_ask(tmp_path):
    model = tiny_k3()
    write_released(tmp_path, model.config, released_tensors(model))
    loaded, info = KimiK3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is KimiK3ForCausalLM and not any(info.values())


def test_a_v41_checkpoint_with_other_scales_is_refused(tmp_path):
    from deepseek_v41_models import NO_ENGRAM, tiny_v41

    model = tiny_v41(**NO_ENGRAM)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "layers.0.attn.wq_a.weight_scale_inv"
    save_file(tensors | {name: torch.ones(7, 10)}, tmp_path / "model.safetensors", {"format": "pt"})
    for load in (DeepseekV41ForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=f"1 tensors of quantised weights that nothing reads.*{name}"):
            load(tmp_path)
