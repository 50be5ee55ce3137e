"""The DSpark draft's configuration: both views, and what is refused."""

import ast
import hashlib
import inspect
import json

import pytest
from deepseek_v41_dspark_models import TINY
from transformers import AutoConfig
from transformers.cache_utils import DFlashCache

from blockdraft.configuration.configuration_deepseek_v41_dspark import DSPARK_CONTEXT, DeepseekV41DSparkConfig
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DSparkContextLayer

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


def test_a_cache_layer_that_computes_anything_else_has_another_name():
    """Drafts ship their code, and of two layers with one name a process uses the one that was loaded last: where the
    code changes, so does the name."""
    code = ast.parse(inspect.getsource(DSparkContextLayer))
    for node in ast.walk(code):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    digest = hashlib.sha256(ast.unparse(code).encode()).hexdigest()[:16]
    assert (DSPARK_CONTEXT, digest) == ("dspark_context_2", "52c75110fa00f5af")


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
