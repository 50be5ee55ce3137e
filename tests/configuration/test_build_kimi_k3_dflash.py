import json

import pytest
from kimi_k3_models import TINY, tiny_config
from transformers import Gemma3Config, GPT2Config, Qwen3Config

from blockdraft.configuration.build_kimi_k3_dflash import (
    build_kimi_k3_dflash_draft_config,
    build_kimi_k3_dflash_target_kwargs,
)
from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig

# What the reference's class adds and no equation reads: kernel choices, positions, a grouping flag.
UNUSED = ("kda_", "rope_", "situ_backend", "topk_method", "use_grouped_topk", "attn_res_triton")


DFLASH = {"mask_token_id": 91, "target_layer_ids": [1, 2]}


def test_builder_equals_the_reference(golden):
    meta = golden("k3_dflash_draft_config").meta
    config = build_kimi_k3_dflash_draft_config(KimiK3TextConfig(**meta["target_config"]), **meta["args"])
    built = json.loads(json.dumps(config.to_dict()))
    expected = {name: value for name, value in meta["draft_config"].items() if not name.startswith(UNUSED)}
    nested, model_type = expected.pop("dflash_config"), expected.pop("model_type")
    assert {name: built[name] for name in expected} == expected
    assert built["dflash_config"].items() >= nested.items() and model_type == "kimi_linear"
    assert config._attn_implementation == config.attention_backend == meta["args"]["attention_backend"]


def test_builder_reads_a_multimodal_target_and_fills_default_layers():
    config = KimiK3Config(text_config=TINY | {"num_hidden_layers": 12, "linear_attn_config": None})
    built = build_kimi_k3_dflash_draft_config(config, 3, 12, 8, {"mask_token_id": 91}, "sdpa")
    assert built.target_layer_ids == [1, 5, 9]


def test_targets_quantisation_and_code_are_not_the_drafts():
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    target = tiny_config(quantization_config=quantization, auto_map={"AutoConfig": "x.Y"}, dtype="bfloat16")
    built = build_kimi_k3_dflash_draft_config(target, 2, 5, 4, DFLASH, "sdpa")
    assert not hasattr(built, "quantization_config") and not hasattr(built, "auto_map")
    assert built.dtype is None and built.model_type == "kimi_k3_dflash"


def test_builders_refuse_other_targets():
    llama_like = Qwen3Config(num_hidden_layers=12)
    with pytest.raises(ValueError, match="from_target_config"):
        build_kimi_k3_dflash_draft_config(llama_like, 2, 12, 8, DFLASH, "sdpa")
    with pytest.raises(ValueError, match="'qwen3'"):
        build_kimi_k3_dflash_target_kwargs(llama_like)


def test_target_kwargs_pick_the_text_model():
    config = KimiK3Config(text_config=TINY)
    assert build_kimi_k3_dflash_target_kwargs(config)["config"] is config.text_config
    assert build_kimi_k3_dflash_target_kwargs(config.text_config)["config"] is config.text_config


@pytest.mark.parametrize(
    "target",
    [
        Qwen3Config(
            vocab_size=500, hidden_size=64, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2
        ),
        GPT2Config(vocab_size=500, n_embd=64, n_layer=12, n_head=4),
        Gemma3Config(text_config={"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 12}),
    ],
    ids=["qwen3", "gpt2", "gemma3"],
)
def test_any_target_has_documented_defaults(target):
    text = target.get_text_config()
    config = KimiK3DFlashConfig.from_target_config(target, mask_token_id=499, num_draft_layers=3, block_size=8)
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (64, 500, 12)
    assert config.target_layer_ids == [1, 5, 9] and config.num_hidden_layers == 3 and config.block_size == 8
    assert (config.q_lora_rank, config.kv_lora_rank) == (32, 32)
    assert config.num_attention_heads == text.num_attention_heads and config.intermediate_size > 0
    assert (config.bos_token_id, config.eos_token_id) == (text.bos_token_id, text.eos_token_id)


def test_overrides_win_on_every_target():
    wanted = {"output_multiplier": 0.5, "final_logit_softcapping": 30.0, "sliding_window": 64, "intermediate_size": 80}
    qwen = Qwen3Config(vocab_size=97, hidden_size=48, num_hidden_layers=8, num_attention_heads=3, eos_token_id=2)
    for target in (tiny_config(), qwen):
        config = KimiK3DFlashConfig.from_target_config(target, 91, 2, 4, target_layer_ids=[1, 2], **wanted)
        assert {name: getattr(config, name) for name in wanted} == wanted
        assert config.to_dict()["dflash_config"]["output_multiplier"] == 0.5


def test_shallow_targets_get_layers_that_differ():
    shallow = Qwen3Config(vocab_size=97, hidden_size=48, num_hidden_layers=7, num_attention_heads=3, eos_token_id=2)
    assert KimiK3DFlashConfig.from_target_config(shallow, 91, num_draft_layers=5).target_layer_ids == [0, 1, 2, 4, 5]
    config = KimiK3DFlashConfig.from_target_config(shallow, 91, num_draft_layers=5, target_layer_ids=[1, 2, 4])
    assert config.target_layer_ids == [1, 2, 4]
    with pytest.raises(ValueError, match="deeper target"):
        KimiK3DFlashConfig.from_target_config(Qwen3Config(num_hidden_layers=1), 91)


def test_features_of_a_target_with_hyper_connections_enter_its_attention():
    config = KimiK3DFlashConfig.from_target_config(DeepseekV41TextConfig(), mask_token_id=5)
    assert config.capture_point == "attention_input_mean"
    assert KimiK3DFlashConfig.from_target_config(KimiK3TextConfig(), mask_token_id=5).capture_point == "layer_output"


@pytest.mark.parametrize("target_config", [KimiK3TextConfig(), Qwen3Config()], ids=["k3", "qwen3"])
def test_new_drafts_have_slots_that_differ(target_config):
    """The reference's rule of visibility lets a draft without positions learn nothing in a small budget."""
    config = KimiK3DFlashConfig.from_target_config(target_config, mask_token_id=5, block_size=8)
    assert config.is_causal and config.sliding_window == 8
    reference = KimiK3DFlashConfig.from_target_config(
        target_config, mask_token_id=5, is_causal=False, sliding_window=None
    )
    assert not reference.is_causal and reference.sliding_window is None
