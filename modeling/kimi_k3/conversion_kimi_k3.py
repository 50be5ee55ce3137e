"""How released Kimi K3 weights map to the modules here: names, expert stacking, MXFP4, padded `A_log`."""

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter, WeightRenaming

from ..ops.expert_conversion import StackExperts, expert_converters
from ..ops.number_formats import dequantize_fp4

# Files hold `A_log` zero-padded to a multiple of this.
A_LOG_MULTIPLE = 128


class StackKimiK3Experts(StackExperts):
    """Plain experts, or FP8 ones, which a quantizer of transformers decodes before."""

    forms = ((".weight_packed", ".weight_scale"), (".weight", ".weight_scale_inv"))


class StackMxfp4Experts(StackKimiK3Experts):
    """Experts as `compressed-tensors` packs them: bytes of two codes, and biased exponents."""

    codes_suffix, scale_suffix = StackKimiK3Experts.forms[0]

    def decode(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        # Bytes, exact in the dtype that the loader has cast them to.
        return dequantize_fp4(codes.byte(), scale.byte().view(torch.float8_e8m0fnu), dtype)


class UnpadHeads(ConversionOps):
    """`A_log` of the file to `[heads]`."""

    @torch.no_grad
    def convert(self, input_dict, target_patterns, config, **kwargs):
        ((padded,),) = input_dict.values()
        return {target_patterns[0]: padded[: config.get_text_config().linear_num_heads].clone()}

    @property
    def reverse_op(self) -> ConversionOps:
        return PadHeads()


class PadHeads(ConversionOps):
    """Reverts [`UnpadHeads`], with zeros."""

    @torch.no_grad
    def convert(self, input_dict, target_patterns, **kwargs):
        ((heads,),) = input_dict.values()
        return {target_patterns[0]: nn.functional.pad(heads, (0, -len(heads) % A_LOG_MULTIPLE))}


class DropTextPrefix(PrefixChange):
    """Takes `language_model.` off. What is saved is a text model, so the prefix stays off."""

    __slots__ = ()

    def __init__(self):
        super().__init__(prefix_to_remove="language_model")

    def reverse_transform(self) -> PrefixChange:
        return self


def register_kimi_k3_conversion() -> None:
    """Registers the mapping that `from_pretrained` applies and `save_pretrained` reverts."""
    register_checkpoint_conversion_mapping(
        "kimi_k3_text",
        [
            DropTextPrefix(),
            # Only the parts of a sparse layer: a dense layer's `mlp` keeps its name when the mapping is reverted.
            WeightRenaming(
                source_patterns=r"\.block_sparse_moe\.(gate\.|experts\.|shared_experts\.|routed_expert_)",
                target_patterns=r"\.mlp\.(gate\.|experts\.|shared_experts\.|routed_expert_)",
            ),
            *expert_converters(StackKimiK3Experts, StackMxfp4Experts),
            WeightConverter(r"self_attn\.A_log", target_patterns=r"self_attn\.A_log", operations=[UnpadHeads()]),
        ],
        overwrite=True,
    )
