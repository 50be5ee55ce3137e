import json
import math

import pytest
from goldens import load_golden
from huggingface_hub.errors import StrictDataclassFieldValidationError

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41Config, DeepseekV41TextConfig

# Seven layers of all kinds: window only, Full (1 and 4), Reuse (2 and 6), Reindex (3 and 5); Engram in 1 and 4.
TINY = load_golden("v41_target_engram").meta["config"]


def tiny_config(**settings) -> DeepseekV41TextConfig:
    return DeepseekV41TextConfig(**(TINY | settings))


def test_defaults_are_the_released_shape():
    config = DeepseekV41TextConfig()
    sizes = (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.max_position_embeddings)
    assert sizes == (129280, 5120, 40, 1048576)
    heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.qk_rope_head_dim)
    assert heads == (64, 1, 512, 64)
    assert (config.q_lora_rank, config.o_lora_rank, config.o_groups, config.sliding_window) == (1280, 1024, 8, 128)
    assert (config.rms_norm_eps, config.initializer_range, config.attention_dropout) == (1e-20, 0.02, 0.0)
    assert (config.attention_bias, config.tie_word_embeddings, config.hidden_act) == (False, False, "silu")

    experts = (config.n_routed_experts, config.n_shared_experts, config.num_experts_per_tok)
    assert experts == (384, 1, 6) and config.moe_intermediate_size == 2304
    router = (config.scoring_func, config.topk_method, config.norm_topk_prob, config.routed_scaling_factor)
    assert router == ("sqrtsoftplus", "noaux_tc", True, 1.5) and config.swiglu_limit == 10

    assert config.compress_ratios == [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3
    assert config.kv_source_layer_ids == [2, 8, 14, 20]
    assert config.index_source_layer_ids == [2, 8, 14, 20, 24, 28, 32, 36]
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (32, 128, 512)
    candidates = (config.candidate_source_layer_id, config.candidate_topk_blocks, config.candidate_block_size)
    assert candidates == (20, 2048, 8)
    assert (config.rope_theta, config.compress_rope_theta) == (1e4, 1.6e5)
    yarn = {"factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536}
    assert config.rope_scaling == {"rope_type": "yarn"} | yarn

    assert (config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps) == (4, 20, 1e-6)
    assert config.engram_layer_ids == [1, 14] and config.engram_num_embeddings == [384006168, 384016682]
    engram = (config.engram_max_ngram_size, config.engram_vocab_size, config.engram_n_heads, config.engram_head_dim)
    assert engram == (4, 16000000, 8, 256)
    assert (config.engram_pad_token_id, config.engram_compressed_vocab_size) == (2, 99092)

    assert (config.num_nextn_predict_layers, config.dspark_block_size, config.dspark_markov_rank) == (3, 5, 256)
    assert (config.dspark_noise_token_id, config.dspark_target_layer_ids) == (128799, [37, 38, 39])
    assert (config.dspark_n_routed_experts, config.dspark_num_experts_per_tok) == (128, 3)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (2, 0, 1)


def test_kinds_of_layers():
    config = tiny_config()
    assert [config.is_full(layer) for layer in range(7)] == [layer in (1, 4) for layer in range(7)]
    assert [config.is_index_source(layer) for layer in range(7)] == [layer in (1, 3, 4, 5) for layer in range(7)]
    assert len(config.layer_types) == 7 and config.engram_layers == [1, 4]


def test_a_shorter_model_keeps_the_schedules():
    config = DeepseekV41TextConfig(num_hidden_layers=4)
    assert len(config.compress_ratios) == 43 and config.kv_source_layer_ids == [2, 8, 14, 20]
    assert config.engram_layer_ids == [1, 14] and config.engram_layers == [1] and len(config.layer_types) == 4


def test_no_engram_means_no_rows():
    config = DeepseekV41TextConfig(engram_layer_ids=[], engram_vocab_size=0, engram_max_ngram_size=0)
    assert config.engram_num_embeddings == [] and config.engram_layers == []


@pytest.mark.parametrize(
    "settings",
    [
        {"attention_dropout": 0.5},
        {"swiglu_limit": 0},
        {"rope_scaling": {}},
        {"num_nextn_predict_layers": 0, "dspark_block_size": 0},
        {"candidate_source_layer_id": -1, "candidate_block_size": 0, "candidate_topk_blocks": 0},
        {"qk_rope_head_dim": 36},
        {"compress_ratios": [0, 2, 2, 2, 1, 1, 1]},
        {"engram_max_ngram_size": 2},
        {"engram_pad_token_id": 0},
        # Window-only layers between a Full layer and those that read its keys.
        {"compress_ratios": [0, 2, 0, 2, 1, 0, 1, 0, 0, 0], "index_source_layer_ids": [1, 3, 4]},
        # Sources beyond the depth are never built, whatever their ratio.
        {"kv_source_layer_ids": [1, 4, 8], "index_source_layer_ids": [1, 3, 4, 5, 8]},
        # Every compressed layer chooses for itself, or none compresses at all.
        {"kv_source_layer_ids": [1, 2, 3, 4, 5, 6], "index_source_layer_ids": [1, 2, 3, 4, 5, 6]},
        {
            "compress_ratios": [0] * 10,
            "kv_source_layer_ids": [],
            "index_source_layer_ids": [],
            "candidate_source_layer_id": -1,
        },
    ],
)
def test_what_is_allowed(settings):
    config = tiny_config(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


POSITIVE_INTS = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "n_routed_experts",
    "num_experts_per_tok",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "hc_mult",
    "hc_sinkhorn_iters",
    "max_position_embeddings",
)
ENGRAM_INTS = ("engram_n_heads", "engram_head_dim", "engram_vocab_size", "engram_compressed_vocab_size")
POSITIVE_NUMBERS = ("rms_norm_eps", "hc_eps", "rope_theta", "compress_rope_theta", "routed_scaling_factor")


SCHEDULES = ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids")


@pytest.mark.parametrize("name", POSITIVE_INTS + ENGRAM_INTS)
def test_sizes_are_positive(name):
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"`{name}` is {value}: "):
            tiny_config(**{name: value})


@pytest.mark.parametrize("name", POSITIVE_NUMBERS)
def test_scales_are_finite_and_positive(name):
    for value in (0.0, -1e-6, math.inf, -math.inf, math.nan):
        with pytest.raises(ValueError, match=f"`{name}` is {value}: "):
            tiny_config(**{name: value})


OTHER_INTS = (
    "num_key_value_heads",
    "n_shared_experts",
    "qk_rope_head_dim",
    "num_nextn_predict_layers",
    "dspark_block_size",
    "engram_max_ngram_size",
    "engram_pad_token_id",
    "candidate_source_layer_id",
    "candidate_block_size",
    "candidate_topk_blocks",
)


@pytest.mark.parametrize("name", POSITIVE_INTS + ENGRAM_INTS + OTHER_INTS)
def test_integers_are_neither_booleans_nor_floats(name):
    """What is of the wrong type is refused by the dataclass itself, with an error of its own that names the field."""
    for value in (True, 4.0, "4"):
        with pytest.raises(StrictDataclassFieldValidationError, match=f"'{name}'"):
            tiny_config(**{name: value})


@pytest.mark.parametrize("name", (*SCHEDULES, "compress_ratios", "engram_num_embeddings"))
def test_lists_hold_integers(name):
    for value in (True, 4.0, "4"):
        with pytest.raises(StrictDataclassFieldValidationError, match=f"'{name}'"):
            tiny_config(**{name: [*TINY[name][:-1], value]})


@pytest.mark.parametrize(
    "settings, named",
    [
        # Attention and experts
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"n_shared_experts": 0}, "n_shared_experts"),
        ({"o_groups": 4}, "o_groups"),
        ({"num_experts_per_tok": 8}, "num_experts_per_tok"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": -2}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ({"qk_rope_head_dim": 46}, "qk_rope_head_dim"),  # head_dim is 44
        ({"qk_rope_head_dim": 38}, "qk_rope_head_dim"),  # index_head_dim is 36
        ({"attention_dropout": 1.0}, "attention_dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"attention_dropout": math.nan}, "attention_dropout"),
        ({"attention_bias": True}, "attention_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"swiglu_limit": -1.0}, "swiglu_limit"),
        # Draft
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"dspark_block_size": -1}, "dspark_block_size"),
        # Schedules
        ({"compress_ratios": [0, 2, 2, 2, 1, 1]}, "compress_ratios"),
        ({"compress_ratios": [0, 2, 2, 2, 1, 1, -1]}, "compress_ratios"),
        ({"kv_source_layer_ids": [-1, 1, 4]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [4, 1]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [1, 1, 4]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [1, 4, 10]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [1, 2, 4]}, "kv_source_layer_ids"),  # 2 is no index source
        ({"index_source_layer_ids": [-1, 1, 4]}, "index_source_layer_ids"),
        ({"index_source_layer_ids": [1, 4, 3]}, "index_source_layer_ids"),
        ({"index_source_layer_ids": [1, 3, 3, 4]}, "index_source_layer_ids"),
        ({"index_source_layer_ids": [1, 4, 10]}, "index_source_layer_ids"),
        ({"engram_layer_ids": [-1, 4]}, "engram_layer_ids"),
        ({"engram_layer_ids": [4, 1]}, "engram_layer_ids"),
        ({"engram_layer_ids": [4, 4]}, "engram_layer_ids"),
        ({"engram_layer_ids": [1, 10]}, "engram_layer_ids"),
        ({"index_source_layer_ids": [0, 1, 4]}, "index_source_layer_ids"),  # layer 0 sees its window only
        (
            {"kv_source_layer_ids": [0, 1, 4], "index_source_layer_ids": [0, 1, 3, 4, 5]},
            "kv_source_layer_ids",
        ),
        ({"compress_ratios": [0, 2, 2, 1, 1, 1, 1]}, "compress_ratios"),  # layer 3 reads what 1 compressed by 2
        ({"compress_ratios": [2, 2, 2, 2, 1, 1, 1]}, "compress_ratios"),  # nothing compresses below layer 0
        ({"candidate_source_layer_id": -2}, "candidate_source_layer_id"),
        ({"candidate_source_layer_id": 3}, "candidate_source_layer_id"),  # an index source, but it has no keys
        ({"candidate_source_layer_id": 1}, "candidate_source_layer_id"),  # layer 5 chooses among the keys of layer 4
        ({"candidate_block_size": 0}, "candidate_block_size"),
        ({"candidate_topk_blocks": 0}, "candidate_topk_blocks"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 64}}, "rope_scaling"),
        # Engram
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size"),
        ({"engram_pad_token_id": -1}, "engram_pad_token_id"),
        ({"engram_pad_token_id": 89}, "engram_pad_token_id"),
        ({"engram_num_embeddings": [170]}, "engram_num_embeddings"),
        ({"engram_num_embeddings": [170, 0]}, "engram_num_embeddings"),
        ({"engram_num_embeddings": None}, "engram_num_embeddings"),  # layers of one's own need rows of one's own
        ({"engram_layer_ids": []}, "engram_num_embeddings"),
    ],
)
def test_impossible_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=f"^`{named}` is "):
        tiny_config(**settings)


