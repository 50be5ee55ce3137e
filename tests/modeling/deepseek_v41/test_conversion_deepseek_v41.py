import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.modeling.deepseek_v41.conversion_deepseek_v41 import native_name, released_name
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM, DeepseekV41Model
from blockdraft.modeling.ops.number_formats import (
    dequantize_fp4,
    dequantize_fp8_block,
    dequantize_fp8_rows,
    next_power_of_two,
    quantize_fp4,
    quantize_fp8_block,
)

pytestmark = pytest.mark.filterwarnings("ignore:No tokenizer")
TINY = {
    "vocab_size": 89,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "head_dim": 48,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 28,
    "o_lora_rank": 12,
    "o_groups": 3,
    "rms_norm_eps": 3e-3,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    # Window-only, Full, Reuse, Full, Reindex.
    "compress_ratios": [0, 2, 2, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "index_n_heads": 3,
    "index_head_dim": 36,
    "index_topk": 4,
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 2,
    "hc_mult": 3,
    "engram_layer_ids": [1],
    "engram_num_embeddings": [400],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 40,
    "engram_n_heads": 2,
    "engram_head_dim": 40,
    "engram_compressed_vocab_size": 60,
    "initializer_range": 0.2,
    "dspark_noise_token_id": 83,
    "dspark_target_layer_ids": [2, 3, 4],
}
FP32_PARTS = ("_hc.fn", "_hc.base", "_hc.scale", "sinks_param.weight", "correction_bias", "bias_vl", "lm_head.weight")
FP8_BLOCKS = (
    *(f"attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")),
    *(f"ffn.shared_experts.w{i}.weight" for i in (1, 2, 3)),
    "engram.wkv.weight",
)


@pytest.fixture
def model() -> DeepseekV41ForCausalLM:
    """Random numbers, also where a fresh model has constants: a constant hides an exchange."""
    model = DeepseekV41ForCausalLM(DeepseekV41TextConfig(**TINY)).eval()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_(std=0.2)
    return model


def released(model: DeepseekV41ForCausalLM) -> dict[str, torch.Tensor]:
    """The model's weights as a released file has them, name by name, with a vision side and a draft."""
    tensors = {
        name: torch.ones(2) for name in ("vision.patch.weight", "aligner.w", "image_start", "mtp.0.attn.wq_a.weight")
    }
    renamed = {
        "model.embed_tokens.weight": "embed.weight",
        "lm_head.weight": "head.weight",
        "model.norm.weight": "norm.weight",
    }
    parts = {
        "attn.sinks_param.weight": "attn.attn_sink",
        "ffn.gate.e_score_correction_bias": "ffn.gate.bias",
        "attn_hc.": "hc_attn_",
        "ffn_hc.": "hc_ffn_",
        "shared_experts.gate_proj": "shared_experts.w1",
        "shared_experts.up_proj": "shared_experts.w3",
        "shared_experts.down_proj": "shared_experts.w2",
    }
    for name, tensor in model.state_dict().items():
        name = renamed.get(name, name.removeprefix("model."))
        for ours, theirs in parts.items():
            name = name.replace(ours, theirs)
        if ".experts." not in name:
            tensors[name] = tensor.clone()
            continue
        stem, projection = name.rsplit(".", 1)
        width = TINY["moe_intermediate_size"]
        for expert, stacked in enumerate(tensor):
            if projection == "down_proj":
                tensors[f"{stem}.{expert}.w2.weight"] = stacked.T.contiguous()
            else:
                tensors[f"{stem}.{expert}.w1.weight"] = stacked[:, :width].T.contiguous()
                tensors[f"{stem}.{expert}.w3.weight"] = stacked[:, width:].T.contiguous()
    return tensors


def quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same in FP8 and FP4 with their scales."""
    stored = {}
    for name, tensor in tensors.items():
        scale_name = name.removesuffix("weight") + "scale"
        if name.startswith("mtp."):
            stored[name] = tensor
        elif ".ffn.experts." in name:
            stored[name], stored[scale_name] = quantize_fp4(tensor)
        elif name.endswith(FP8_BLOCKS) and "compressor" not in name:
            stored[name], stored[scale_name] = quantize_fp8_block(tensor)
        elif name.endswith("engram.embed.weight"):
            maxima = torch.stack([part.abs().amax(1) for part in tensor.split(32, dim=1)], dim=1)
            scale = next_power_of_two(maxima / 448)
            spread = scale.repeat_interleave(32, dim=1)[:, : tensor.shape[1]]
            stored[name] = (tensor / spread).to(torch.float8_e4m3fn)
            stored[scale_name] = scale.to(torch.float8_e8m0fnu)
        else:
            stored[name] = tensor
    return stored


def decoded(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Released names with plain weights again."""
    plain = {}
    for name, tensor in tensors.items():
        scale = tensors.get(name.removesuffix("weight") + "scale")
        if name.endswith(".scale"):
            continue
        if scale is not None and name.endswith(".weight"):
            rows = "engram.embed" in name
            decode = dequantize_fp4 if ".experts." in name and "shared" not in name else dequantize_fp8_block
            tensor = (dequantize_fp8_rows if rows else decode)(tensor, scale, dtype)
        plain[name] = tensor
    return plain


