"""DSpark draft of DeepSeek V4.1 (arXiv 2607.05147): a block of tokens in one pass of a few stages with window
attention, routed experts and single-pass hyper-connections; a Markov head, token by token; a confidence head."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DFlashCache

from ...configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from ..draft.block_plan import BlockPlan
from ..draft.dense_blocks import additive_mask, block_attention_mask, block_position_ids
from ..draft.dspark_heads import DSparkOutput
from ..draft.modeling_draft import draft_arguments
from ..draft.modeling_dspark import DSparkDraftModel, DSparkTokenForward
from .deepseek_v41_dspark_layers import DeepseekV41DSparkBlock
from .deepseek_v41_layers import check_grouped_widths, init_deepseek_v41_weights, rope_frequencies, rope_rotations


class DeepseekV41DSparkBackbone(DSparkDraftModel):
    """The drafter on prepared inputs: embedded blocks and the target's features of their context."""

    config_class = DeepseekV41DSparkConfig
    config: DeepseekV41DSparkConfig
    _no_split_modules = ["DeepseekV41DSparkBlock", *DSparkDraftModel._no_split_modules]
    _keep_in_fp32_modules_strict = [
        "attn_hc",
        "ffn_hc",
        "sinks_param",
        "e_score_correction_bias",
        "bias_vl",
        *DSparkDraftModel._keep_in_fp32_modules_strict,
    ]
    window_per_query = False

    def __init__(self, config: DeepseekV41DSparkConfig):
        super().__init__(config)
        self.mtp = nn.ModuleList(DeepseekV41DSparkBlock(config, i) for i in range(config.num_hidden_layers))
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the experts' decorator in this file

    def _grouped_mm_can_dispatch(self) -> bool:
        check_grouped_widths(self.config)
        return super()._grouped_mm_can_dispatch()

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

    def _init_weights(self, module: nn.Module):
        std = self.config.initializer_range
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=std)
        elif not init_deepseek_v41_weights(module, std):
            super()._init_weights(module)

    def build_position_ids(self, anchor_positions: torch.LongTensor, context_sequence: int) -> torch.LongTensor:
        """`[B, N]` anchors -> `[B, context_sequence + N * block_size]`, see [`block_position_ids`]."""
        return block_position_ids(anchor_positions, context_sequence, self.config.block_size)

    def build_attention_mask(
        self,
        anchor_positions: torch.LongTensor,
        block_keep_mask: torch.Tensor,
        context_sequence: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
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
        config = self.config
        rule = {"sliding_window": config.sliding_window, "window_per_query": False}
        visible = block_attention_mask(anchor_positions, block_keep_mask, context_sequence, config.block_size, **rule)
        return additive_mask(visible, dtype)

    @draft_arguments
    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        previous_token_ids: torch.LongTensor | None = None,
        anchor_positions: torch.LongTensor | None = None,
        block_keep_mask: torch.Tensor | None = None,
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
        self._check_rows(noise_embeds, context_hidden_states, position_ids)
        inputs = (noise_embeds, context_hidden_states, attention_mask, cache)
        plan = self.read_blocks(*inputs, block_plan, anchor_positions, block_keep_mask, document_ids)
        if plan is None:
            self._check_blocks(noise_embeds, context_hidden_states, attention_mask, position_ids, cache)
        context, length = context_hidden_states, noise_embeds.shape[1]
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
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.LongTensor | None,
    ) -> None:
        """Widths and lengths of the inputs."""
        config, width = self.config, self.mtp[0].main_proj.in_features
        if noise_embeds.shape[-1] != config.hidden_size:
            raise ValueError(
                f"`noise_embeds` is {noise_embeds.shape[-1]} wide, `hidden_size` is {config.hidden_size}: embed the "
                "blocks with the embedding of the draft's target."
            )
        if context_hidden_states.shape[-1] != width:
            raise ValueError(
                f"`context_hidden_states` is {context_hidden_states.shape[-1]} wide; `target_layer_ids` "
                f"{config.target_layer_ids} of the target's hidden size make {width}."
            )
        rows = context_hidden_states.shape[1] + noise_embeds.shape[1]
        if position_ids is not None and position_ids.shape[-1] != rows:
            raise ValueError(
                f"`position_ids` covers {position_ids.shape[-1]} rows; new context and block make {rows}."
            )

    def _check_blocks(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.LongTensor | None,
        cache: Cache | None,
    ) -> None:
        """Whether it is known, without anchors, which block sees what."""
        length, size = noise_embeds.shape[1], self.config.block_size
        if attention_mask is None:
            if length > size:
                raise ValueError(
                    f"`noise_embeds` holds {length} tokens, more than one block of {size}: pass `anchor_positions` "
                    "(or a 4D `attention_mask`), or each block would see the others and what follows its anchor."
                )
            # Not by class: a draft loaded with its own code has its own, and transformers knows one of them.
            if cache is not None and [layer._layer_type for layer in cache.layers] != self.config.layer_types:
                raise ValueError("`cache` is not this draft's: make it with `DFlashCache(config=draft.config)`.")
            return
        if cache is not None:
            raise ValueError("`cache` is for one block after its context: leave out the mask, or the cache.")
        expected = (length, context_hidden_states.shape[1] + length)
        if attention_mask.dim() != 4 or attention_mask.shape[-2:] != expected:
            raise ValueError(
                f"`attention_mask` has the shape {tuple(attention_mask.shape)}; block and context make [B, 1, "
                f"{expected[0]}, {expected[1]}]. Padding has no mask: leave it out of the context."
            )
        if position_ids is None:
            raise ValueError("`position_ids` is missing: with a mask only they say where the blocks stand.")


class DeepseekV41DSparkModel(DSparkTokenForward, DeepseekV41DSparkBackbone):
    """The draft: the backbone, and the reference's forward on token ids for use without a trainer."""
