import json

import pytest
from kimi_k3_models import KDA, TINY, tiny_config
from transformers import AutoConfig

from blockdraft.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig


def test_defaults_are_the_released_shape():
    config = KimiK3TextConfig()
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == [*range(3, 92, 4), 92] and len(config.layer_types) == 93
    assert config.mlp_layer_types == ["dense"] + ["sparse"] * 92
    assert (config.qk_head_dim, config.head_dim, config.num_key_value_heads) == (192, 74, 96)
    assert (config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_size) == (96, 128, 4)
    assert config.linear_use_full_rank_gate and config.linear_gate_lower_bound == -5.0


def test_absent_kda_settings_mean_the_older_kind():
    config = tiny_config(linear_attn_config={"kda_layers": [1, 2, 4], "full_attn_layers": [3, 5]})
    assert not config.linear_use_full_rank_gate and config.linear_gate_lower_bound is None
    assert (config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_size) == (96, 128, 4)


def test_sparse_schedule():
    config = tiny_config(first_k_dense_replace=0, moe_layer_freq=2)
    assert config.mlp_layer_types == ["sparse", "dense", "sparse", "dense", "sparse"]
    assert tiny_config(num_experts=None).mlp_layer_types == ["dense"] * 5


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"moe_layer_freq": 0}, "moe_layer_freq"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"activation_situ_linear_beta": 0}, "activation_situ_linear_beta"),
        ({"attn_res_block_size": 0}, "attn_res_block_size"),
        ({"linear_attn_config": KDA | {"kda_layers": [1, 2]}}, "linear_attn_config"),
        ({"linear_attn_config": KDA | {"kda_layers": [1, 2, 3, 4]}}, "linear_attn_config"),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3, 4, 5]}}, "linear_attn_config"),
        ({"linear_attn_config": KDA | {"kda_layers": [1, 2, 3, 4, 5], "full_attn_layers": []}}, "full_attn_layers"),
        ({"linear_attn_config": KDA | {"gate_lower_bound": 0.5}}, "gate_lower_bound"),
        ({"num_experts": 0}, "num_experts"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"routed_expert_hidden_size": 0}, "routed_expert_hidden_size"),
        ({"num_experts_per_token": 7}, "num_experts_per_token"),
        ({"moe_router_activation_func": "relu"}, "moe_router_activation_func"),
        ({"num_expert_group": 4}, "num_expert_group"),
        ({"num_expert_group": 3, "topk_group": 4}, "topk_group"),
    ],
)
def test_impossible_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=f"`(linear_attn_config.)?{named}`"):
        tiny_config(**settings)


def test_unknown_keys_are_kept_and_files_round_trip(tmp_path):
    config = tiny_config(kda_mode="chunk", rope_theta=10000.0)
    assert config.kda_mode == "chunk" and config.schema_version == 1
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is KimiK3TextConfig and loaded.to_diff_dict() == config.to_diff_dict()


def test_alternative_names_of_other_libraries():
    config = tiny_config()
    assert config.num_local_experts == config.num_experts == 6
    assert config.num_experts_per_tok == 3 and config.n_shared_experts == 2 and config.norm_topk_prob is True


def test_multimodal_configuration_opens_as_its_text_side(tmp_path):
    stored = {
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "text_config": TINY | {"model_type": "kimi_linear", "situ_backend": "torch"},
        "vision_config": {"hidden_size": 32},
        "media_placeholder_token_id": 5,
    }
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is KimiK3Config and type(config.text_config) is KimiK3TextConfig
    assert config.get_text_config() is config.text_config
    assert config.text_config.situ_backend == "torch" and config.text_config.hidden_size == 48
    assert config.vision_config == {"hidden_size": 32} and config.media_placeholder_token_id == 5
    assert str(config.text_config.dtype) == "torch.bfloat16"  # where the text side states none

    config.save_pretrained(tmp_path / "again")
    again = AutoConfig.from_pretrained(tmp_path / "again")
    assert again.text_config.to_dict() == config.text_config.to_dict()


def test_only_kimi_text_models_may_be_nested():
    with pytest.raises(ValueError, match="'llama'"):
        KimiK3Config(text_config={"model_type": "llama"})


@pytest.mark.parametrize("layout", [{"format": "mxfp4-pack-quantized"}, {"config_groups": {"group_0": {}}}])
def test_quantization_of_released_experts_is_dropped(layout):
    """They are decoded on load; a `quantization_config` would send transformers to a quantiser of its own."""
    if "config_groups" in layout:
        layout["config_groups"]["group_0"]["format"] = "mxfp4-pack-quantized"
    quantization = {"quant_method": "compressed-tensors", **layout}
    assert not hasattr(tiny_config(quantization_config=quantization), "quantization_config")
    config = KimiK3Config(text_config=TINY, quantization_config=quantization)
    assert not hasattr(config, "quantization_config")
    other = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    assert tiny_config(quantization_config=other).quantization_config == other
