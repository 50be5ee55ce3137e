"""DSpark draft of DeepSeek V4.1 (arXiv 2607.05147): a block of tokens in one pass of a few stages with window
attention, routed experts and single-pass hyper-connections; a Markov head, token by token; a confidence head."""

import copy

import torch
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DFlashCache
from transformers.utils.generic import maybe_autocast

from ...configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from ..draft.anchors import legal_dspark_anchors, sample_anchors
from ..draft.block_plan import BlockPlan
from ..draft.block_targets import build_block_inputs, build_dspark_targets
from ..draft.block_visibility import additive_mask, block_attention_mask, block_position_ids
from ..draft.modeling_draft import DraftPreTrainedModel, accept_seed_names, head_dtype
from .deepseek_v41_dspark_layers import (
    DeepseekV41DSparkBlock,
    DeepseekV41DSparkConfidenceHead,
    DeepseekV41DSparkMarkovHead,
    DSparkForwardOutput,
    DSparkOutput,
)
from .deepseek_v41_layers import check_grouped_widths, init_deepseek_v41_weights, rope_frequencies, rope_rotations


class DeepseekV41DSparkBackbone(DraftPreTrainedModel):
    """The drafter on prepared inputs: embedded blocks and the target's features of their context."""

    config_class = DeepseekV41DSparkConfig
    config: DeepseekV41DSparkConfig
    # The heads are called by themselves as well: once a slot in decoding, by chunks in training.
    _no_split_modules = [
        "DeepseekV41DSparkBlock",
        "DeepseekV41DSparkMarkovHead",
        "DeepseekV41DSparkConfidenceHead",
    ]
    _keep_in_fp32_modules_strict = [
        "attn_hc",
        "ffn_hc",
        "sinks_param",
        "e_score_correction_bias",
        "bias_vl",
        "confidence_head",
    ]
    _supports_flex_attn = False
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
    def markov_head(self) -> DeepseekV41DSparkMarkovHead | None:
        return self.mtp[-1].markov_head

    @property
    def confidence_head(self) -> DeepseekV41DSparkConfidenceHead | None:
        return self.mtp[-1].confidence_head

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
        The additive mask of many blocks: all slots see the `sliding_window` rows before their anchor and their block.

        Returns:
            `[B, 1, N * block_size, context_sequence + N * block_size]` in `dtype`.
        """
        config = self.config
        rule = {"sliding_window": config.sliding_window, "window_per_query": False}
        visible = block_attention_mask(anchor_positions, block_keep_mask, context_sequence, config.block_size, **rule)
        return additive_mask(visible, dtype)

    def compute_logits(self, hidden_states: torch.Tensor, lm_head: nn.Module) -> torch.Tensor:
        """As [`~DraftPreTrainedModel.compute_logits`], in fp32 whatever the dtype of states and head; a head that is
        more than a matrix (quantised, sharded, offloaded, with an adapter) computes as it does for its target."""

        def head_in_fp32(states: torch.Tensor) -> torch.Tensor:
            is_matrix = type(lm_head) is nn.Linear and type(lm_head.weight) is nn.Parameter
            if is_matrix and lm_head.weight.dtype in (torch.bfloat16, torch.float16) and not lm_head.weight.is_meta:
                bias = None if lm_head.bias is None else lm_head.bias.float()
                return nn.functional.linear(states.float(), lm_head.weight.float(), bias)
            return lm_head(states.to(head_dtype(lm_head))).float()

        with maybe_autocast(hidden_states.device.type, enabled=False):
            return super().compute_logits(hidden_states, head_in_fp32)

    @property
    def drafts_in_sequence(self) -> bool:
        return self.markov_head is not None

    def slot_logits(
        self, base_logits: torch.Tensor, previous_token_ids: torch.LongTensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Adds the Markov head's bias of the token before each slot, in the dtype of `base_logits`."""
        if self.markov_head is None:
            return base_logits
        return base_logits + self.markov_head(previous_token_ids)[0].to(base_logits)

    def confidence_logits(self, confidence_states: torch.Tensor, previous_token_ids: torch.LongTensor) -> torch.Tensor:
        return self.confidence_head(confidence_states, self.markov_head.embed(previous_token_ids))

    @accept_seed_names
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
            noise_embeds (`[B, Q, H]`):
                Embedded block tokens, see [`~DraftPreTrainedModel.embed_block`]: the anchor, then noise tokens.
            context_hidden_states (`[B, A, F * H]`):
                Target features of the A context tokens that `cache` does not hold yet, F = `len(target_layer_ids)`.
            attention_mask (`[B, 1, Q, A + Q]` bool or additive, *optional*):
                What many blocks see, e.g. [`~DeepseekV41DSparkBackbone.build_attention_mask`].
            position_ids (`[B or 1, A + Q]` int64, *optional*):
                Of the new context rows and of the block's, whose first slot stands at its anchor. Default: one block
                continues the context; many blocks stand at `anchor_positions`.
            cache ([`~transformers.cache_utils.DFlashCache`], *optional*):
                For one block. Gets A + Q key rows for each stage. Drop the block's with `cache.crop(-Q)` before the
                next round; then it keeps the last `sliding_window` rows of the context.
            previous_token_ids (`[B, Q]` int64, *optional*):
                Tokens before the slots (the anchor, then labels shifted by one): the heads run on all slots at once.
            anchor_positions (`[B, N]` int64), block_keep_mask (`[B, N]` bool), document_ids (`[B, A]`, *optional*):
                Many blocks of `block_size`: where they stand, which of them are no padding (default: all), and the
                documents of packed rows. They see what
                [`~blockdraft.modeling.draft.block_visibility.block_visibility`] says.
            enable_confidence_head (`bool`), confidence_head_stop_gradient (`bool`):
                Whether `previous_token_ids` make confidences too, and whether their gradient ends at the head.
            use_cache (`bool`, *optional*):
                Makes a cache if none is given.
            block_plan ([`BlockPlan`], *optional*):
                The blocks, planned by [`~DraftPreTrainedModel.plan_blocks`] before the forward.

        Raises:
            ValueError: if a shape is wrong, if settings contradict each other, or if more than one block comes without
                what says which block sees what.
        """
        if use_cache and cache is None:
            cache = DFlashCache(config=self.config)
        self._check_rows(noise_embeds, context_hidden_states, position_ids)
        blocks = {
            "anchor_positions": anchor_positions,
            "block_keep_mask": block_keep_mask,
            "document_ids": document_ids,
        }
        plan = self.read_blocks(noise_embeds, context_hidden_states, attention_mask, cache, block_plan, **blocks)
        if plan is None:
            self._check_blocks(noise_embeds, context_hidden_states, attention_mask, position_ids, cache)
        if previous_token_ids is not None:
            self._check_previous_tokens(previous_token_ids, noise_embeds)
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
        transition_logits = confidence_pred = None
        if previous_token_ids is not None:
            transition_logits, embeddings = self.markov_head(previous_token_ids)
            if enable_confidence_head and self.confidence_head is not None:
                read = (confidence_states, embeddings)
                if confidence_head_stop_gradient:
                    read = tuple(states.detach() for states in read)
                confidence_pred = self.confidence_head(*read)
        return DSparkOutput(hidden_states, confidence_states, transition_logits, confidence_pred, cache)

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

    def _check_previous_tokens(self, previous_token_ids: torch.LongTensor, noise_embeds: torch.Tensor) -> None:
        if self.markov_head is None:
            raise ValueError(
                "`previous_token_ids` are for the Markov head, and `markov_rank` is null: leave them out."
            )
        if previous_token_ids.shape != noise_embeds.shape[:2]:
            raise ValueError(
                f"`previous_token_ids` has the shape {tuple(previous_token_ids.shape)}; the block's rows are "
                f"{tuple(noise_embeds.shape[:2])}."
            )


class DeepseekV41DSparkModel(DeepseekV41DSparkBackbone):
    """
    The draft. Beside the backbone's forward it has the reference's one, on token ids, for use without a trainer: after
    [`~DeepseekV41DSparkModel.initialize_embeddings_and_head`] it holds copies of the target's embedding and head,
    which are never saved with it.
    """

    _keys_to_ignore_on_save = ["embed_tokens.weight", "lm_head.weight", "lm_head.bias"]

    def __init__(self, config: DeepseekV41DSparkConfig):
        super().__init__(config)
        self.embed_tokens: nn.Module | None = None
        self.lm_head: nn.Module | None = None

    def initialize_embeddings_and_head(self, embed_tokens: nn.Module, lm_head: nn.Module, freeze: bool = True) -> None:
        """
        Copies the target's embedding and head, in the draft's dtype.

        Args:
            embed_tokens, lm_head: `target.get_input_embeddings()` and `target.get_output_embeddings()`, with weights
                `[V, H]`.
            freeze: whether the copies get no gradient.

        Raises:
            ValueError: if a weight has another shape than `vocab_size` and `hidden_size` say.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        for name, module in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
            if tuple(module.weight.shape) != expected:
                raise ValueError(
                    f"`{name}` has a weight of {tuple(module.weight.shape)}, not {expected} as `vocab_size` and "
                    "`hidden_size` say. Pass the modules of the draft's own target."
                )
        weight = self.mtp[0].main_norm.weight
        self.embed_tokens = copy.deepcopy(embed_tokens).to(weight.device, weight.dtype)
        self.lm_head = copy.deepcopy(lm_head).to(weight.device, weight.dtype)
        self.set_embedding_head_trainable(not freeze)

    def set_embedding_head_trainable(self, trainable: bool) -> None:
        """Whether the copied embedding and head get gradients."""
        self._check_copies()
        self.embed_tokens.requires_grad_(trainable)
        self.lm_head.requires_grad_(trainable)

    def compute_logits(self, hidden_states: torch.Tensor, lm_head: nn.Module | None = None) -> torch.Tensor:
        """As the backbone's; `lm_head` defaults to the copy of the target's."""
        if lm_head is None:
            self._check_copies()
            lm_head = self.lm_head
        return super().compute_logits(hidden_states, lm_head)

    @accept_seed_names
    def forward(
        self,
        noise_embeds: torch.Tensor | None = None,
        context_hidden_states: torch.Tensor | None = None,
        *args,
        input_ids: torch.LongTensor | None = None,
        **kwargs,
    ) -> DSparkOutput | DSparkForwardOutput:
        """[`~DeepseekV41DSparkBackbone.forward`], or with `input_ids` [`~DeepseekV41DSparkModel.forward_tokens`]."""
        # PEFT's wrapper names arguments that nobody gave.
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if input_ids is None:
            return super().forward(noise_embeds, context_hidden_states, *args, **kwargs)
        return self.forward_tokens(input_ids, context_hidden_states, **kwargs)

    def forward_tokens(
        self,
        input_ids: torch.LongTensor,
        context_hidden_states: torch.Tensor,
        loss_mask: torch.Tensor,
        target_last_hidden_states: torch.Tensor | None = None,
        anchor_positions: torch.LongTensor | None = None,
        block_keep_mask: torch.Tensor | None = None,
        num_anchors: int = 512,
        enable_confidence_head: bool = True,
        confidence_head_stop_gradient: bool = False,
    ) -> DSparkForwardOutput:
        """
        The reference's training forward: blocks at random anchors, and what the objective compares them with.

        Args:
            input_ids (`[B, S]` int64), loss_mask (`[B, S]`):
                The rows, and which of their tokens are supervised.
            context_hidden_states (`[B, S, F * H]`):
                The target's features; `target_hidden_states` is their name in the reference.
            target_last_hidden_states (`[B, S, H]`, *optional*):
                The target's last hidden states, for `aligned_target_logits`.
            anchor_positions (`[B, N]` int64), block_keep_mask (`[B, N]` bool, *optional*):
                The anchors. Default: up to `num_anchors` of each row, drawn with torch's global generator and padded
                to that number.
            enable_confidence_head, confidence_head_stop_gradient:
                Those of [`~DeepseekV41DSparkBackbone.forward`].

        Raises:
            ValueError: if there is no embedding yet, or a shape is wrong.
        """
        self._check_copies()
        config = self.config
        if anchor_positions is None:
            seed, rows = int(torch.randint(2**31, ())), range(len(input_ids))
            legal = legal_dspark_anchors(loss_mask)
            anchor_positions, block_keep_mask = sample_anchors(legal, num_anchors, seed, 0, rows, width=num_anchors)
        elif block_keep_mask is None:
            block_keep_mask = torch.ones_like(anchor_positions, dtype=torch.bool)
        anchors = (anchor_positions, block_keep_mask)
        targets = build_dspark_targets(input_ids, loss_mask, *anchors, config.block_size)
        block_ids = build_block_inputs(input_ids, *anchors, config.block_size, config.mask_token_id)
        output = super().forward(
            self.embed_block(block_ids, self.embed_tokens),
            context_hidden_states.detach(),
            anchor_positions=anchor_positions,
            block_keep_mask=block_keep_mask,
            previous_token_ids=None if self.markov_head is None else targets.previous_token_ids.flatten(1),
            enable_confidence_head=enable_confidence_head,
            confidence_head_stop_gradient=confidence_head_stop_gradient,
        )
        draft_logits = self.compute_logits(output.last_hidden_state)
        if output.transition_logits is not None:
            draft_logits = draft_logits + output.transition_logits.float()
        aligned = None
        if target_last_hidden_states is not None:
            aligned = self._aligned_target_logits(target_last_hidden_states, *anchors)
        shape, confidence = targets.token_ids.shape, output.confidence_pred
        return DSparkForwardOutput(
            draft_logits=draft_logits.unflatten(1, shape[1:]),
            aligned_target_logits=aligned,
            target_ids=targets.token_ids,
            eval_mask=targets.mask.bool(),
            block_keep_mask=block_keep_mask,
            confidence_pred=None if confidence is None else confidence.view(shape),
        )

    @torch.no_grad()
    def _aligned_target_logits(
        self, last_hidden_states: torch.Tensor, anchor_positions: torch.LongTensor, block_keep_mask: torch.Tensor
    ) -> torch.Tensor:
        """`[B, N, block_size, V]`: slot k of the block at anchor a is compared with the target's state at a + k."""
        slots = torch.arange(self.config.block_size, device=last_hidden_states.device)
        last = last_hidden_states.shape[1] - 2
        rows = (anchor_positions[..., None] + slots).clamp(max=last).clamp(min=0) * block_keep_mask[..., None]
        index = rows.flatten(1)[..., None].expand(-1, -1, last_hidden_states.shape[-1])
        return self.compute_logits(last_hidden_states.gather(1, index)).unflatten(1, rows.shape[1:])

    def _check_copies(self) -> None:
        if self.embed_tokens is None or self.lm_head is None:
            raise ValueError(
                "The draft holds no `embed_tokens` and `lm_head` of its own: pass the target's, or copy them with "
                "`initialize_embeddings_and_head`."
            )
