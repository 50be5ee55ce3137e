import copy
import json

import pytest
from kimi_k3_models import TINY, tiny_config
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel
from blockdraft.modeling.target.target_identity import target_record

DENSE = {name: TINY[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")}
DRAFT = DENSE | {
    "num_hidden_layers": 2,
    "block_size": 4,
    "mask_token_id": 91,
    "target_layer_ids": [1, 3],
    "num_target_layers": 6,
    "bos_token_id": 1,
    "eos_token_id": [2, 7],
}


def draft_config(**settings) -> KimiK3DFlashConfig:
    return KimiK3DFlashConfig(**(DRAFT | settings))


def test_defaults_of_the_block_contract():
    config = draft_config()
    assert (config.slot_layout, config.capture_point, config.is_causal) == ("1+N", "layer_output", False)
    assert (config.output_multiplier, config.input_embedding_scale) == (1.0, 1.0)
    assert config.final_logit_softcapping is None and config.sliding_window is None
    assert config.draft_schema_version == 1


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"attention_backend": "flash_attention_2"}, "attention_backend"),
        ({"block_size": None}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"mask_token_id": 97}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"mask_token_id": 1}, "mask_token_id"),
        ({"mask_token_id": 7}, "mask_token_id"),
        ({"target_layer_ids": None}, "target_layer_ids"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"target_layer_ids": [1, 1]}, "target_layer_ids"),
        ({"target_layer_ids": [3, 1]}, "target_layer_ids"),
        ({"target_layer_ids": [-1, 1]}, "target_layer_ids"),
        ({"target_layer_ids": [1, 5]}, "target_layer_ids"),
        ({"slot_layout": "N"}, "slot_layout"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"capture_point": "hc_mean"}, "capture_point"),
        ({"output_multiplier": 0}, "output_multiplier"),
        ({"input_embedding_scale": -1.0}, "input_embedding_scale"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"draft_schema_version": 2}, "draft_schema_version"),
        ({"schema_version": 2}, "schema_version"),
        ({"dflash_config": {"projector_type": "mlp"}}, "dflash_config.projector_type"),
        ({"dflash_config": {"num_anchors": 4}}, "dflash_config.num_anchors"),
    ],
)
def test_impossible_settings_are_named(settings, named):
    with pytest.raises(ValueError, match=f"`{named}`"):
        draft_config(**settings)


def test_nested_settings_are_read_and_written():
    nested = {
        "mask_token_id": 90,
        "target_layer_ids": [0, 2],
        "output_multiplier": 0.5,
        "causal": True,
        "projector_type": None,
    }
    config = KimiK3DFlashConfig(**(DRAFT | {"mask_token_id": None, "target_layer_ids": None}), dflash_config=nested)
    assert (config.mask_token_id, config.target_layer_ids, config.output_multiplier) == (90, [0, 2], 0.5)
    assert config.is_causal
    assert not hasattr(config, "dflash_config")  # one truth
    config.output_multiplier = 2.0
    written = config.to_dict()
    assert written["sample_from_anchor"] is False
    assert written["dflash_config"] == {
        "block_size": 4,
        "mask_token_id": 90,
        "target_layer_ids": [0, 2],
        "output_multiplier": 2.0,
        "final_logit_softcapping": None,
        "input_embedding_scale": 1.0,
        "causal": True,
    }


@pytest.mark.parametrize(
    "settings, nested",
    [
        ({}, {"mask_token_id": 90}),
        ({}, {"target_layer_ids": [0, 2]}),
        ({"output_multiplier": 2.0}, {"output_multiplier": 0.5}),
        ({"is_causal": True}, {"causal": False}),
        ({"is_causal": False}, {"causal": True}),  # the default, but given
        ({"final_logit_softcapping": None}, {"final_logit_softcapping": 30.0}),
    ],
)
def test_contradictions_of_the_two_views_are_named(settings, nested):
    (name,) = nested
    with pytest.raises(ValueError, match=f"`dflash_config.{name}`.*give one value"):
        draft_config(**settings, dflash_config=nested)


def test_the_attention_backend_is_kept_and_used_where_nothing_else_is_asked_for(tmp_path):
    assert draft_config().attention_backend == "sdpa"
    KimiK3DFlashDraftModel(draft_config(attention_backend="eager")).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attention_backend"] == "eager"
    loaded = AutoModel.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == loaded.config.attention_backend == "eager"
    loaded = AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert (loaded.config._attn_implementation, loaded.config.attention_backend) == ("sdpa", "eager")


def test_what_was_given_is_told_from_defaults_and_forgotten():
    config = draft_config(dflash_config={"causal": True, "output_multiplier": 0.5})
    assert config.is_causal and config.output_multiplier == 0.5
    assert "_given" not in vars(config) | vars(copy.deepcopy(config)) | config.to_dict()


def test_building_needs_the_package(monkeypatch):
    monkeypatch.setattr(KimiK3DFlashConfig, "builder", "not_shipped")
    with pytest.raises(ValueError, match="Install blockdraft"):
        KimiK3DFlashConfig.from_target_config(tiny_config(), 91)


def test_a_stored_file_without_slot_layout_is_refused(tmp_path):
    stored = draft_config().to_dict()
    assert KimiK3DFlashConfig.from_dict(stored).to_dict() == stored
    del stored["slot_layout"]
    with pytest.raises(ValueError, match="no `slot_layout`"):
        KimiK3DFlashConfig.from_dict(stored)


def test_target_record_fits_the_configuration_and_survives_the_file(tmp_path):
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=97, hidden_size=48, num_hidden_layers=6, num_attention_heads=4, intermediate_size=64)
    )
    config = draft_config(target=target_record(llama, None), objective={"loss_type": "fixed_anchor"}, note="kept")
    config.save_pretrained(tmp_path)
    loaded = KimiK3DFlashConfig.from_pretrained(tmp_path)
    assert loaded.target == config.target and loaded.objective == config.objective and loaded.note == "kept"
    assert loaded.to_diff_dict() == config.to_diff_dict()
