"""Drafts that know a part of the answer and how sure they may be, for the tests of schedules and calibration."""

import torch
from decoding_models import MASK, PartlyRightDraft, draft_config
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput


class NoTransition(nn.Module):
    """A Markov head without a say."""

    def forward(self, token_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(()), token_ids[..., None].float()


class ConfidentDraft(PartlyRightDraft):
    """A partly right draft, anchor first, with confidence logit `sure` where it is right and `-sure` at a fault."""

    sure = 4.0

    def __init__(self, config):
        super().__init__(config)
        self.heads = nn.ModuleDict({"markov": NoTransition(), "confidence": nn.Identity()})

    @property
    def markov_head(self) -> nn.Module:
        return self.heads["markov"]

    @property
    def confidence_head(self) -> nn.Module:
        return self.heads["confidence"]

    def confidence_logits(self, states: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        assert states.shape[0] == embeddings.shape[0]
        return self.confidence_head(states.squeeze(-1))

    def logits_of(self, positions: torch.LongTensor) -> torch.Tensor:
        """Confidence logits of the tokens proposed for `positions`."""
        return torch.where(positions % self.fault_every == 0, -self.sure, self.sure)

    def forward(self, noise_embeds, position_ids, **kwargs):
        output = super().forward(noise_embeds, position_ids=position_ids, **kwargs)
        positions = position_ids[0, -noise_embeds.shape[1] :] + 1
        return ModelOutput(
            last_hidden_state=output.last_hidden_state, confidence_states=self.logits_of(positions)[None, :, None]
        )


class GamblingDraft(ConfidentDraft):
    """Right by chance: the token for a place is right with a probability of the place's own, and the confidence logit
    is `temperature` times the logit of that probability."""

    temperature = 6.0

    def answer_with(self, target: PreTrainedModel, answer: torch.LongTensor):
        super().answer_with(target, answer)
        generator = torch.Generator().manual_seed(2)
        places = answer.shape[1] + self.config.block_size + 1
        self.logits = 1.2 * torch.randn(places, generator=generator) + 1
        self.generator = generator
        return self

    def forward(self, noise_embeds, position_ids, **kwargs):
        right = torch.rand(self.logits.shape, generator=self.generator) < self.logits.sigmoid()
        whole, places = self.answer, torch.arange(len(self.answer))
        self.answer, self.fault_every = torch.where(right[: len(whole)], whole, (whole + 1) % MASK), len(places) + 99
        output = super().forward(noise_embeds, position_ids=position_ids, **kwargs)
        self.answer = whole
        return output

    def logits_of(self, positions: torch.LongTensor) -> torch.Tensor:
        return self.temperature * self.logits[positions.clamp(max=len(self.logits) - 1)]


def confident_draft(target: PreTrainedModel, answer: torch.LongTensor, fault_every: int = 5, **settings):
    config = draft_config(target, **settings)
    config.slot_layout, config.confidence_temperatures = "N", None
    return ConfidentDraft(config).eval().answer_with(target, answer, fault_every)


def gambling_draft(target: PreTrainedModel, answer: torch.LongTensor, **settings) -> GamblingDraft:
    config = draft_config(target, **settings)
    config.slot_layout, config.confidence_temperatures = "N", None
    return GamblingDraft(config).eval().answer_with(target, answer)
