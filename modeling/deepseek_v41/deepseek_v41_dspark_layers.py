"""Parts of the DeepSeek V4.1 DSpark draft: its stages, which attend over `[context | block]`, their cache layer, the
Markov head and the confidence head, and what the draft returns."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from ...configuration.configuration_deepseek_v41_dspark import DSPARK_CONTEXT, DeepseekV41DSparkConfig
from ..draft.visible_attention import VisibleKeys, attend_visible
from .deepseek_v41_layers import (
    DeepseekV41HyperConnection,
    DeepseekV41MoE,
    DeepseekV41RMSNorm,
    DeepseekV41WindowAttention,
    Fp32Linear,
    collapse,
    expand,
)


class DSparkContextLayer(DynamicLayer):
    """
    Cache layer of a stage: the keys, which are the values too, of the context rows that the next block can see. During
    a round it holds the block's rows as well; `crop(-block)` drops them and what the window has left behind.
    """

    _layer_type = DSPARK_CONTEXT

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.cumulative_length = 0
        self.sliding_window: int | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, sliding_window: int, skipped: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Args:
            key_states: `[B, 1, rows, D]`, new context rows, then the block's.
            value_states: `[B, 1, rows, 0]`.
            sliding_window: context rows that a block sees.
            skipped: context rows before the new ones that no block will ever see, so that they have no keys.
        """
        self.sliding_window = sliding_window
        self.cumulative_length += skipped + key_states.shape[-2]
        return super().update(key_states, value_states)

    def get_seq_length(self) -> int:
        """Context rows so far, those included that are not kept, and the block's until it is cropped."""
        return self.cumulative_length

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.is_initialized:
            self.cumulative_length += tokens_to_remove
            self.keys = self.keys[..., -self.sliding_window :, :]
            self.values = self.values[..., -self.sliding_window :, :]


