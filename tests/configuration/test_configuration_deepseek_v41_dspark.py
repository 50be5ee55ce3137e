"""The DSpark draft's configuration: both views, its builders, and what is refused."""

import json

import pytest
from deepseek_v41_dspark_models import TINY, golden_dspark_config
from transformers import AutoConfig, Gemma3Config, GPT2Config, Qwen3Config
from transformers.cache_utils import DFlashCache

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41Config, DeepseekV41TextConfig
from blockdraft.configuration.configuration_deepseek_v41_dspark import (
    DeepseekV41DSparkConfig,
    build_deepseek_v41_dspark_draft_config,
)
from blockdraft.modeling.deepseek_v41.deepseek_v41_dspark_layers import DSparkContextLayer
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


def config_with(**settings) -> DeepseekV41DSparkConfig:
    return DeepseekV41DSparkConfig(**(TINY | settings))


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


def test_files_round_trip_and_state_both_views(tmp_path):
    config = config_with(confidence_temperatures=[1.0, 0.5, 2.0, 1], confidence_input="pre_norm")
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    for engine_name, ours in ENGINE_VIEW.items():
        assert stored[engine_name] == stored[ours] == TINY[ours], engine_name
    assert stored["model_type"] == "deepseek_v41_dspark" and stored["sample_from_anchor"] is True
    assert stored["slot_layout"] == "N" and stored["capture_point"] == "attention_input_mean"
    assert stored["confidence_head"] is True and "layer_types" not in stored and "compress_ratios" not in stored
    for loaded in (AutoConfig.from_pretrained(tmp_path), DeepseekV41DSparkConfig.from_pretrained(tmp_path)):
        assert type(loaded) is DeepseekV41DSparkConfig and loaded.to_diff_dict() == config.to_diff_dict()
    for name, value, message in (
        ("dspark_block_size", 6, "`block_size` is 4 but `dspark_block_size` is 6"),
        ("sample_from_anchor", False, "`sample_from_anchor` is False"),
        ("slot_layout", "1+N", "`slot_layout` is '1\\+N'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(stored | {name: value}))
        with pytest.raises(ValueError, match=message):
            AutoConfig.from_pretrained(tmp_path)
    del stored["slot_layout"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="no `slot_layout`"):
        AutoConfig.from_pretrained(tmp_path)


def test_engine_names_alone_make_a_draft():
    settings = {name: value for name, value in TINY.items() if name not in ENGINE_VIEW.values()}
    config = DeepseekV41DSparkConfig(**settings, **{name: TINY[ours] for name, ours in ENGINE_VIEW.items()})
    assert config.to_dict() == config_with().to_dict()


def test_caches_are_made_of_context_windows():
    layers = DFlashCache(config=config_with()).layers
    assert [type(layer) for layer in layers] == [DSparkContextLayer] * 3


def test_the_confidence_head_needs_the_markov_head():
    assert config_with().confidence_head is True and config_with(confidence_head=False).confidence_head is False
    config = config_with(markov_rank=None)
    assert config.confidence_head is False and config.to_dict()["dspark_markov_rank"] is None
    again = DeepseekV41DSparkConfig.from_dict(config.to_dict())
    assert again.markov_rank is None and again.confidence_head is False


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": None}, "`block_size` is missing"),
        ({"block_size": 1}, "`block_size` is 1"),
        ({"mask_token_id": 64}, "`mask_token_id` is 64"),
        ({"mask_token_id": 1}, "eos token"),
        ({"target_layer_ids": [5, 3]}, "strictly increasing"),
        ({"target_layer_ids": [3, 6]}, "tap ids up to 5"),
        ({"target_layer_ids": [3, 5], "capture_point": "layer_output"}, "tap ids up to 4"),
        ({"capture_point": "elsewhere"}, "`capture_point` is 'elsewhere'"),
        ({"slot_layout": "1+N"}, "`slot_layout`"),
        ({"is_causal": True}, "`is_causal` is True"),
        ({"sliding_window": 0}, "`sliding_window` is 0"),
        ({"num_hidden_layers": 0}, "`num_hidden_layers` is 0"),
        ({"markov_rank": 0}, "`markov_rank` is 0"),
        ({"markov_rank": -3}, "`markov_rank` is -3"),
        ({"markov_rank": None, "confidence_head": True}, "`confidence_head` is True"),
        ({"confidence_input": "raw"}, "`confidence_input` is 'raw'"),
        ({"confidence_temperatures": [1.0]}, "`confidence_temperatures`.*4 slots"),
        ({"confidence_temperatures": [1.0, 1.0, 0.0, 1.0]}, "`confidence_temperatures`"),
        ({"num_experts_per_tok": 6}, "`num_experts_per_tok` is 6"),
        ({"o_groups": 3}, "`o_groups` is 3"),
        ({"qk_rope_head_dim": 7}, "`qk_rope_head_dim` is 7"),
        ({"tie_word_embeddings": True}, "`tie_word_embeddings` is True"),
        ({"hc_eps": 0.0}, "`hc_eps` is 0.0"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config_with(**settings)
