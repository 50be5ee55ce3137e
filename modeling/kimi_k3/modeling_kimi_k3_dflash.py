"""DFlash draft with a dense Kimi K3 backbone: NoPE MLA over `[context | block]` and a SiTU feed-forward."""

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache, DFlashCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from ...configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from ..draft.block_visibility import BlockPlan, last_block_mask
from ..draft.flex_block_mask import PaddedBlockMask, padded_block_mask
from ..draft.modeling_draft import DraftPreTrainedModel, draft_arguments
from ..draft.visible_attention import VisibleKeys, attend_visible
from ..ops.shapes import check_shape, check_visible
from .kimi_k3_layers import KimiK3LatentAttention, KimiK3MLP, KimiK3RMSNorm

MIN_FLEX_WIDTH = 16  # FlexAttention's kernels take no narrower heads

# What a layer is told about who sees what: a mask, or how many blocks are to be computed.
Visible = Tensor | BlockMask | PaddedBlockMask | VisibleKeys


class KimiK3DFlashAttention(KimiK3LatentAttention):
    """The target's MLA with the block as queries and `[cached | new context | block]` as keys and values."""

    def __init__(self, config: KimiK3DFlashConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_causal = False

    def forward(
        self,
        hidden_states: Tensor,
        context_hidden_states: Tensor,
        attention_mask: Visible | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """`[B, Q, H]` normed block rows and `[B, A, H]` rows of the new context; returns `[B, Q, H]`. `attention_mask`
        is one of [`~DraftPreTrainedModel.layer_masks`], or `None` where every query sees every key."""
        queries = self.queries(hidden_states)
        latents, shared_keys = self.latents(torch.cat([context_hidden_states, hidden_states], dim=1))
        if cache is not None:
            latents, shared_keys = cache.update(latents, shared_keys, self.layer_idx)
        # In decoding the block is short and the cache long: absorbing always pays.
        absorbs = cache is not None and not self.training and self.has_plain_weight(latents)
        absorbs = absorbs and not isinstance(attention_mask, BlockMask)
        output, _ = self.attend(queries, latents, shared_keys, attention_mask, absorbs)
        return self.gate_and_project(output, hidden_states)

    def _run_attention(
        self, queries: Tensor, keys: Tensor, values: Tensor, attention_mask: Visible | None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(attention_mask, VisibleKeys):
            return attend_visible(queries, keys, values, attention_mask, self.scaling), None
        if isinstance(attention_mask, PaddedBlockMask):
            length, padded = queries.shape[2], attention_mask
            keys, values = padded.pad_keys(keys, length), padded.pad_keys(values, length)
            output, _ = self._run_attention(padded.pad_queries(queries), keys, values, padded.mask, **kwargs)
            return output[:, :length], None
        if self.config._attn_implementation == "flex_attention" and not isinstance(attention_mask, BlockMask):
            # FlexAttention is for training's block masks; it would compile anew for each length of a growing context.
            kwargs["implementation"] = "sdpa"
        return super()._run_attention(queries, keys, values, attention_mask, **kwargs)


class KimiK3DFlashDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm MLA over `[context | block]`, then a dense SiTU MLP. The context is not normed again in each layer."""

    def __init__(self, config: KimiK3DFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = KimiK3DFlashAttention(config, layer_idx)
        self.mlp = KimiK3MLP(config)
        self.input_layernorm = KimiK3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = KimiK3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        context_hidden_states: Tensor,
        attention_mask: Visible | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """
        Args:
            hidden_states: `[B, Q, H]`, the block's residual stream.
            context_hidden_states: `[B, A, H]`, projected and normed target features, the same for all layers.
            attention_mask, cache: as in [`KimiK3DFlashAttention`].

        Returns:
            `[B, Q, H]`, the residual stream after this layer.
        """
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, context_hidden_states, attention_mask, cache)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class KimiK3DFlashDraftModel(DraftPreTrainedModel):
    """
    DFlash draft (arXiv 2602.06036) for Kimi K3 and other targets: slot 0 of a block is the last known token, the other
    slots hold the mask token and are predicted in one forward from the block and the target's features of the context.

    There is no positional encoding: slots that hold the same token and see the same keys get the same prediction. Set
    `config.is_causal` (or a `sliding_window` well below the context) so that masked slots differ.
    """

    config_class = KimiK3DFlashConfig
    _no_split_modules = ["KimiK3DFlashDecoderLayer"]
    _supports_flex_attn = True

    def __init__(self, config: KimiK3DFlashConfig):
        super().__init__(config)
        self.fc = nn.Linear(config.features_width, config.hidden_size, bias=False)
        self.hidden_norm = KimiK3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(KimiK3DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = KimiK3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_init()

    @draft_arguments
    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        attention_mask: Tensor | BlockMask | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        anchor_positions: torch.LongTensor | None = None,
        block_keep_mask: Tensor | None = None,
        document_ids: torch.LongTensor | None = None,
        block_plan: BlockPlan | None = None,
    ) -> BaseModelOutputWithPast:
        """
        One block after its whole context, as in decoding, or any number of blocks, as in training. Many blocks are
        given by a `block_plan` or their `anchor_positions`, which is fastest, or by a mask.

        Args:
            noise_embeds (`[B, Q, H]`): Embedded block tokens, see [`~DraftPreTrainedModel.embed_block`].
            context_hidden_states (`[B, A, F * H]`): Target features of the A context tokens that `cache` does not hold
                yet, F = `len(target_layer_ids)`.
            attention_mask (*optional*):
                - `None`: one block, which sees its context as the configuration says, and itself;
                - `[B, C + A + Q]`, C cached rows: one block, and 0 marks padding;
                - `[B, 1, Q, C + A + Q]`, bool (True is visible) or additive, or a `BlockMask`: any number of blocks.
                  `config.sliding_window` and `config.is_causal` have to be in it, and it holds for every layer: with
                  `config.num_full_attention_layers` give `anchor_positions` instead.
            position_ids (*optional*):
                Not used: K3's attention has no positional encoding.
            cache ([`~transformers.cache_utils.DFlashCache`], *optional*): Gets A + Q rows for each layer, the normed
                latents and the shared keys. Remove the block's with `cache.crop(-Q)` before the next round.
            use_cache (`bool`, *optional*): Makes a cache if none is given.
            anchor_positions (`[B, N]` int64), block_keep_mask (`[B, N]` bool), document_ids (`[B, A]`, *optional*):
                Many blocks of `block_size`: where they stand, which of them are no padding, and the documents of
                packed rows; see [`~DraftPreTrainedModel.plan_blocks`].
            block_plan ([`BlockPlan`], *optional*): The same, planned before the forward.

        Returns:
            [`~transformers.modeling_outputs.BaseModelOutputWithPast`]: `last_hidden_state` `[B, Q, H]` in the dtype of
            `noise_embeds`, ready for the target's head, and `cache`.

        Raises:
            ValueError: if the width of the features or a shape is wrong, if Q > `block_size` comes with neither
                anchors nor a mask that says which block sees what, or a mask of its own with layers that differ.
        """
        if use_cache and cache is None:
            cache = DFlashCache(config=self.config)
        inputs = (noise_embeds, context_hidden_states, attention_mask, cache)
        plan = self.read_blocks(*inputs, block_plan, anchor_positions, block_keep_mask, document_ids)
        if plan is not None:
            masks = self.layer_masks(plan)
        else:
            cached = cache.get_seq_length() if cache is not None else 0
            key_length = cached + context_hidden_states.shape[1] + noise_embeds.shape[1]
            masks = self._read_mask(attention_mask, noise_embeds, key_length)

        # The target may be held in another dtype than the draft.
        dtype = self.norm.weight.dtype
        context_hidden_states = self.hidden_norm(self.fc(context_hidden_states.to(dtype)))
        hidden_states = noise_embeds.to(dtype)
        for layer, window in zip(self.layers, self.config.context_windows, strict=True):
            hidden_states = layer(hidden_states, context_hidden_states, masks[window], cache=cache)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states).to(noise_embeds.dtype), cache=cache)

    def layer_masks(self, plan: BlockPlan) -> dict[int | None, Visible]:
        """
        As [`~DraftPreTrainedModel.layer_masks`]; with `attn_implementation="flex_attention"` masks that skip tiles in
        which nothing is visible.

        Raises:
            ValueError: if FlexAttention, which nobody gets unasked, cannot compute this draft's attention here.
        """
        if self.config._attn_implementation != "flex_attention":
            return super().layer_masks(plan)
        self._check_flex_attention(plan.anchor_positions.device)
        return {window: padded_block_mask(visible) for window, visible in plan.visible.items()}

    def _check_flex_attention(self, device: torch.device) -> None:
        widths = (self.config.qk_head_dim, self.config.v_head_dim)
        fault = None
        if torch.is_grad_enabled() and self.training and device.type in ("cpu", "mps"):
            fault = f"cannot train on {device.type!r}, where torch has no backward for it"
        elif min(widths) < MIN_FLEX_WIDTH:
            fault = f"takes heads of at least {MIN_FLEX_WIDTH} channels and this draft's have {widths}"
        elif self.training and self.config.attention_dropout > 0:
            fault = f"knows no dropout, and `attention_dropout` is {self.config.attention_dropout}"
        if fault:
            raise ValueError(
                f'`attn_implementation="flex_attention"` {fault}: load the draft with `attn_implementation="sdpa"`.'
            )

    def _read_mask(
        self, attention_mask: Tensor | BlockMask | None, noise_embeds: Tensor, key_length: int
    ) -> dict[int | None, Tensor | BlockMask | None]:
        """By window of a layer: `[B, 1, Q, key_length]`, a `BlockMask`, or `None` where all is visible."""
        config, (batch, query_length, _) = self.config, noise_embeds.shape
        windows = dict.fromkeys(config.context_windows)
        is_padding_mask = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        reason = "cached context, new context and block are its keys"
        if is_padding_mask:
            check_shape("attention_mask", attention_mask, batch, key_length, reason=reason)
        elif isinstance(attention_mask, Tensor):
            check_visible(attention_mask, batch, query_length, key_length, reason)
        if attention_mask is None or is_padding_mask:
            hides = is_padding_mask or config.is_causal
            if attention_mask is None:
                attention_mask = torch.ones(1, key_length, dtype=torch.bool, device=noise_embeds.device)
            rule = {"window_per_query": self.window_per_query, "causal": config.is_causal}
            return {
                window: last_block_mask(attention_mask, query_length, sliding_window=window, **rule)
                if hides or window is not None
                else None
                for window in windows
            }
        if len(windows) > 1:
            raise ValueError(
                f"The last {config.num_full_attention_layers} layers (`num_full_attention_layers`) see the whole "
                "context and the others a window, which one `attention_mask` cannot say: pass `anchor_positions`."
            )
        if isinstance(attention_mask, BlockMask):
            if config._attn_implementation != "flex_attention":
                raise ValueError(
                    'A `BlockMask` is for `attn_implementation="flex_attention"`; the draft was loaded with '
                    f"{config._attn_implementation!r}, which takes a dense `attention_mask`."
                )
        elif attention_mask.dtype != torch.bool:
            attention_mask = attention_mask.to(self.norm.weight.dtype)
        return dict.fromkeys(windows, attention_mask)
