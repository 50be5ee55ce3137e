"""Block-parallel draft models for speculative decoding, as plain Transformers models.

Importing this package makes the Auto classes of transformers know its models and imports nothing else: each public
name is loaded when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .after_import import watch_imports

if TYPE_CHECKING:  # for editors and type checkers
    from .configuration.build_deepseek_v41_dspark import (
        build_deepseek_v41_dspark_draft_config as build_deepseek_v41_dspark_draft_config,
    )
    from .configuration.build_kimi_k3_dflash import (
        build_kimi_k3_dflash_draft_config as build_kimi_k3_dflash_draft_config,
    )
    from .configuration.build_kimi_k3_dflash import (
        build_kimi_k3_dflash_target_kwargs as build_kimi_k3_dflash_target_kwargs,
    )
    from .configuration.configuration_deepseek_v41 import DeepseekV41Config as DeepseekV41Config
    from .configuration.configuration_deepseek_v41 import DeepseekV41TextConfig as DeepseekV41TextConfig
    from .configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig as DeepseekV41DSparkConfig
    from .configuration.configuration_kimi_k3 import KimiK3Config as KimiK3Config
    from .configuration.configuration_kimi_k3 import KimiK3TextConfig as KimiK3TextConfig
    from .configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig as KimiK3DFlashConfig
    from .configuration.target_settings import build_target_layer_ids as build_target_layer_ids
    from .modeling.decoding.block_decoding import block_decode as block_decode
    from .modeling.decoding.confidence_schedule import ConfidenceThreshold as ConfidenceThreshold
    from .modeling.decoding.cost_table import CostTable as CostTable
    from .modeling.decoding.cost_table import measure_cost_table as measure_cost_table
    from .modeling.deepseek_v41.deepseek_v41_release import load_deepseek as load_deepseek
    from .modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM as DeepseekV41ForCausalLM
    from .modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41Model as DeepseekV41Model
    from .modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel as DeepseekV41DSparkModel
    from .modeling.kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM as KimiK3ForCausalLM
    from .modeling.kimi_k3.modeling_kimi_k3 import KimiK3Model as KimiK3Model
    from .modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel as KimiK3DFlashDraftModel
    from .modeling.target.mask_tokens import propose_mask_token_ids as propose_mask_token_ids
    from .modeling.target.target_features import capture_features as capture_features
    from .modeling.target.target_identity import target_record as target_record
    from .trainer.draft_trainer import DraftTrainer as DraftTrainer
    from .trainer.dspark_trainer import DSparkTrainer as DSparkTrainer
    from .trainer.training_args import DraftTrainingArguments as DraftTrainingArguments

__version__ = "0.1.0"

_MODULES = {
    "ConfidenceThreshold": "modeling.decoding.confidence_schedule",
    "CostTable": "modeling.decoding.cost_table",
    "DSparkTrainer": "trainer.dspark_trainer",
    "DeepseekV41Config": "configuration.configuration_deepseek_v41",
    "DeepseekV41DSparkConfig": "configuration.configuration_deepseek_v41_dspark",
    "DeepseekV41DSparkModel": "modeling.deepseek_v41.modeling_deepseek_v41_dspark",
    "DeepseekV41ForCausalLM": "modeling.deepseek_v41.modeling_deepseek_v41",
    "DeepseekV41Model": "modeling.deepseek_v41.modeling_deepseek_v41",
    "DeepseekV41TextConfig": "configuration.configuration_deepseek_v41",
    "DraftTrainer": "trainer.draft_trainer",
    "DraftTrainingArguments": "trainer.training_args",
    "KimiK3Config": "configuration.configuration_kimi_k3",
    "KimiK3DFlashConfig": "configuration.configuration_kimi_k3_dflash",
    "KimiK3DFlashDraftModel": "modeling.kimi_k3.modeling_kimi_k3_dflash",
    "KimiK3ForCausalLM": "modeling.kimi_k3.modeling_kimi_k3",
    "KimiK3Model": "modeling.kimi_k3.modeling_kimi_k3",
    "KimiK3TextConfig": "configuration.configuration_kimi_k3",
    "block_decode": "modeling.decoding.block_decoding",
    "build_deepseek_v41_dspark_draft_config": "configuration.build_deepseek_v41_dspark",
    "build_kimi_k3_dflash_draft_config": "configuration.build_kimi_k3_dflash",
    "build_kimi_k3_dflash_target_kwargs": "configuration.build_kimi_k3_dflash",
    "build_target_layer_ids": "configuration.target_settings",
    "capture_features": "modeling.target.target_features",
    "load_deepseek": "modeling.deepseek_v41.deepseek_v41_release",
    "measure_cost_table": "modeling.decoding.cost_table",
    "propose_mask_token_ids": "modeling.target.mask_tokens",
    "target_record": "modeling.target.target_identity",
}
__all__ = list(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value  # the next time it is found without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


watch_imports()
