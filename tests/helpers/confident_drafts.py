"""Drafts that know a part of the answer and how sure they may be, for the tests of schedules and calibration."""

from collections.abc import Callable

import torch
from decoding_models import MASK, build_dspark_draft
from torch import nn
from transformers import PreTrainedModel

SURE = 4.0


def confident_draft(
    target: PreTrainedModel, answer: torch.LongTensor, fault_every: int = 5, **settings
) -> PreTrainedModel:
    """Proposes a known answer with a fault at each position that `fault_every` divides, and knows where: the logit of
    its confidence is `SURE` where it is right and `-SURE` at a fault."""

    def propose(positions: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        right = positions % fault_every != 0
        return right, torch.where(right, SURE, -SURE)

    return _draft_that(propose, target, answer, settings)


def gambling_draft(
    target: PreTrainedModel, answer: torch.LongTensor, temperature: float = 6.0, **settings
) -> PreTrainedModel:
    """Is right with a probability of each position's own; the confidence logit is `temperature` times its logit."""
    generator = torch.Generator().manual_seed(2)
    logits = 1.2 * torch.randn(answer.shape[1] + 16, generator=generator) + 1

    def propose(positions: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        chances = logits[positions].sigmoid()
        return torch.rand(len(positions), generator=generator) < chances, temperature * logits[positions]

    return _draft_that(propose, target, answer, settings)


def _draft_that(propose: Callable, target: PreTrainedModel, answer: torch.LongTensor, settings: dict):
    """A DSpark draft that says what `propose` tells of the positions of its tokens: right or wrong, and how sure."""
    draft = build_dspark_draft(target, **settings)
    head = nn.functional.normalize(target.get_output_embeddings().weight.detach(), dim=-1)

    def replace(module, args, kwargs, output):
        positions = kwargs["position_ids"][0, -kwargs["noise_embeds"].shape[1] :] + 1
        right, logits = propose(positions)
        tokens = answer[0, positions.clamp(max=answer.shape[1] - 1)]
        output.last_hidden_state = 1e3 * head[torch.where(right, tokens, (tokens + 1) % MASK)][None]
        output.confidence_states = logits[None, :, None]
        return output

    draft.register_forward_hook(replace, with_kwargs=True)
    draft.confidence_logits = lambda states, embeddings: states.squeeze(-1)
    return draft