def write(folder, tensors: dict[str, torch.Tensor], shards: int = 1):
    """A directory like a released one: text config nested in the multimodal one's."""
    folder.mkdir(parents=True, exist_ok=True)
    text_config = DeepseekV41TextConfig(**TINY).to_dict()
    text_config.pop("dtype", None)
    outer = {
        "model_type": "deepseek_v41",
        "architectures": ["DeepseekV41ForCausalLM"],
        "dtype": "bfloat16",
        "text_config": text_config,
        "vision_config": {"hidden_size": 32},
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
    }
    (folder / "config.json").write_text(json.dumps(outer))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def load(folder, dtype: torch.dtype, cls=DeepseekV41ForCausalLM):
    config = DeepseekV41TextConfig(**TINY)
    return cls.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)


@pytest.mark.parametrize("shards", [1, 3])
def test_released_checkpoint_loads_bit_equal(model, tmp_path, shards):
    write(tmp_path, released(model), shards)
    loaded, info = load(tmp_path, torch.float32)
    assert not any(info.values())
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_backbone_and_auto_class_load_it_too(model, tmp_path):
    write(tmp_path, released(model))
    base, info = load(tmp_path, torch.float32, DeepseekV41Model)
    assert not info["missing_keys"]
    assert all(torch.equal(tensor, model.model.state_dict()[name]) for name, tensor in base.state_dict().items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is DeepseekV41ForCausalLM and loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("shards, dtype", [(1, torch.bfloat16), (2, torch.float32)])
def test_quantised_weights_are_decoded_on_load(model, tmp_path, shards, dtype):
    stored = quantised(released(model))
    write(tmp_path, stored, shards)
    loaded, info = load(tmp_path, dtype)
    assert not any(info.values())
    expected = decoded(stored, dtype)
    actual = released(loaded)
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        is_own = not name.startswith(("vision", "aligner", "image", "mtp"))
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
        if is_own and dtype == torch.bfloat16:
            kept = native_name(name).endswith(FP32_PARTS) or ".compressor.w" in name
            assert tensor.dtype == (torch.float32 if kept else dtype), name


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_every_way_of_loading_gives_the_same_weights(model, tmp_path, place):
    stored = quantised(released(model))
    path = write(tmp_path, stored) / "config.json"
    settings = json.loads(path.read_text())
    if place == "inside":
        settings["text_config"]["quantization_config"] = settings.pop("quantization_config")
        path.write_text(json.dumps(settings))
    expected = decoded(stored, torch.bfloat16)
    for loaded in (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        DeepseekV41ForCausalLM.from_pretrained(tmp_path),
        DeepseekV41ForCausalLM.from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path)),
    ):
        assert type(loaded) is DeepseekV41ForCausalLM and loaded.dtype == torch.bfloat16
        assert all(torch.equal(tensor, expected[name].to(tensor.dtype)) for name, tensor in released(loaded).items())


def test_what_is_saved_has_released_names_and_loads_again(model, tmp_path):
    write(tmp_path / "released", quantised(released(model)))
    loaded, _ = load(tmp_path / "released", torch.bfloat16)
    loaded.save_pretrained(tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "model.safetensors")
    own = {
        name: tensor for name, tensor in released(loaded).items() if not name.startswith(("vis", "ali", "im", "mtp"))
    }
    assert stored.keys() == own.keys()
    assert all(torch.equal(tensor, own[name]) and tensor.dtype == own[name].dtype for name, tensor in stored.items())
    again, info = load(tmp_path / "saved", torch.bfloat16)
    assert not any(info.values())
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_a_new_model_is_saved_with_released_names(model, tmp_path):
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    expected = released(model)
    assert {"embed.weight", "head.weight", "norm.weight", "layers.1.engram.embed.weight"} < stored.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored.items())


