"""What DSpark drafts (arXiv 2607.05147) share, whatever their layers: the heads, logits in fp32, and the reference's
stand-alone forward on token ids."""

import copy

import torch
from torch import Tensor, nn
from transformers.utils import logging
from transformers.utils.generic import maybe_autocast

from ...configuration.configuration_dspark import DSparkConfig
from ..ops.shapes import check_shape
from .anchors import legal_dspark_anchors, sample_anchors
from .block_targets import build_block_inputs, build_dspark_targets
from .dspark_heads import DSparkConfidenceHead, DSparkForwardOutput, DSparkHeads, DSparkMarkovHead, DSparkOutput
from .modeling_draft import DraftPreTrainedModel, draft_arguments, head_dtype

logger = logging.get_logger(__name__)


class DSparkDraftModel(DraftPreTrainedModel):
    """
    Base of a draft with DSpark's heads. A subclass has layers, and a forward that ends in
    [`~DSparkDraftModel.read_heads`].

    Attributes:
        heads ([`DSparkHeads`], or what holds a `markov_head` and a `confidence_head` in its place).
    """

    config: DSparkConfig
    heads: DSparkHeads | nn.Module
    # The heads are called by themselves as well: once a slot in decoding, by chunks in training.
    _no_split_modules = ["DSparkMarkovHead", "DSparkConfidenceHead"]
    _keep_in_fp32_modules_strict = ["confidence_head"]

    @property
    def markov_head(self) -> DSparkMarkovHead | None:
        return self.heads.markov_head

    @property
    def confidence_head(self) -> DSparkConfidenceHead | None:
        return self.heads.confidence_head

    @property
    def drafts_in_sequence(self) -> bool:
        return self.markov_head is not None

    def compute_logits(self, hidden_states: Tensor, lm_head: nn.Module) -> Tensor:
        """As [`~DraftPreTrainedModel.compute_logits`], in fp32 whatever the dtype of states and head; a head that is
        more than a matrix (quantised, sharded, offloaded, with an adapter) computes as it does for its target."""

        def head_in_fp32(states: Tensor) -> Tensor:
            is_matrix = type(lm_head) is nn.Linear and type(lm_head.weight) is nn.Parameter
            if is_matrix and lm_head.weight.dtype in (torch.bfloat16, torch.float16) and not lm_head.weight.is_meta:
                bias = None if lm_head.bias is None else lm_head.bias.float()
                return nn.functional.linear(states.float(), lm_head.weight.float(), bias)
            return lm_head(states.to(head_dtype(lm_head))).float()

        with maybe_autocast(hidden_states.device.type, enabled=False):
            return super().compute_logits(hidden_states, head_in_fp32)

    def slot_logits(self, base_logits: Tensor, previous_token_ids: torch.LongTensor, hidden_states: Tensor) -> Tensor:
        """Adds the Markov head's bias of the token before each slot, in the dtype of `base_logits`. Raises a
        `ValueError` if there is not one token for each slot."""
        if self.markov_head is None:
            return base_logits
        check_shape("previous_token_ids", previous_token_ids, *base_logits.shape[:-1], reason="one for each slot")
        return base_logits + self.markov_head(previous_token_ids)[0].to(base_logits)

    def confidence_logits(self, confidence_states: Tensor, previous_token_ids: torch.LongTensor) -> Tensor:
        return self.confidence_head(confidence_states, self.markov_head.embed(previous_token_ids))

    def read_heads(
        self,
        output: DSparkOutput,
        previous_token_ids: torch.LongTensor | None,
        enable_confidence_head: bool = True,
        confidence_head_stop_gradient: bool = False,
    ) -> DSparkOutput:
        """
        Fills in what the heads say of all slots at once.

        Args:
            output: Of the layers: `last_hidden_state` and `confidence_states`.
            previous_token_ids (`[B, Q]` int64, *optional*): Tokens before the slots; without them the heads are not
                asked.
            enable_confidence_head, confidence_head_stop_gradient: Whether to make confidences too, and whether their
                gradient ends at the head.

        Raises:
            ValueError: if tokens are given to a draft without a Markov head, or not one for each slot.
        """
        if previous_token_ids is None:
            return output
        if self.markov_head is None:
            raise ValueError(
                "`previous_token_ids` are for the Markov head, and `markov_rank` is null: leave them out."
            )
        rows = output.last_hidden_state.shape[:2]
        check_shape("previous_token_ids", previous_token_ids, *rows, reason="one for each slot of the blocks")
        output.transition_logits, embeddings = self.markov_head(previous_token_ids)
        if enable_confidence_head and self.confidence_head is not None:
            states = (output.confidence_states, embeddings)
            if confidence_head_stop_gradient:
                states = tuple(state.detach() for state in states)
            output.confidence_pred = self.confidence_head(*states)
        return output


