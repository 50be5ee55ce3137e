import functools
import json

import pytest
from kimi_k3_models import TINY, tiny_config
from transformers import AutoConfig, DynamicCache, Qwen3Config
from transformers.cache_utils import DFlashCache

from blockdraft.configuration.build_kimi_k3_dflash import (
    build_kimi_k3_dflash_draft_config,
)
from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig
from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig

DFLASH = {"mask_token_id": 91, "target_layer_ids": [1, 2]}


@pytest.fixture
def built() -> KimiK3DFlashConfig:
    return build_kimi_k3_dflash_draft_config(tiny_config(), 2, 5, 4, DFLASH, "eager")


@pytest.mark.parametrize(
    "name",
    ["k3_dflash_forward_base", "k3_dflash_forward_nogate", "k3_dflash_forward_outputs", "k3_dflash_loss_packed"],
)
def test_reference_configurations_are_read(golden, name):
    stored = golden(name).meta["config"]
    config = KimiK3DFlashConfig(**stored)
    nested = stored["dflash_config"]
    assert config.mask_token_id == nested["mask_token_id"]
    assert config.target_layer_ids == nested["target_layer_ids"]
    assert config.output_multiplier == nested.get("output_multiplier", 1.0)
    assert config.block_size == stored["block_size"]


def test_built_draft_is_dense_and_all_full_attention(built):
    assert built.layer_types == ["full_attention"] * 2
    assert (built.num_experts, built.num_shared_experts, built.attn_res_block_size) == (None, 0, None)
    assert built.architectures == ["KimiK3DFlashDraftModel"] and built._attn_implementation == "eager"
    assert built.kv_lora_rank == TINY["kv_lora_rank"] and built.rms_norm_eps == TINY["rms_norm_eps"]
    assert len(DynamicCache(config=built).layers) == len(DFlashCache(config=built).layers) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"num_experts": 4, "num_experts_per_token": 2},
        {"attn_res_block_size": 2},
        {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}},
    ],
)
def test_drafts_with_parts_of_a_target_are_refused(built, settings):
    with pytest.raises(ValueError, match="dense"):
        KimiK3DFlashConfig(**(built.to_dict() | settings))


def test_files_round_trip_and_state_both_views(built, tmp_path):
    built.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "kimi_k3_dflash" and stored["slot_layout"] == "1+N"
    for name in ("block_size", "mask_token_id", "target_layer_ids"):
        assert stored[name] == stored["dflash_config"][name] == getattr(built, name)
    assert stored["dflash_config"]["causal"] is False and stored["sample_from_anchor"] is False
    assert stored["capture_point"] == "layer_output" and stored["draft_schema_version"] == 1
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is KimiK3DFlashConfig and loaded.to_diff_dict() == built.to_diff_dict()
    del stored["slot_layout"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="no `slot_layout`"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("target_config", [KimiK3TextConfig(), Qwen3Config()], ids=["k3", "qwen3"])
def test_the_last_of_several_layers_sees_the_whole_context(target_config):
    build = functools.partial(KimiK3DFlashConfig.from_target_config, target_config, mask_token_id=5, block_size=8)
    config = build(num_draft_layers=3)
    assert config.context_windows == [8, 8, None]
    stored = config.to_dict()
    # Engines read it there; caches of transformers keep all rows of every layer, whose padding takes no place.
    assert stored["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]
    assert config.layer_types == ["full_attention"] * 3
    assert KimiK3DFlashConfig.from_dict(stored).to_dict() == stored
    assert build(num_draft_layers=1).context_windows == [8]
    assert build(num_draft_layers=3, sliding_window=None).context_windows == [None] * 3
    assert build(num_draft_layers=3, num_full_attention_layers=0).context_windows == [8] * 3
    for settings, says in (
        ({"num_full_attention_layers": 3}, "of 3 layers at least one keeps the window"),
        ({"num_full_attention_layers": -1}, "of 3 layers at least one keeps the window"),
        ({"num_full_attention_layers": 1, "sliding_window": None}, "leave it out, or set a window"),
    ):
        with pytest.raises(ValueError, match=f"`num_full_attention_layers` is .*{says}"):
            build(num_draft_layers=3, **settings)