def test_names_go_both_ways():
    names = {
        "embed.weight": "embed_tokens.weight",
        "layers.12.hc_ffn_scale": "layers.12.ffn_hc.scale",
        "mtp.2.ffn.gate.bias": "mtp.2.ffn.gate.e_score_correction_bias",
        "mtp.2.ffn.gate.bias_vl": "mtp.2.ffn.gate.bias_vl",
        "mtp.0.ffn.shared_experts.w1.scale": "mtp.0.ffn.shared_experts.gate_proj.scale",
        "mtp.2.markov_head.embed.weight": "mtp.2.markov_head.embed.weight",
        "layers.1.engram.embed.weight": "layers.1.engram.embed.weight",
    }
    assert {name: native_name(name) for name in names} == names
    assert [released_name(name) for name in names.values()] == list(names)


@pytest.mark.parametrize(
    "name", ["layers.2.attn.wo_b.scale", "layers.1.engram.embed.scale", "layers.0.ffn.shared_experts.w3.scale"]
)
def test_a_weight_without_its_scale_is_refused(model, tmp_path, name):
    stored = quantised(released(model))
    del stored[name]
    write(tmp_path, stored)
    weight = name.removesuffix("scale") + "weight"
    with pytest.raises(ValueError, match=f"`{weight}` holds FP8 numbers, but the checkpoint lacks `{name}`"):
        load(tmp_path, torch.float32)


def test_a_scale_without_its_weight_is_refused(model, tmp_path):
    stored = quantised(released(model))
    del stored["layers.1.attn.indexer.wq_b.weight"]
    write(tmp_path, stored)
    with pytest.raises(ValueError, match="has `layers.1.attn.indexer.wq_b.scale` but not the weight"):
        load(tmp_path, torch.float32)


@pytest.mark.parametrize("missing", ["weight", "scale"])
def test_half_an_fp4_pair_is_refused(model, tmp_path, missing):
    stored = quantised(released(model))
    name = f"layers.3.ffn.experts.2.w3.{missing}"
    del stored[name]
    write(tmp_path, stored)
    with pytest.raises(ValueError, match=f"lacks 1 of the 20 expert tensors.*`{name}`"):
        load(tmp_path, torch.float32)


def test_missing_and_surplus_experts_are_named(model, tmp_path):
    tensors = released(model)
    # Equally many of both projections: stacking would pair the wrong ones.
    moved = {"layers.0.ffn.experts.2.w1.weight", "layers.0.ffn.experts.4.w3.weight"}
    write(tmp_path / "a", {name: tensor for name, tensor in tensors.items() if name not in moved})
    with pytest.raises(ValueError, match="lacks 2 of the 10 expert tensors.*`layers.0.ffn.experts.2.w1.weight`"):
        load(tmp_path / "a", torch.float32)
    write(tmp_path / "b", tensors | {"layers.4.ffn.experts.5.w2.weight": torch.zeros(64, 32)})
    with pytest.raises(ValueError, match="too many, first `layers.4.ffn.experts.5.w2.weight`"):
        load(tmp_path / "b", torch.float32)


def test_two_names_of_one_tensor_are_refused(model, tmp_path):
    write(tmp_path, released(model) | {"layers.0.attn_hc.fn": torch.zeros(15, 192)})
    with pytest.raises(ValueError, match="`layers.0.attn_hc.fn` and `layers.0.hc_attn_fn`, which are one tensor"):
        load(tmp_path, torch.float32)


def test_missing_and_unknown_tensors_are_reported(model, tmp_path):
    tensors = released(model)
    del tensors["layers.0.hc_attn_fn"]
    write(tmp_path, tensors | {"layers.0.attn.other.weight": torch.ones(3)})
    _, info = load(tmp_path, torch.float32)
    assert info["missing_keys"] == {"model.layers.0.attn_hc.fn"}
    assert info["unexpected_keys"] == {"model.layers.0.attn.other.weight"}


@pytest.mark.parametrize(
    "name, shape", [("layers.0.attn.wq_a.scale", (1, 1)), ("layers.0.ffn.experts.0.w1.scale", (32, 1))]
)
def test_wrong_shapes_are_refused(model, tmp_path, name, shape):
    stored = quantised(released(model))
    stored[name] = torch.ones(shape).to(torch.float8_e8m0fnu)
    write(tmp_path, stored)
    with pytest.raises(RuntimeError, match="conversion"):
        load(tmp_path, torch.float32)


def test_float16_cannot_hold_the_scales(model, tmp_path):
    write(tmp_path, quantised(released(model)))
    with pytest.raises(RuntimeError, match="conversion"):
        load(tmp_path, torch.float16)
