"""How released Kimi K3 weights map to the modules here: names, expert stacking, MXFP4, padded `A_log`."""

import torch
from torch import nn
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, WeightConverter, WeightRenaming

# OCP Microscaling Formats 1.0: values of the E2M1 codes, and how many of them share a power-of-two scale.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MXFP4_GROUP = 32
# Files hold `A_log` zero-padded to a multiple of this.
A_LOG_MULTIPLE = 128


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """
    Decodes MXFP4 weights (OCP Microscaling Formats 1.0).

    Args:
        packed: `[..., out, in / 2]` uint8, two codes a byte, the even column's in the low nibble.
        scale: `[..., out, in / 32]` uint8, exponents with bias 127.

    Returns:
        `[..., out, in]` in `dtype`, computed in fp32; exact in bf16 within its range.

    Raises:
        ValueError: if the shapes do not belong together.
    """
    if (*packed.shape[:-1], packed.shape[-1] * 2) != (*scale.shape[:-1], scale.shape[-1] * MXFP4_GROUP):
        raise ValueError(
            f"`packed` {tuple(packed.shape)} and `scale` {tuple(scale.shape)} are no MXFP4 pair: a scale covers "
            f"{MXFP4_GROUP} columns, that is {MXFP4_GROUP // 2} bytes."
        )
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).int()
    values = torch.tensor(E2M1_VALUES, device=packed.device)[codes].unflatten(-1, (-1, MXFP4_GROUP))
    return torch.ldexp(values, scale.int().unsqueeze(-1) - 127).flatten(-2).to(dtype)


class StackExperts(ConversionOps):
    """Tensors of single experts, plain or MXFP4, to one `[experts, out, in]`; several projections join along `out`."""

    def __init__(self, *projections: str):
        self.projections = projections

    @torch.no_grad
    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name, model, **kwargs):
        parameter = model.get_parameter(full_layer_name)
        loaded = next(iter(input_dict.values()))[0]
        stacked = torch.empty(parameter.shape, dtype=parameter.dtype, device=loaded.device)
        for part, projection in zip(stacked.chunk(len(self.projections), dim=1), self.projections, strict=True):
            plain, packed, scale = (input_dict.pop(name, []) for name in _source_patterns(projection))
            # The loader has cast the bytes to the model's dtype, in which they are exact.
            experts = plain or (
                dequantize_mxfp4(codes.byte(), exponents.byte(), parameter.dtype)
                for codes, exponents in zip(packed, scale, strict=True)
            )
            for expert, weight in enumerate(experts):
                part[expert].copy_(weight)
        return {target_patterns[0]: stacked}

    @property
    def reverse_op(self) -> ConversionOps:
        return UnstackExperts(*self.projections)


class UnstackExperts(ConversionOps):
    """The way back, to plain tensors."""

    def __init__(self, *projections: str):
        self.projections = projections

    @torch.no_grad
    def convert(self, input_dict, **kwargs):
        ((stacked,),) = input_dict.values()
        return {
            _name(expert, projection): weight.clone()
            for projection, part in zip(self.projections, stacked.chunk(len(self.projections), dim=1), strict=True)
            for expert, weight in enumerate(part)
        }


class ExpertConverter(WeightConverter):
    """A `WeightConverter` for [`StackExperts`] that names the tensors that are missing from the checkpoint."""

    __slots__ = ()

    def convert(self, layer_name, model=None, config=None, hf_quantizer=None, loading_info=None):
        if loading_info is not None:
            (sources,) = self.layer_targets.values()
            self._check_complete(sources, config.get_text_config().num_experts)
        return super().convert(layer_name, model, config, hf_quantizer, loading_info)

    def _check_complete(self, sources: set[str], num_experts: int) -> None:
        prefix = next(iter(sources)).rpartition(".experts.")[0]
        is_packed = any(not name.endswith(".weight") for name in sources)
        expected = [
            prefix + _name(expert, projection) + suffix
            for expert in range(num_experts)
            for projection in self.operations[0].projections
            for suffix in (("_packed", "_scale") if is_packed else ("",))
        ]
        if missing := [name for name in expected if name not in sources]:
            raise ValueError(
                f"The checkpoint lacks {len(missing)} of the {len(expected)} expert tensors that belong together "
                f"here, first `{missing[0]}`. Its files are incomplete."
            )
        if surplus := sorted(sources - set(expected)):
            raise ValueError(
                f"The checkpoint has {len(surplus)} expert tensors too many, first `{surplus[0]}`: `num_experts` is "
                f"{num_experts} and each weight has one form, plain or MXFP4."
            )


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
    """The way back, zero-padded."""

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
    experts = {r"\.experts.gate_up_proj": ("w1", "w3"), r"\.experts.down_proj": ("w2",)}
    register_checkpoint_conversion_mapping(
        "kimi_k3_text",
        [
            DropTextPrefix(),
            # Only the parts of a sparse layer: a dense layer's `mlp` keeps its name when the mapping is reverted.
            WeightRenaming(
                source_patterns=r"\.block_sparse_moe\.(gate\.|experts\.|shared_experts\.|routed_expert_)",
                target_patterns=r"\.mlp\.(gate\.|experts\.|shared_experts\.|routed_expert_)",
            ),
            *(
                ExpertConverter(
                    source_patterns=[pattern for name in projections for pattern in _source_patterns(name)],
                    target_patterns=target,
                    operations=[StackExperts(*projections)],
                )
                for target, projections in experts.items()
            ),
            WeightConverter(
                source_patterns=r"self_attn\.A_log", target_patterns=r"self_attn\.A_log", operations=[UnpadHeads()]
            ),
        ],
        overwrite=True,
    )


def _name(expert: int | str, projection: str) -> str:
    return f".experts.{expert}.{projection}.weight"


def _source_patterns(projection: str) -> list[str]:
    """Plain, packed codes, scales."""
    return [rf"\.experts.*.{projection}.weight{suffix}" for suffix in ("", "_packed", "_scale")]
