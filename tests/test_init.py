import subprocess
import sys

import pytest
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import blockdraft
from blockdraft import (
    DeepseekV41Config,
    DeepseekV41DSparkConfig,
    DeepseekV41DSparkModel,
    DeepseekV41ForCausalLM,
    DeepseekV41Model,
    DeepseekV41TextConfig,
    KimiK3Config,
    KimiK3DFlashConfig,
    KimiK3DFlashDraftModel,
    KimiK3ForCausalLM,
    KimiK3Model,
    KimiK3TextConfig,
)


def test_every_public_name_is_there():
    for name in blockdraft.__all__:
        assert getattr(blockdraft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'KimiK4'"):
        _ = blockdraft.KimiK4


def test_import_is_light():
    """Whoever only loads or decodes does not wait for what training and reports need."""
    heavy = ("datasets", "matplotlib", "peft", "transformers.trainer", "blockdraft.trainer.draft_trainer")
    code = f"import sys, blockdraft; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "config",
    [
        DeepseekV41Config,
        DeepseekV41DSparkConfig,
        DeepseekV41TextConfig,
        KimiK3Config,
        KimiK3DFlashConfig,
        KimiK3TextConfig,
    ],
)
def test_auto_config_knows_the_model_type(config):
    assert CONFIG_MAPPING[config.model_type] is config


def test_auto_models_know_the_configurations():
    assert AutoModel._model_mapping[DeepseekV41DSparkConfig] is DeepseekV41DSparkModel
    assert AutoModel._model_mapping[KimiK3DFlashConfig] is KimiK3DFlashDraftModel
    for configs, model, causal_lm in (
        ((DeepseekV41TextConfig, DeepseekV41Config), DeepseekV41Model, DeepseekV41ForCausalLM),
        ((KimiK3TextConfig, KimiK3Config), KimiK3Model, KimiK3ForCausalLM),
    ):
        for config in configs:
            assert AutoModel._model_mapping[config] is model
            assert AutoModelForCausalLM._model_mapping[config] is causal_lm
