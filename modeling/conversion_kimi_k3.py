"""How released Kimi K3 weights map to the modules here: names, expert stacking, padded `A_log`, MXFP4."""

import torch
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
)


def register_kimi_k3_conversion() -> None:
    """Registers the mapping that `from_pretrained` applies and `save_pretrained` reverts."""
    register_checkpoint_conversion_mapping(
        "kimi_k3_text",
        [
            # Only the parts of a sparse layer: a dense layer's `mlp` keeps its name when the mapping is reverted.
            WeightRenaming(
                source_patterns=r"\.block_sparse_moe\.(gate\.|experts\.|shared_experts\.|routed_expert_)",
                target_patterns=r"\.mlp\.(gate\.|experts\.|shared_experts\.|routed_expert_)",
            ),
            WeightConverter(
                source_patterns=[r"\.experts.*.w1.weight", r"\.experts.*.w3.weight"],
                target_patterns=r"\.experts.gate_up_proj",
                operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
            ),
            WeightConverter(
                source_patterns=r"\.experts.*.w2.weight",
                target_patterns=r"\.experts.down_proj",
                operations=[MergeModulelist(dim=0)],
            ),
        ],
        overwrite=True,
    )
