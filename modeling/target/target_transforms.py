"""Whether a draft repeats what its target does to embeddings and logits, measured on the loaded target.

A configuration says it in settings that differ from architecture to architecture (see [`target_settings`]); a target
whose architecture is not known there shows here what it does.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

from ...configuration.configuration_draft import DraftConfig
from .target_features import decoder_layers, uncompiled

TRIAL_TOKENS = 8
HIDDEN = 1e30  # a logit of this size belongs to a token that the target never says
HEAD_NOT_CALLED = "The target makes its logits without calling `get_output_embeddings()`, as a draft's are made."


def transform_faults(target: PreTrainedModel, config: DraftConfig) -> list[str]:
    """Runs the target on a few tokens and compares what it does with the draft's settings.

    Args:
        target: the loaded target, without a wrapper around it.
        config: the draft's.

    Returns:
        One line for each setting that differs, with the value to set where there is one. Positions and norms that the
        target adds to its embeddings are no fault: the draft has its own.
    """
    seen = run_target(target, config.vocab_size)
    if "head_output" not in seen:
        return [HEAD_NOT_CALLED]
    return logit_faults(seen, config) + embedding_faults(seen, config)


def check_head(target: PreTrainedModel, draft: PreTrainedModel, device: torch.device) -> None:
    """Tries the target's head on one state. Raises a `ValueError` if no gradient passes through it, as with some
    quantisers' inference kernels: the draft would learn nothing from its tokens, and no loss would show it."""
    head = target.get_output_embeddings()
    state = torch.zeros(1, draft.config.hidden_size, device=device, requires_grad=True)
    with torch.enable_grad():  # whatever the caller has switched off
        total = draft.compute_logits(state, head).sum()
    # A kernel without a derivative may still return logits that claim to have one.
    if not total.requires_grad or torch.autograd.grad(total, state, allow_unused=True)[0] is None:
        raise ValueError(
            f"The target's head ({type(head).__name__}) passes no gradient to the states it reads, so no draft can be "
            "trained through it. Leave the head out when quantising the target, or quantise in another way."
        )


@torch.no_grad()
def run_target(target: PreTrainedModel, vocab_size: int) -> dict[str, torch.Tensor]:
    """Runs the target on tokens from all over the vocabulary: its `embeds`, the first layer's `first_input`, `logits`
    and, if it calls its head, `head_input` and `head_output`."""
    seen, embedding, head = {}, target.get_input_embeddings(), target.get_output_embeddings()

    def keep_embeds(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        seen["embeds"] = output

    def keep_first_layers_input(module: nn.Module, args: tuple, kwargs: dict) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        seen["first_input"] = states.mean(dim=2) if states.dim() == 4 else states  # of hyper-connection streams

    def keep_head(module: nn.Module, args: tuple, output: torch.Tensor) -> None:
        seen["head_input"], seen["head_output"] = args[0], output.clone()  # the target may change it in place

    hooks = [
        embedding.register_forward_hook(keep_embeds),
        decoder_layers(target)[0].register_forward_pre_hook(keep_first_layers_input, with_kwargs=True),
        head.register_forward_hook(keep_head),
    ]
    try:
        input_ids = torch.linspace(0, vocab_size - 1, TRIAL_TOKENS).long()[None].to(embedding.weight.device)
        with uncompiled(target):
            seen["logits"] = target(input_ids=input_ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def logit_faults(seen: dict[str, torch.Tensor], config: DraftConfig) -> list[str]:
    """Faults of the settings that make the target's logits out of its head's output, by what [`run_target`] saw."""
    if (width := seen["head_input"].shape[-1]) != config.hidden_size:
        return [f"`hidden_size` is {config.hidden_size}, but the target's head is {width} wide."]
    raw, logits = seen["head_output"].float(), seen["logits"].float().to(seen["head_output"].device)
    if raw.shape != logits.shape:
        return [f"The target cuts its {raw.shape[-1]} logits to {logits.shape[-1]}; a draft proposes from all."]
    if not torch.isfinite(raw).all():
        return ["The target's head returns NaN or infinite logits."]
    shown = logits.abs() < HIDDEN
    raw, logits = raw[shown], logits[shown]
    expected = raw * config.output_multiplier
    if (cap := config.final_logit_softcapping) is not None:
        expected = cap * torch.tanh(expected / cap)
    difference, dtype = (logits - expected).abs().max().item(), seen["logits"].dtype
    if difference <= _tolerance(logits, dtype):
        return []
    factor = _factor(raw, logits, dtype)
    fix = "" if factor is None else f"; set `output_multiplier` to {factor:.6g} and no `final_logit_softcapping`"
    return [
        f"The draft's logits are up to {difference:.3g} from the target's: it has `output_multiplier` "
        f"{config.output_multiplier:.6g} and `final_logit_softcapping` {cap}{fix}."
    ]


def embedding_faults(seen: dict[str, torch.Tensor], config: DraftConfig) -> list[str]:
    """Faults of the setting that makes the draft's embeddings what the target's first layer gets, by what it saw."""
    embeds, first = seen["embeds"].float(), seen["first_input"]
    if (width := embeds.shape[-1]) != config.hidden_size:
        return [f"`hidden_size` is {config.hidden_size}, but the target's embedding is {width} wide."]
    if first.shape != embeds.shape:
        return []
    factor = _factor(embeds, first.float().to(embeds.device), first.dtype)
    if factor is None or abs(factor - config.input_embedding_scale) <= 1e-2 * factor:
        return []
    return [f"`input_embedding_scale` is {config.input_embedding_scale:.6g}; the target multiplies by {factor:.6g}."]


def _tolerance(values: torch.Tensor, dtype: torch.dtype) -> float:
    """How far values that were rounded to `dtype` may be off."""
    return 16 * torch.finfo(dtype).eps * values.abs().max().item()


def _factor(before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> float | None:
    """The one number that turns `before` into `after`, which was rounded to `dtype`, or `None`."""
    factor = ((before * after).sum() / before.square().sum()).item()
    return factor if (before * factor - after).abs().max().item() <= _tolerance(after, dtype) else None
