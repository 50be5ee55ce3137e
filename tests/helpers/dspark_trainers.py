"""DSpark trainers on tiny targets."""

import torch
from decoding_models import MASK, build_target
from draft_trainers import BLOCK, arguments, make_rows
from goldens import load_golden

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel
from blockdraft.trainer.dspark_trainer import DSparkTrainer


def v41_target() -> DeepseekV41ForCausalLM:
    """All kinds of attention layers, no Engram."""
    torch.manual_seed(0)
    return DeepseekV41ForCausalLM(DeepseekV41TextConfig(**load_golden("v41_target").meta["config"])).eval()


def dspark_draft(target, **settings) -> DeepseekV41DSparkModel:
    defaults = {
        "mask_token_id": MASK,
        "num_draft_layers": 2,
        "block_size": BLOCK,
        "target_layer_ids": [1, 3],
        "sliding_window": 6,
        "initializer_range": 0.2,
        "hc_sinkhorn_iters": 3,
    }
    config = DeepseekV41DSparkConfig.from_target_config(target.config, **(defaults | settings))
    return DeepseekV41DSparkModel(config)


def dspark_trainer(output_dir, rows=None, target=None, draft=None, draft_settings=None, **settings) -> DSparkTrainer:
    target = target or build_target("qwen3")
    torch.manual_seed(1)
    draft = draft or dspark_draft(target, **(draft_settings or {}))
    rows = rows or make_rows()
    return DSparkTrainer(draft, target, arguments(output_dir, **settings), train_dataset=rows, eval_dataset=rows)