def test_unknown_keys_are_kept_and_files_round_trip(tmp_path):
    config = tiny_config(n_hash_layers=0, dspark_extra={"a": [1]}, dtype="bfloat16")
    assert config.n_hash_layers == 0 and config.dspark_extra == {"a": [1]} and config.schema_version == 1
    config.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "deepseek_v41_text" and "layer_types" not in stored
    assert {name: stored[name] for name in TINY} == TINY | {"dtype": "bfloat16"}
    loaded = DeepseekV41TextConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()


def test_defaults_are_not_shared():
    DeepseekV41TextConfig().rope_scaling["factor"] = 1
    DeepseekV41TextConfig().compress_ratios.append(7)
    assert DeepseekV41TextConfig().rope_scaling["factor"] == 16
    assert len(DeepseekV41TextConfig().compress_ratios) == 43


def test_stored_layer_types_are_derived_again():
    assert len(tiny_config(layer_types=["full_attention"]).layer_types) == 7


def test_alternative_names_of_other_libraries():
    assert tiny_config().num_local_experts == tiny_config().n_routed_experts == 7


def test_multimodal_configuration_opens_as_its_text_side(tmp_path):
    stored = {
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "text_config": {k: v for k, v in TINY.items() if k != "dtype"} | {"model_type": "deepseek_v41_text"},
        "vision_config": {"hidden_size": 32},
        "architectures": ["DeepseekV41ForConditionalGeneration"],
    }
    stored["text_config"]["quantised_by"] = "someone"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = DeepseekV41Config.from_pretrained(tmp_path)
    assert type(config.text_config) is DeepseekV41TextConfig and config.get_text_config() is config.text_config
    assert config.text_config.hidden_size == 40 and config.text_config.quantised_by == "someone"
    assert config.vision_config == {"hidden_size": 32} and config.image_token_id == 129264
    assert str(config.text_config.dtype) == "torch.bfloat16"  # where the text side states none

    config.save_pretrained(tmp_path / "again")
    again = DeepseekV41Config.from_pretrained(tmp_path / "again")
    assert again.text_config.to_dict() == config.text_config.to_dict()
    assert again.vision_config == config.vision_config


def test_multimodal_configuration_takes_a_text_configuration_and_has_one_by_default():
    text = tiny_config()
    assert DeepseekV41Config(text_config=text).text_config is text
    assert DeepseekV41Config().text_config.to_dict() == DeepseekV41TextConfig().to_dict()


def test_nested_settings_are_checked():
    with pytest.raises(ValueError, match="`sliding_window`"):
        DeepseekV41Config(text_config=TINY | {"sliding_window": 0})


def test_only_v41_text_models_may_be_nested():
    with pytest.raises(ValueError, match="'llama'"):
        DeepseekV41Config(text_config={"model_type": "llama"})


def test_quantization_of_released_weights_is_dropped():
    """They are decoded on load; a `quantization_config` would send transformers to a quantiser of its own."""
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}
    assert not hasattr(tiny_config(quantization_config=quantization), "quantization_config")
    config = DeepseekV41Config(text_config=TINY, quantization_config=quantization)
    assert not hasattr(config, "quantization_config")
    nested = DeepseekV41Config(text_config=TINY | {"quantization_config": quantization})
    assert not hasattr(nested.text_config, "quantization_config")
