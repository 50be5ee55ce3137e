"""Files with one tensor for each expert: loading them into stacked parameters, and saving those."""

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter

PROJECTIONS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


class StackExperts(ConversionOps):
    """
    Tensors of single experts to one parameter `[experts, out, in]`, or `[experts, in, out]` where `transposed`;
    several projections join along `out`. A subclass says how a family names its weights, and decodes FP4 ones.
    """

    transposed = False
    # Endings of the names of a weight's parts, in each form beside the plain one that files of the family have.
    forms: tuple[tuple[str, ...], ...]
    # Those of the parts that this operation takes in: a weight's, or FP4 codes', and the scales'.
    codes_suffix = ".weight"
    scale_suffix: str | None = None

    def __init__(self, *projections: str):
        self.projections = projections

    def decode(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """One expert's FP4 weight `[out, in]`. The loader has cast both parts to the parameter's dtype."""
        raise NotImplementedError

    @property
    def source_patterns(self) -> list[str]:
        """What a [`WeightConverter`] with this operation takes in."""
        suffixes = filter(None, (self.codes_suffix, self.scale_suffix))
        return [self.pattern(projection, suffix) for suffix in suffixes for projection in self.projections]

    @torch.no_grad
    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name, model, **kwargs):
        parameter = model.get_parameter(full_layer_name)
        loaded = next(iter(input_dict.values()))[0]
        stacked = torch.empty(parameter.shape, dtype=parameter.dtype, device=loaded.device)
        for part, projection in zip(self.parts(stacked), self.projections, strict=True):
            codes, scales = (
                input_dict.pop(self.pattern(projection, suffix), [])
                for suffix in (self.codes_suffix, self.scale_suffix)
            )
            weights = map(self.decode, codes, scales, [parameter.dtype] * len(codes)) if scales else codes
            for expert, weight in enumerate(weights):
                part[expert].copy_(weight)
        return {target_patterns[0]: stacked}

    def parts(self, stacked: Tensor) -> list[Tensor]:
        """Views `[experts, out, in]` of a parameter, one for each projection."""
        parts = stacked.chunk(len(self.projections), dim=2 if self.transposed else 1)
        return [part.transpose(1, 2) for part in parts] if self.transposed else list(parts)

    @property
    def reverse_op(self) -> ConversionOps:
        return UnstackExperts(self)

    def pattern(self, projection: str, suffix: str | None = ".weight") -> str:
        return rf"\.experts.*.{projection}{suffix}"


class UnstackExperts(ConversionOps):
    """Reverts [`StackExperts`]: one plain tensor for each expert and projection."""

    def __init__(self, stack: StackExperts):
        self.stack = stack

    @torch.no_grad
    def convert(self, input_dict, **kwargs):
        ((stacked,),) = input_dict.values()
        return {
            f".experts.{expert}.{projection}.weight": weight.clone(memory_format=torch.contiguous_format)
            for projection, part in zip(self.stack.projections, self.stack.parts(stacked), strict=True)
            for expert, weight in enumerate(part)
        }


class ExpertConverter(WeightConverter):
    """A `WeightConverter` for [`StackExperts`] that names the tensors that are missing from the checkpoint."""

    __slots__ = ()

    def convert(self, layer_name, model=None, config=None, hf_quantizer=None, loading_info=None):
        if loading_info is not None:
            (sources,) = self.layer_targets.values()
            self._check_complete(sources, len(model.get_parameter(layer_name)))
        return super().convert(layer_name, model, config, hf_quantizer, loading_info)

    def reverse_transform(self) -> WeightConverter:
        """To plain weights, whatever they were."""
        stack = self.operations[-1]
        plain = [stack.pattern(projection) for projection in stack.projections]
        return self.copy(self._original_target_patterns, plain, operations=[stack.reverse_op])

    def _check_complete(self, sources: set[str], num_experts: int) -> None:
        stack, prefix = self.operations[-1], next(iter(sources)).rpartition(".experts.")[0]
        found = {f".{name.rpartition('.')[2]}" for name in sources} - {".weight"}
        form = next((form for form in stack.forms if found.intersection(form)), (".weight",))
        expected = [
            f"{prefix}.experts.{expert}.{projection}{suffix}"
            for expert in range(num_experts)
            for projection in stack.projections
            for suffix in form
        ]
        if missing := [name for name in expected if name not in sources]:
            raise ValueError(
                f"The checkpoint lacks {len(missing)} of the {len(expected)} expert tensors that belong together "
                f"here, first `{missing[0]}`. Its files are incomplete."
            )
        if surplus := sorted(sources - set(expected)):
            raise ValueError(
                f"The checkpoint has {len(surplus)} expert tensors too many, first `{surplus[0]}`: the config says "
                f"{num_experts} experts, and each weight has one form, plain, FP8 or FP4."
            )


def expert_converters(*stacks: type[StackExperts]) -> list[ExpertConverter]:
    """For the two stacked parameters of a layer's experts, by each of the operations."""
    operations = [(name, stack(*names)) for stack in stacks for name, names in PROJECTIONS.items()]
    return [
        ExpertConverter(operation.source_patterns, target_patterns=rf"\.experts.{name}", operations=[operation])
        for name, operation in operations
    ]
