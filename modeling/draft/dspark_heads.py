"""The heads of DSpark (arXiv 2607.05147), for a draft with any layers, and what such a draft returns."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from ...configuration.configuration_dspark import DSparkConfig
from ..ops.fp32 import Fp32Linear


class DSparkMarkovHead(nn.Module):
    """Bias of a slot's logits by the token before it, of low rank r (`config.markov_rank`)."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.markov_rank)
        self.head = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def forward(self, token_ids: torch.LongTensor) -> tuple[Tensor, Tensor]:
        """`[...]` tokens before the slots -> transition logits `[..., V]` and embeddings `[..., r]`."""
        embeddings = self.embed(token_ids)
        return self.head(embeddings), embeddings


class DSparkConfidenceHead(nn.Module):
    """How likely a slot's token is to be accepted if those before it are: a logit, in fp32."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.proj = Fp32Linear(config.hidden_size + config.markov_rank, 1)

    def forward(self, hidden_states: Tensor, markov_embeddings: Tensor) -> Tensor:
        """`[..., H]` states and `[..., r]` embeddings of the tokens before -> `[...]` fp32 logits, not calibrated."""
        return self.proj(torch.cat([hidden_states.float(), markov_embeddings.float()], dim=-1)).squeeze(-1)


class DSparkHeads(nn.Module):
    """The heads that `config` asks for; `None` in the place of one that it does not."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_head = DSparkMarkovHead(config) if config.markov_rank is not None else None
        self.confidence_head = DSparkConfidenceHead(config) if config.confidence_head else None


@dataclass
class DSparkOutput(ModelOutput):
    """
    Args:
        last_hidden_state (`[B, Q, H]`): After the final norm; [`~DSparkDraftModel.compute_logits`] turns it into base
            logits.
        confidence_states (`[B, Q, H]`): What the confidence head reads: the same, or the state before the norm
            (`config.confidence_input`).
        transition_logits (`[B, Q, V]`, *optional*): The Markov head's bias, where `previous_token_ids` were given.
        confidence_pred (`[B, Q]` fp32, *optional*): Confidence logits, where `previous_token_ids` were given.
        cache ([`~transformers.cache_utils.DFlashCache`], *optional*).
    """

    last_hidden_state: Tensor | None = None
    confidence_states: Tensor | None = None
    transition_logits: Tensor | None = None
    confidence_pred: Tensor | None = None
    cache: Cache | None = None

    @property
    def normalized_hidden_states(self) -> Tensor:
        """The reference's name of `last_hidden_state`."""
        return self.last_hidden_state


@dataclass
class DSparkForwardOutput(ModelOutput):
    """
    Args:
        draft_logits (`[B, N, block_size, V]` fp32): Base logits plus transitions.
        aligned_target_logits (`[B, N, block_size, V]` fp32, *optional*): The target's, for the same tokens; no
            gradient.
        target_ids (`[B, N, block_size]` int64), eval_mask (`[B, N, block_size]` bool): Labels, and which of them
            count: all up to the first one without supervision.
        block_keep_mask (`[B, N]` bool): False for padded blocks.
        confidence_pred (`[B, N, block_size]` fp32, *optional*): Confidence logits.
    """

    draft_logits: Tensor | None = None
    aligned_target_logits: Tensor | None = None
    target_ids: Tensor | None = None
    eval_mask: Tensor | None = None
    block_keep_mask: Tensor | None = None
    confidence_pred: Tensor | None = None
