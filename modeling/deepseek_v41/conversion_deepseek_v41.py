"""How released DeepSeek V4.1 weights map to the modules here: names, expert stacking, FP8 and FP4."""

import re

import torch
from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from ..ops.expert_conversion import StackExperts, expert_converters
from ..ops.number_formats import dequantize_fp4, dequantize_fp8_block, dequantize_fp8_rows

# Released names, and the modules' for the same tensors. What is in neither table keeps its name.
TOP_NAMES = {"embed.weight": "embed_tokens.weight", "head.weight": "lm_head.weight"}
LAYER_NAMES = {
    "attn.attn_sink": "attn.sinks_param.weight",
    "ffn.gate.bias": "ffn.gate.e_score_correction_bias",
    **{f"hc_{part}_{name}": f"{part}_hc.{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")},
    **{
        f"ffn.shared_experts.{released}.{kind}": f"ffn.shared_experts.{native}_proj.{kind}"
        for released, native in {"w1": "gate", "w3": "up", "w2": "down"}.items()
        for kind in ("weight", "scale")
    },
}
RELEASED_TOP_NAMES = {native: released for released, native in TOP_NAMES.items()}
RELEASED_LAYER_NAMES = {native: released for released, native in LAYER_NAMES.items()}
LAYER = re.compile(r"((?:layers|mtp)\.\d+\.)(.+)")

# Modules with a scale for each 32x32 block, under the names they have here; `wkv` is Engram's and the attention's.
FP8_BLOCK_MODULES = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "gate_proj", "up_proj", "down_proj")
FP8_ROWS_MODULE = r"engram\.embed"


def native_name(name: str, top_names: dict[str, str] = TOP_NAMES, layer_names: dict[str, str] = LAYER_NAMES) -> str:
    """A released tensor's name here, without `model.`; single experts keep theirs."""
    if match := LAYER.fullmatch(name):
        return match[1] + layer_names.get(match[2], match[2])
    return top_names.get(name, name)


def released_name(name: str) -> str:
    """The inverse of [`native_name`]."""
    return native_name(name, RELEASED_TOP_NAMES, RELEASED_LAYER_NAMES)


class RenameReleased(WeightRenaming):
    """Released names to the target's. Files in which two names mean one tensor are refused."""

    __slots__ = ("seen",)

    def __init__(self):
        super().__init__(source_patterns="(.+)", target_patterns="(.+)")
        self.seen: dict[str, str] = {}

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        name = native_name(source_key.removeprefix("model."))
        if name.startswith(("embed_tokens.", "layers.", "norm.")):
            name = f"model.{name}"
        if (other := self.seen.setdefault(name, source_key)) != source_key:
            raise ValueError(
                f"The checkpoint has `{other}` and `{source_key}`, which are one tensor. Its files belong to two "
                "checkpoints; start from a clean directory."
            )
        self._was_used = True
        return name, self.source_patterns[0]

    def reverse_transform(self) -> WeightRenaming:
        return RenameToReleased()


class RenameToReleased(RenameReleased):
    """Reverts [`RenameReleased`]."""

    __slots__ = ()

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return released_name(source_key.removeprefix("model.")), self.source_patterns[0]


class DequantizeFp8(ConversionOps):
    """An FP8 weight and its scale, or a plain weight, to the plain weight. It is saved plain."""

    def __init__(self, module: str):
        self.module = module

    @property
    def source_patterns(self) -> list[str]:
        return [rf"\.{self.module}\.{kind}" for kind in ("weight", "scale")]

    @torch.no_grad
    def convert(self, input_dict, target_patterns, full_layer_name, model, **kwargs):
        weight, scale = (input_dict.pop(pattern, [None])[0] for pattern in self.source_patterns)
        if scale is not None:
            dequantize = dequantize_fp8_rows if self.module == FP8_ROWS_MODULE else dequantize_fp8_block
            weight = dequantize(weight, exact_scale(scale), model.get_parameter(full_layer_name).dtype)
        return {target_patterns[0]: weight}

    @property
    def reverse_op(self) -> ConversionOps:
        return KeepPlain()


class KeepPlain(ConversionOps):
    """Saves a weight as it is."""

    def convert(self, input_dict, target_patterns, **kwargs):
        ((weight,),) = input_dict.values()
        return {target_patterns[0]: weight}


class Fp8Converter(WeightConverter):
    """A `WeightConverter` for [`DequantizeFp8`] that refuses a weight or a scale without the other."""

    __slots__ = ()

    def convert(self, layer_name, model=None, config=None, hf_quantizer=None, loading_info=None):
        if loading_info is None:
            return super().convert(layer_name, model, config, hf_quantizer)
        (sources,) = self.layer_targets.values()
        if all(name.endswith(".scale") for name in sources):
            raise ValueError(f"The checkpoint has `{min(sources)}` but not the weight that it scales.")
        converted = super().convert(layer_name, model, config, hf_quantizer, loading_info)
        if len(sources) == 1 and any(looks_like_fp8_codes(weight) for weight in converted.values()):
            (name,) = sources
            scale = name.removesuffix("weight") + "scale"
            raise ValueError(f"`{name}` holds FP8 numbers, but the checkpoint lacks `{scale}`.")
        return converted


class StackDeepseekV41Experts(StackExperts):
    """Experts `[experts, in, out]`; FP4 ones are int8, two numbers each, beside an e8m0 scale."""

    transposed = True
    forms = ((".weight", ".scale"),)
    scale_suffix = ".scale"

    def decode(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize_fp4(codes.to(torch.int8), exact_scale(scale), dtype)


def exact_scale(scale: Tensor) -> Tensor:
    """`scale` as the loader has cast it; a `ValueError` if the dtype is too narrow for its powers of two."""
    if scale.dtype == torch.float16:
        raise ValueError(
            "Quantised DeepSeek V4.1 weights cannot be loaded with `dtype=torch.float16`, whose range is too small "
            "for their scales. Load with bfloat16 or float32 and convert then."
        )
    return scale


def looks_like_fp8_codes(weight: Tensor) -> bool:
    """Whether a weight that the loader has cast from an unknown dtype was E4M3 numbers: each has one of 254 values,
    and the largest of a block lies above 200. Weights of a model lie far below."""
    return bool(weight.abs().amax() > 200) and torch.equal(weight.to(torch.float8_e4m3fn).to(weight.dtype), weight)


def register_deepseek_v41_conversion() -> None:
    """Registers the mapping that `from_pretrained` applies and `save_pretrained` reverts."""
    fp8 = [DequantizeFp8(module) for module in (*FP8_BLOCK_MODULES, FP8_ROWS_MODULE)]
    fp8_converters = [
        Fp8Converter(decode.source_patterns, target_patterns=decode.source_patterns[0], operations=[decode])
        for decode in fp8
    ]
    mapping = [RenameReleased(), *expert_converters(StackDeepseekV41Experts), *fp8_converters]
    register_checkpoint_conversion_mapping("deepseek_v41_text", mapping, overwrite=True)
