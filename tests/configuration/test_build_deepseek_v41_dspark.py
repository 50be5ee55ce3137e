"""The builders of the DSpark draft's configuration: from a V4.1 target, and from any other."""

import pytest
from deepseek_v41_dspark_models import golden_dspark_config
from transformers import Gemma3Config, GPT2Config, Qwen3Config

from blockdraft.configuration.build_deepseek_v41_dspark import build_deepseek_v41_dspark_draft_config
from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41Config, DeepseekV41TextConfig
from blockdraft.configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel

ENGINE_VIEW = {
    "dspark_block_size": "block_size",
    "dspark_noise_token_id": "mask_token_id",
    "dspark_target_layer_ids": "target_layer_ids",
    "dspark_markov_rank": "markov_rank",
    "dspark_n_routed_experts": "n_routed_experts",
    "dspark_num_experts_per_tok": "num_experts_per_tok",
    "num_nextn_predict_layers": "num_hidden_layers",
}


@pytest.mark.parametrize("name", ["v41_dspark_forward_fp32", "v41_dspark_forward_noconf", "v41_dspark_state_dict"])
def test_strict_builder_takes_everything_from_the_target(golden, name):
    case = golden(name)
    target, config = case.meta["config"], golden_dspark_config(case)
    for engine_name, ours in ENGINE_VIEW.items():
        assert getattr(config, ours) == target[engine_name], engine_name
    for name in ("hidden_size", "head_dim", "o_groups", "hc_mult", "swiglu_limit", "sliding_window", "rope_theta"):
        assert getattr(config, name) == target[name], name
    assert config.num_target_layers == target["num_hidden_layers"] and config.num_drafted == config.block_size
    assert config.capture_point == "attention_input_mean" and config.slot_layout == "N" and not config.is_causal
    assert config.architectures == ["DeepseekV41DSparkModel"] and config.confidence_head


def test_released_target_gives_the_released_draft():
    config = build_deepseek_v41_dspark_draft_config(DeepseekV41Config(text_config={}))
    assert (config.num_hidden_layers, config.block_size, config.mask_token_id) == (3, 5, 128799)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.markov_rank) == (128, 3, 256)
    assert config.target_layer_ids == [37, 38, 39] and config.num_target_layers == 40
    defaults = DeepseekV41DSparkConfig(block_size=5, mask_token_id=128799, target_layer_ids=[37, 38, 39])
    for name in ("head_dim", "q_lora_rank", "rms_norm_eps", "n_routed_experts", "sliding_window", "markov_rank"):
        assert getattr(defaults, name) == getattr(config, name), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_draft_layers": 2}, "`num_hidden_layers` is 2"),
        ({"block_size": 7}, "`block_size` is 7: the target's `dspark_block_size` is 5"),
        ({"mask_token_id": 5}, "`mask_token_id` is 5"),
        ({"markov_rank": 64}, "`markov_rank` is 64"),
        ({"target_layer_ids": [1, 2]}, "`target_layer_ids` is"),
    ],
)
def test_strict_builder_refuses_what_the_target_does_not_say(given, message):
    with pytest.raises(ValueError, match=message):
        build_deepseek_v41_dspark_draft_config(DeepseekV41TextConfig(), **given)
    wanted = {"num_draft_layers": 3, "block_size": 5, "mask_token_id": 128799, "markov_rank": 256}
    assert build_deepseek_v41_dspark_draft_config(DeepseekV41TextConfig(), **wanted).block_size == 5


def test_strict_builder_needs_a_v41_target_with_a_draft():
    with pytest.raises(ValueError, match="'qwen3'.*from_target_config"):
        build_deepseek_v41_dspark_draft_config(Qwen3Config())
    with pytest.raises(ValueError, match="`num_nextn_predict_layers` is 0"):
        build_deepseek_v41_dspark_draft_config(DeepseekV41TextConfig(num_nextn_predict_layers=0))
    ratios = DeepseekV41TextConfig().compress_ratios
    for wrong in (ratios[:-1], ratios[:-1] + [1]):
        with pytest.raises(ValueError, match="`compress_ratios`.*draft's 3 stages"):
            build_deepseek_v41_dspark_draft_config(DeepseekV41TextConfig(compress_ratios=wrong))


def test_any_v41_target_can_be_given_another_draft():
    target = DeepseekV41TextConfig(num_hidden_layers=12, num_nextn_predict_layers=0, dspark_block_size=0)
    settings = {"num_draft_layers": 2, "block_size": 7, "target_layer_ids": [3, 11], "markov_rank": None}
    config = DeepseekV41DSparkConfig.from_target_config(target, **settings, rms_norm_eps=1e-6)
    assert (config.num_hidden_layers, config.block_size, config.target_layer_ids) == (2, 7, [3, 11])
    assert config.mask_token_id == 128799 and config.capture_point == "attention_input_mean"
    assert config.markov_rank is None and config.confidence_head is False and config.rms_norm_eps == 1e-6


@pytest.mark.parametrize(
    "target",
    [
        Qwen3Config(
            vocab_size=500, hidden_size=64, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2
        ),
        GPT2Config(vocab_size=500, n_embd=64, n_layer=12, n_head=4, bos_token_id=0, eos_token_id=1),
        Gemma3Config(text_config={"vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 12}),
    ],
    ids=["qwen3", "gpt2", "gemma3"],
)
def test_any_target_has_documented_defaults(target):
    text = target.get_text_config()
    config = DeepseekV41DSparkConfig.from_target_config(target, mask_token_id=499)
    assert (config.hidden_size, config.vocab_size, config.num_target_layers) == (64, 500, 12)
    assert (config.num_hidden_layers, config.block_size, config.target_layer_ids) == (3, 5, [1, 5, 9])
    assert config.capture_point == "layer_output" and config.slot_layout == "N"
    assert (config.head_dim, config.qk_rope_head_dim, config.q_lora_rank) == (32, 16, 16)
    assert (config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (8, 2, 32)
    assert config.markov_rank == 16 and config.confidence_head and config.confidence_input == "post_norm"
    assert config.num_attention_heads == text.num_attention_heads and config.sliding_window == 128
    assert (config.bos_token_id, config.eos_token_id) == (text.bos_token_id, text.eos_token_id)
    assert DeepseekV41DSparkModel(config).layers[0].main_proj.in_features == 3 * 64


def test_overrides_win_on_every_target():
    wanted = {"sliding_window": 16, "n_routed_experts": 4, "confidence_input": "pre_norm", "confidence_head": False}
    qwen = Qwen3Config(vocab_size=97, hidden_size=48, num_hidden_layers=8, num_attention_heads=3, eos_token_id=2)
    for target in (DeepseekV41TextConfig(), qwen):
        config = DeepseekV41DSparkConfig.from_target_config(target, 91, 2, 4, [1, 2], **wanted)
        assert {name: getattr(config, name) for name in wanted} == wanted
        assert (config.mask_token_id, config.num_hidden_layers, config.block_size) == (91, 2, 4)


def test_another_target_needs_a_mask_token():
    with pytest.raises(ValueError, match="`mask_token_id` is missing"):
        DeepseekV41DSparkConfig.from_target_config(Qwen3Config())