class DeepseekV41DSparkAttention(DeepseekV41WindowAttention):
    """The target's window attention with a block's rows as queries and `[context | block]` as keys."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        context_hidden_states: torch.Tensor,
        rotations: torch.Tensor,
        attention_mask: torch.Tensor | VisibleKeys | None = None,
        cache: Cache | None = None,
        skipped: int = 0,
    ) -> torch.Tensor:
        """`[B, Q, H]` block rows, `[B, A, H]` context rows, `[B, A + Q, R / 2]` rotations; returns `[B, Q, H]`."""
        length = hidden_states.shape[1]
        block_rotations = rotations[:, -length:]
        queries = self.queries(hidden_states, block_rotations)[1]
        keys = self.keys(torch.cat([context_hidden_states, hidden_states], dim=1), rotations)
        window = self.config.sliding_window
        if cache is not None:
            rows = keys.unsqueeze(1)
            keys = cache.update(rows, rows[..., :0], self.layer_idx, sliding_window=window, skipped=skipped)[0][:, 0]
        if isinstance(attention_mask, VisibleKeys):
            sinks = self.sinks_param()
            attended = attend_visible(
                queries.transpose(1, 2), keys.unsqueeze(1), None, attention_mask, self.scaling, sinks
            )
        elif attention_mask is not None:
            attended = self.attend(queries, keys, attention_mask)
        else:
            attended = self.attend(queries, keys[:, -(window + length) :], None)
        return self.project_output(attended, block_rotations)


class DeepseekV41DSparkMarkovHead(nn.Module):
    """Bias of a slot's logits by the token before it, of low rank."""

    def __init__(self, config: DeepseekV41DSparkConfig):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.markov_rank)
        self.head = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def forward(self, token_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[...]` tokens before the slots -> transition logits `[..., V]` and embeddings `[..., r]`."""
        embeddings = self.embed(token_ids)
        return self.head(embeddings), embeddings


class DeepseekV41DSparkConfidenceHead(nn.Module):
    """How likely a slot's token is to be accepted if those before it are: a logit, in fp32."""

    def __init__(self, config: DeepseekV41DSparkConfig):
        super().__init__()
        self.proj = Fp32Linear(config.hidden_size + config.markov_rank, 1)

    def forward(self, hidden_states: torch.Tensor, markov_embeddings: torch.Tensor) -> torch.Tensor:
        """`[..., H]` and `[..., r]` -> `[...]` fp32, not calibrated."""
        return self.proj(torch.cat([hidden_states.float(), markov_embeddings.float()], dim=-1)).squeeze(-1)


class DSparkStageOutput(NamedTuple):
    """What a stage hands on.

    Attributes:
        streams (`[B, Q, s, H]`): residual streams.
        pre_mix (`[B, Q, s]` fp32): how the next sublayer, or the end, sums them up.
        context_hidden_states (`[B, A, H]`): projected target features, the same for all stages.
        residual, hidden_states (`[B, Q, H]`, *optional*): of the last stage, the collapsed streams before and after
            the final norm.
    """

    streams: torch.Tensor
    pre_mix: torch.Tensor
    context_hidden_states: torch.Tensor
    residual: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None


class DeepseekV41DSparkBlock(GradientCheckpointingLayer):
    """One stage. The first one projects the target's features, the last one owns the final norm and the heads."""

    def __init__(self, config: DeepseekV41DSparkConfig, stage_idx: int):
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attn = DeepseekV41DSparkAttention(config, stage_idx)
        self.ffn = DeepseekV41MoE(config)
        self.attn_norm = DeepseekV41RMSNorm(size, eps)
        self.ffn_norm = DeepseekV41RMSNorm(size, eps)
        self.attn_hc = DeepseekV41HyperConnection(config)
        self.ffn_hc = DeepseekV41HyperConnection(config)
        is_first, is_last = stage_idx == 0, stage_idx == config.num_hidden_layers - 1
        self.main_proj = nn.Linear(config.features_width, size, bias=False) if is_first else None
        self.main_norm = DeepseekV41RMSNorm(size, eps) if is_first else None
        self.norm = DeepseekV41RMSNorm(size, eps) if is_last else None
        has_markov_head = is_last and config.markov_rank is not None
        self.markov_head = DeepseekV41DSparkMarkovHead(config) if has_markov_head else None
        self.confidence_head = DeepseekV41DSparkConfidenceHead(config) if is_last and config.confidence_head else None

    def forward(
        self,
        streams: torch.Tensor,
        pre_mix: torch.Tensor,
        context_hidden_states: torch.Tensor,
        rotations: torch.Tensor,
        attention_mask: torch.Tensor | VisibleKeys | None = None,
        cache: Cache | None = None,
        skipped: int = 0,
    ) -> DSparkStageOutput:
        """`context_hidden_states` are the target's features `[B, A, F * H]` in the first stage, `[B, A, H]` after."""
        if self.main_proj is not None:
            context_hidden_states = self.main_norm(self.main_proj(context_hidden_states))
        mix = self.attn_hc(streams)
        hidden_states = self.attn_norm(collapse(streams, pre_mix))
        hidden_states = self.attn(hidden_states, context_hidden_states, rotations, attention_mask, cache, skipped)
        streams = expand(hidden_states, streams, mix)
        pre_mix, mix = mix.pre, self.ffn_hc(streams)
        streams = expand(self.ffn(self.ffn_norm(collapse(streams, pre_mix))), streams, mix)
        if self.norm is None:
            return DSparkStageOutput(streams, mix.pre, context_hidden_states)
        residual = collapse(streams, mix.pre)
        return DSparkStageOutput(streams, mix.pre, context_hidden_states, residual, self.norm(residual))


@dataclass
class DSparkOutput(ModelOutput):
    """
    Args:
        last_hidden_state (`[B, Q, H]`):
            After the final norm; [`~DeepseekV41DSparkBackbone.compute_logits`] turns it into base logits.
        confidence_states (`[B, Q, H]`):
            What the confidence head reads: the same, or the state before the norm (`config.confidence_input`).
        transition_logits (`[B, Q, V]`, *optional*):
            The Markov head's bias, where `previous_token_ids` were given.
        confidence_pred (`[B, Q]` fp32, *optional*):
            Confidence logits, where `previous_token_ids` were given.
        cache ([`~transformers.cache_utils.DFlashCache`], *optional*).
    """

    last_hidden_state: torch.Tensor | None = None
    confidence_states: torch.Tensor | None = None
    transition_logits: torch.Tensor | None = None
    confidence_pred: torch.Tensor | None = None
    cache: Cache | None = None

    @property
    def normalized_hidden_states(self) -> torch.Tensor:
        """The reference's name of `last_hidden_state`."""
        return self.last_hidden_state


@dataclass
class DSparkForwardOutput(ModelOutput):
    """
    Args:
        draft_logits (`[B, N, block_size, V]` fp32):
            Base logits plus transitions.
        aligned_target_logits (`[B, N, block_size, V]` fp32, *optional*):
            The target's, for the same tokens; no gradient.
        target_ids (`[B, N, block_size]` int64), eval_mask (`[B, N, block_size]` bool):
            Labels, and which of them count: all up to the first one without supervision.
        block_keep_mask (`[B, N]` bool):
            False for padded blocks.
        confidence_pred (`[B, N, block_size]` fp32, *optional*):
            Confidence logits.
    """

    draft_logits: torch.Tensor | None = None
    aligned_target_logits: torch.Tensor | None = None
    target_ids: torch.Tensor | None = None
    eval_mask: torch.Tensor | None = None
    block_keep_mask: torch.Tensor | None = None
    confidence_pred: torch.Tensor | None = None