class DSparkTokenForward:
    """
    Gives a [`DSparkDraftModel`] the reference's forward on token ids beside its own, for use without a trainer: after
    [`~DSparkTokenForward.initialize_embeddings_and_head`] it holds copies of the target's embedding and head, which
    are never saved with it. Stands before the draft in the list of bases.

    Args:
        config ([`DSparkConfig`]).
        num_anchors, enable_confidence_head, confidence_head_stop_gradient: Attributes, and the defaults of
            [`~DSparkTokenForward.forward_tokens`].
    """

    _keys_to_ignore_on_save = ["embed_tokens.weight", "lm_head.weight", "lm_head.bias"]

    def __init__(
        self,
        config: DSparkConfig,
        num_anchors: int = 512,
        enable_confidence_head: bool = True,
        confidence_head_stop_gradient: bool = False,
    ):
        super().__init__(config)
        self.num_anchors = num_anchors
        self.enable_confidence_head = enable_confidence_head
        self.confidence_head_stop_gradient = confidence_head_stop_gradient
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
        self.embed_tokens, self.lm_head = (
            copy.deepcopy(module).to(self.device, self.dtype) for module in (embed_tokens, lm_head)
        )
        self.set_embedding_head_trainable(not freeze)

    def set_embedding_head_trainable(self, trainable: bool) -> None:
        """Whether the copied embedding and head get gradients, from [`~DSparkTokenForward.forward_tokens`]. A saved
        draft has neither of them, so keep what they learn with `model.embed_tokens.state_dict()` and
        `model.lm_head.state_dict()`. The trainers refuse such a draft: their loss is that of the target's own."""
        self._check_copies()
        self.embed_tokens.requires_grad_(trainable)
        self.lm_head.requires_grad_(trainable)

    def save_pretrained(self, *args, **kwargs):
        """The draft's own, without the copies; warns if these are trainable."""
        if self.embed_tokens is not None and self.embed_tokens.weight.requires_grad:
            logger.warning(
                "The copies of embedding and head, which are trainable, are not saved: a draft reads its target's."
            )
        super().save_pretrained(*args, **kwargs)

    def compute_logits(self, hidden_states: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """As [`~DSparkDraftModel.compute_logits`]; `lm_head` defaults to the copy of the target's."""
        if lm_head is None:
            self._check_copies()
            lm_head = self.lm_head
        return super().compute_logits(hidden_states, lm_head)

    @draft_arguments
    def forward(
        self,
        noise_embeds: Tensor | None = None,
        context_hidden_states: Tensor | None = None,
        *args,
        input_ids: torch.LongTensor | None = None,
        **kwargs,
    ) -> DSparkOutput | DSparkForwardOutput:
        """The draft's own forward, or with `input_ids` [`~DSparkTokenForward.forward_tokens`]. Raises a `ValueError`
        for both."""
        if input_ids is None:
            return super().forward(noise_embeds, context_hidden_states, *args, **kwargs)
        if noise_embeds is not None:
            raise ValueError(
                "`input_ids` are rows of tokens, of which the draft makes blocks itself, and `noise_embeds` are "
                "embedded blocks: pass one of them."
            )
        return self.forward_tokens(input_ids, context_hidden_states, *args, **kwargs)

    def forward_tokens(
        self,
        input_ids: torch.LongTensor,
        context_hidden_states: Tensor,
        loss_mask: Tensor,
        target_last_hidden_states: Tensor | None = None,
        anchor_positions: torch.LongTensor | None = None,
        block_keep_mask: Tensor | None = None,
        num_anchors: int | None = None,
        enable_confidence_head: bool | None = None,
        confidence_head_stop_gradient: bool | None = None,
    ) -> DSparkForwardOutput:
        """
        The reference's training forward: blocks at random anchors, and what the objective compares them with.

        Args:
            input_ids (`[B, S]` int64), loss_mask (`[B, S]`): The rows, and which of their tokens are supervised.
            context_hidden_states (`[B, S, F * H]`): The target's features; `target_hidden_states` is their name in the
                reference.
            target_last_hidden_states (`[B, S, H]`, *optional*): The target's last hidden states, for
                `aligned_target_logits`.
            anchor_positions (`[B, N]` int64), block_keep_mask (`[B, N]` bool, *optional*): The anchors. Default: up to
                `num_anchors` of each row, drawn with torch's global generator and padded to that number.
            enable_confidence_head, confidence_head_stop_gradient: Those of [`~DSparkDraftModel.read_heads`]. Like
                `num_anchors`, by default the model's attribute.

        Raises:
            ValueError: if there is no embedding yet, or a shape is wrong.
        """
        self._check_copies()
        config, (batch, length) = self.config, check_shape("input_ids", input_ids, "B", "S")
        reason = "one row for each of `input_ids`"
        check_shape("loss_mask", loss_mask, batch, length, reason=reason)
        states = {"context_hidden_states": (context_hidden_states, config.features_width)}
        if target_last_hidden_states is not None:
            states["target_last_hidden_states"] = (target_last_hidden_states, config.hidden_size)
        for name, (rows, width) in states.items():
            check_shape(name, rows, batch, length, width, reason=reason)
        if num_anchors is None:
            num_anchors = self.num_anchors
        if enable_confidence_head is None:
            enable_confidence_head = self.enable_confidence_head
        if confidence_head_stop_gradient is None:
            confidence_head_stop_gradient = self.confidence_head_stop_gradient
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
        self, last_hidden_states: Tensor, anchor_positions: torch.LongTensor, block_keep_mask: Tensor
    ) -> Tensor:
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
