"""DSpark draft of DeepSeek V4.1 (arXiv 2607.05147): a block of tokens in one pass of a few stages with window
attention, routed experts and single-pass hyper-connections; a Markov head, token by token; a confidence head."""

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DFlashCache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from ...configuration.configuration_deepseek_v41_dspark import DSPARK_CONTEXT, DeepseekV41DSparkConfig
from ..draft.block_visibility import BlockPlan, block_visibility
from ..draft.dspark_heads import DSparkHeads, DSparkOutput
from ..draft.modeling_draft import draft_arguments
from ..draft.modeling_dspark import DSparkDraftModel, DSparkTokenForward
from ..draft.visible_attention import VisibleKeys, attend_visible
from ..ops.shapes import check_shape, check_visible
from .deepseek_v41_layers import (
    DeepseekV41HyperConnection,
    DeepseekV41ModelMixin,
    DeepseekV41MoE,
    DeepseekV41RMSNorm,
    DeepseekV41WindowAttention,
    rope_frequencies,
    rope_rotations,
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
        self, key_states: Tensor, value_states: Tensor, sliding_window: int, skipped: int = 0
    ) -> tuple[Tensor, Tensor]:
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
        hidden_states: Tensor,
        context_hidden_states: Tensor,
        rotations: Tensor,
        attention_mask: Tensor | VisibleKeys | None = None,
        cache: Cache | None = None,
        skipped: int = 0,
    ) -> Tensor:
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
            inputs = (queries.transpose(1, 2), keys.unsqueeze(1), None)
            attended = attend_visible(*inputs, attention_mask, self.scaling, self.sinks_param())
        else:
            keys = keys[:, -(window + length) :] if attention_mask is None else keys
            attended = self.attend(queries, keys, attention_mask)
        return self.project_output(attended, block_rotations)


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

    @property
    def mlp(self) -> DeepseekV41MoE:
        """The reference's other name of `ffn`."""
        return self.ffn

    def forward(
        self,
        streams: Tensor,
        pre_mix: Tensor,
        context_hidden_states: Tensor,
        rotations: Tensor,
        attention_mask: Tensor | VisibleKeys | None = None,
        cache: Cache | None = None,
        skipped: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """
        Args:
            streams: `[B, Q, s, H]`, the block's residual streams.
            pre_mix: `[B, Q, s]` fp32, how the attention sums them up.
            context_hidden_states: the target's features `[B, A, F * H]` in the first stage, `[B, A, H]` after.
            rotations: `[B, A + Q, R / 2]` complex64, of context and block.
            attention_mask, cache, skipped: as in [`DeepseekV41DSparkAttention`].

        Returns:
            The streams; `[B, Q, s]` fp32, how the next sublayer, or the end, sums them up; the projected features. Of
            the last stage also the collapsed streams `[B, Q, H]` before and after the final norm.
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
            return streams, mix.pre, context_hidden_states, None, None
        residual = collapse_streams(streams, mix.pre)
        return streams, mix.pre, context_hidden_states, residual, self.norm(residual)


class DeepseekV41DSparkBackbone(DeepseekV41ModelMixin, DSparkDraftModel):
    """The drafter on prepared inputs: embedded blocks and the target's features of their context."""

    config_class = DeepseekV41DSparkConfig
    config: DeepseekV41DSparkConfig
    _no_split_modules = ["DeepseekV41DSparkBlock", *DSparkDraftModel._no_split_modules]
    _keep_in_fp32_modules_strict = [
        *DeepseekV41ModelMixin._keep_in_fp32_modules_strict,
        *DSparkDraftModel._keep_in_fp32_modules_strict,
    ]
    window_per_query = False

    def __init__(self, config: DeepseekV41DSparkConfig):
        super().__init__(config)
        self.mtp = nn.ModuleList(DeepseekV41DSparkBlock(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    @property
    def moe_config(self) -> DeepseekV41DSparkConfig:
        """The reference's name of the experts' settings, which here are fields of `config`."""
        return self.config

    @property
    def heads_per_key(self) -> int:
        return self.config.num_attention_heads

    @property
    def layers(self) -> nn.ModuleList:
        """The stages."""
        return self.mtp

    @property
    def heads(self) -> DeepseekV41DSparkBlock:
        """The last stage holds the heads."""
        return self.mtp[-1]

    def initialize_weights(self, buffer_device: torch.device | None = None) -> None:
        """
        Initialises every parameter that is neither initialised nor loaded yet: matrices normal with
        `config.initializer_range`, norms 1, sinks and correction biases 0.

        Args:
            buffer_device: where to allocate a model that was made on the meta device.
        """
        if buffer_device is not None and self.device.type == "meta":
            self.to_empty(device=buffer_device)
        super().initialize_weights()

    def build_position_ids(self, anchor_positions: torch.LongTensor, context_sequence: int) -> torch.LongTensor:
        """`[B, N]` anchors -> `[B, context_sequence + N * block_size]` int64: slot j of the block at anchor a
        stands at a + j. Raises a `ValueError` for anchors of another rank."""
        check_shape("anchor_positions", anchor_positions, "B", "N")
        context = torch.arange(context_sequence, device=anchor_positions.device).expand(len(anchor_positions), -1)
        blocks = anchor_positions[..., None] + torch.arange(self.config.block_size, device=anchor_positions.device)
        return torch.cat([context, blocks.flatten(1)], dim=1)

    def build_attention_mask(
        self, anchor_positions: torch.LongTensor, block_keep_mask: Tensor, context_sequence: int, dtype: torch.dtype
    ) -> Tensor:
        """
        The additive mask of many blocks, for the forward's `attention_mask`: all slots of a block see the
        `sliding_window` context rows before their anchor, and their block. `block_plan` or `anchor_positions` say the
        same without a mask.

        Args:
            anchor_positions (`[B, N]` int64): anchors, 0 for padded blocks.
            block_keep_mask (`[B, N]` bool): False for padded blocks, which see only themselves.
            context_sequence (`int`): S, the context rows.
            dtype (`torch.dtype`): a floating dtype.

        Returns:
            `[B, 1, N * block_size, S + N * block_size]` in `dtype`: 0 where a query (rows) sees a key (columns), -inf
            elsewhere.
        """
        blocks = (anchor_positions, block_keep_mask, context_sequence, self.config.block_size)
        rule = {"sliding_window": self.config.sliding_window, "window_per_query": False}
        visible = block_visibility(*blocks, **rule).dense_mask()
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))

    @draft_arguments
    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        previous_token_ids: torch.LongTensor | None = None,
        anchor_positions: torch.LongTensor | None = None,
        block_keep_mask: Tensor | None = None,
        document_ids: torch.LongTensor | None = None,
        enable_confidence_head: bool = True,
        confidence_head_stop_gradient: bool = False,
        use_cache: bool | None = None,
        block_plan: BlockPlan | None = None,
    ) -> DSparkOutput:
        """
        One block after its whole context, as in decoding, or any number of blocks, as in training. Many blocks are
        given by a `block_plan` or their `anchor_positions`, which is fastest, or by a mask with positions.

        Args:
            noise_embeds (`[B, Q, H]`): Embedded block tokens, see [`~DraftPreTrainedModel.embed_block`]: the anchor,
                then noise tokens.
            context_hidden_states (`[B, A, F * H]`): Target features of the A context tokens that `cache` does not hold
                yet, F = `len(target_layer_ids)`.
            attention_mask (`[B, 1, Q, A + Q]` bool or additive, *optional*): What many blocks see, e.g.
                [`~DeepseekV41DSparkBackbone.build_attention_mask`].
            position_ids (`[B or 1, A + Q]` int64, *optional*): Of the new context rows and of the block's, whose first
                slot stands at its anchor. Default: one block continues the context; many blocks stand at
                `anchor_positions`.
            cache ([`~transformers.cache_utils.DFlashCache`], *optional*): For one block. Gets A + Q key rows for each
                stage. Drop the block's with `cache.crop(-Q)` before the next round; then it keeps the last
                `sliding_window` rows of the context.
            previous_token_ids (`[B, Q]` int64, *optional*): Tokens before the slots (the anchor, then labels shifted
                by one): the heads run on all slots at once.
            anchor_positions (`[B, N]` int64), block_keep_mask (`[B, N]` bool), document_ids (`[B, A]`, *optional*):
                Many blocks of `block_size`: where they stand, which of them are no padding (default: all), and the
                documents of packed rows. They see what
                [`~blockdraft.modeling.draft.block_visibility.block_visibility`] says.
            enable_confidence_head (`bool`), confidence_head_stop_gradient (`bool`): Whether `previous_token_ids` make
                confidences too, and whether their gradient ends at the head.
            use_cache (`bool`, *optional*): Makes a cache if none is given.
            block_plan ([`BlockPlan`], *optional*): The blocks, planned by [`~DraftPreTrainedModel.plan_blocks`] before
                the forward.

        Raises:
            ValueError: if a shape is wrong, if settings contradict each other, or if more than one block comes without
                what says which block sees what.
        """
        if use_cache and cache is None:
            cache = DFlashCache(config=self.config)
        inputs = (noise_embeds, context_hidden_states, attention_mask, cache)
        plan = self.read_blocks(*inputs, block_plan, anchor_positions, block_keep_mask, document_ids)
        context, length = context_hidden_states, noise_embeds.shape[1]
        self._check_rows(noise_embeds, context.shape[1] + length, attention_mask, position_ids, cache)
        visible, skipped = attention_mask, 0
        if plan is not None:
            visible = self.layer_masks(plan)[self.config.sliding_window]
            if position_ids is None:
                position_ids = self.build_position_ids(plan.anchor_positions, context.shape[1])
        elif attention_mask is None:
            if position_ids is None:
                start = cache.get_seq_length() if cache is not None else 0
                end = start + context.shape[1] + length
                position_ids = torch.arange(start, end, device=noise_embeds.device)[None]
            # Rows that have left the window already are seen by no block, now or later.
            skipped = max(context.shape[1] - self.config.sliding_window, 0)
            context, position_ids = context[:, skipped:], position_ids[:, skipped:]

        # The target may be held in another dtype than the draft.
        dtype = self.mtp[0].main_norm.weight.dtype
        frequencies = rope_frequencies(
            self.config.qk_rope_head_dim, self.config.rope_theta, device=position_ids.device
        )
        rotations = rope_rotations(position_ids, frequencies)
        streams = noise_embeds.to(dtype).unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)
        pre_mix = torch.zeros(streams.shape[:3], device=streams.device)
        pre_mix[..., 0] = 1
        if self.training and self.mtp[0].gradient_checkpointing:
            pre_mix.requires_grad_()  # reentrant checkpointing gives no gradients where no input needs one
        context = context.to(dtype)
        for stage in self.mtp:
            streams, pre_mix, context, residual, hidden_states = stage(
                streams, pre_mix, context, rotations, visible, cache=cache, skipped=skipped
            )

        confidence_states = residual if self.config.confidence_input == "pre_norm" else hidden_states
        output = DSparkOutput(last_hidden_state=hidden_states, confidence_states=confidence_states, cache=cache)
        return self.read_heads(output, previous_token_ids, enable_confidence_head, confidence_head_stop_gradient)

    def _check_rows(
        self,
        noise_embeds: Tensor,
        rows: int,
        attention_mask: Tensor | None,
        position_ids: torch.LongTensor | None,
        cache: Cache | None,
    ) -> None:
        """Whether mask, positions and cache fit the blocks' rows, with the new context `rows` in all."""
        batch, length, _ = noise_embeds.shape
        if position_ids is not None:
            alike = 1 if position_ids.shape[0] == 1 else batch
            check_shape("position_ids", position_ids, alike, rows, reason="one for each row of new context and block")
        if attention_mask is None:
            # Not by class: a draft loaded with its own code has its own, and transformers knows one of them.
            if cache is not None and [layer._layer_type for layer in cache.layers] != self.config.layer_types:
                raise ValueError("`cache` is not this draft's: make it with `DFlashCache(config=draft.config)`.")
            return
        if cache is not None:
            raise ValueError("`cache` is for one block after its context: leave out the mask, or the cache.")
        reason = "padding has no mask, leave it out of the context; positions go to `position_ids=`, by keyword"
        check_visible(attention_mask, batch, length, rows, reason)
        if position_ids is None:
            raise ValueError("`position_ids` is missing: with a mask only they say where the blocks stand.")


class DeepseekV41DSparkModel(DSparkTokenForward, DeepseekV41DSparkBackbone):
    """The draft: the backbone, and the reference's forward on token ids for use without a trainer."""
