"""Parts of the DeepSeek V4.1 DSpark draft: its stages, which attend over `[context | block]`, and their cache
layer."""

from typing import NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from ...configuration.configuration_deepseek_v41_dspark import DSPARK_CONTEXT, DeepseekV41DSparkConfig
from ..draft.dspark_heads import DSparkHeads
from ..draft.visible_attention import VisibleKeys, attend_visible
from .deepseek_v41_layers import (
    DeepseekV41HyperConnection,
    DeepseekV41MoE,
    DeepseekV41RMSNorm,
    DeepseekV41WindowAttention,
)
from .hyper_connections import collapse_streams, expand_streams


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
        """
        Args:
            hidden_states: `[B, Q, H]`, normed block rows.
            context_hidden_states: `[B, A, H]`, rows of the new context.
            rotations: `[B, A + Q, R / 2]` complex64, of context and block.
            attention_mask: one of [`~DraftPreTrainedModel.layer_masks`]; `None`: one block behind its whole context,
                whose slots all see the last `sliding_window` rows.
            cache: gets the A + Q key rows, and gives those before them; skipped: see [`DSparkContextLayer`].

        Returns:
            `[B, Q, H]`.
        """
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
        heads = DSparkHeads(config) if is_last else None
        self.markov_head = heads.markov_head if is_last else None
        self.confidence_head = heads.confidence_head if is_last else None

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
        """
        Args:
            streams: `[B, Q, s, H]`, the block's residual streams.
            pre_mix: `[B, Q, s]` fp32, how the attention sums them up.
            context_hidden_states: the target's features `[B, A, F * H]` in the first stage, `[B, A, H]` after.
            rotations: `[B, A + Q, R / 2]` complex64, of context and block.
            attention_mask, cache, skipped: as in [`DeepseekV41DSparkAttention`].
        """
        if self.main_proj is not None:
            context_hidden_states = self.main_norm(self.main_proj(context_hidden_states))
        mix = self.attn_hc(streams)
        hidden_states = self.attn_norm(collapse_streams(streams, pre_mix))
        hidden_states = self.attn(hidden_states, context_hidden_states, rotations, attention_mask, cache, skipped)
        streams = expand_streams(hidden_states, streams, mix.post, mix.comb)
        pre_mix, mix = mix.pre, self.ffn_hc(streams)
        hidden_states = self.ffn(self.ffn_norm(collapse_streams(streams, pre_mix)))
        streams = expand_streams(hidden_states, streams, mix.post, mix.comb)
        if self.norm is None:
            return DSparkStageOutput(streams, mix.pre, context_hidden_states)
        residual = collapse_streams(streams, mix.pre)
        return DSparkStageOutput(streams, mix.pre, context_hidden_states, residual, self.norm(residual))
