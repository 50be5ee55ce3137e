"""Block-parallel draft models for speculative decoding, as plain Transformers models."""

from importlib import import_module

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from .configuration.build_deepseek_v41_dspark import build_deepseek_v41_dspark_draft_config
from .configuration.build_kimi_k3_dflash import build_kimi_k3_dflash_draft_config, build_kimi_k3_dflash_target_kwargs
from .configuration.configuration_deepseek_v41 import DeepseekV41Config, DeepseekV41TextConfig
from .configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from .configuration.configuration_kimi_k3 import KimiK3Config, KimiK3TextConfig
from .configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from .configuration.target_settings import build_target_layer_ids
from .modeling.decoding.block_decoding import block_decode
from .modeling.decoding.confidence_schedule import ConfidenceThreshold
from .modeling.decoding.cost_table import CostTable, measure_cost_table
from .modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM, DeepseekV41Model
from .modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel
from .modeling.draft.modeling_draft import DraftPreTrainedModel
from .modeling.kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM, KimiK3Model
from .modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel
from .modeling.target.mask_tokens import propose_mask_token_ids
from .modeling.target.pairing import compare_target
from .modeling.target.target_features import capture_features
from .modeling.target.target_identity import target_record

__version__ = "0.1.0"

# Training pulls in datasets and matplotlib: imported when asked for.
_TRAINER = {
    "DSparkTrainer": "dspark_trainer",
    "DraftTrainer": "draft_trainer",
    "DraftTrainingArguments": "training_args",
}

__all__ = [
    "ConfidenceThreshold",
    "CostTable",
    "DSparkTrainer",
    "DeepseekV41Config",
    "DeepseekV41DSparkConfig",
    "DeepseekV41DSparkModel",
    "DeepseekV41ForCausalLM",
    "DeepseekV41Model",
    "DeepseekV41TextConfig",
    "DraftTrainer",
    "DraftTrainingArguments",
    "KimiK3Config",
    "KimiK3DFlashConfig",
    "KimiK3DFlashDraftModel",
    "KimiK3ForCausalLM",
    "KimiK3Model",
    "KimiK3TextConfig",
    "block_decode",
    "build_deepseek_v41_dspark_draft_config",
    "build_kimi_k3_dflash_draft_config",
    "build_kimi_k3_dflash_target_kwargs",
    "build_target_layer_ids",
    "capture_features",
    "measure_cost_table",
    "propose_mask_token_ids",
    "target_record",
]

for config in (
    DeepseekV41Config,
    DeepseekV41TextConfig,
    DeepseekV41DSparkConfig,
    KimiK3Config,
    KimiK3TextConfig,
    KimiK3DFlashConfig,
):
    AutoConfig.register(config.model_type, config, exist_ok=True)
for config, model in (
    (DeepseekV41DSparkConfig, DeepseekV41DSparkModel),
    (DeepseekV41TextConfig, DeepseekV41Model),
    (KimiK3DFlashConfig, KimiK3DFlashDraftModel),
    (KimiK3TextConfig, KimiK3Model),
):
    AutoModel.register(config, model, exist_ok=True)
AutoModelForCausalLM.register(DeepseekV41TextConfig, DeepseekV41ForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(KimiK3TextConfig, KimiK3ForCausalLM, exist_ok=True)
# A multimodal checkpoint opens as its text model: the Auto classes go over to the text configuration.
MODEL_MAPPING.register(DeepseekV41Config, DeepseekV41Model, exist_ok=True)
MODEL_MAPPING.register(KimiK3Config, KimiK3Model, exist_ok=True)
MODEL_FOR_CAUSAL_LM_MAPPING.register(DeepseekV41Config, DeepseekV41ForCausalLM, exist_ok=True)
MODEL_FOR_CAUSAL_LM_MAPPING.register(KimiK3Config, KimiK3ForCausalLM, exist_ok=True)


def _publish(draft: DraftPreTrainedModel, repo_id: str, **kwargs):
    return import_module(".hub_cards.upload", __name__).publish_model(draft, repo_id, **kwargs)


# What drafts have where this package is installed, and do not ship.
DraftPreTrainedModel.compare_target, DraftPreTrainedModel.publisher = compare_target, _publish


def __getattr__(name: str):
    if name in _TRAINER:
        return getattr(import_module(f".trainer.{_TRAINER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
