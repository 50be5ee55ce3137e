"""The Trainer of DSpark drafts: what differs from DFlash's."""

from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..modeling.draft.anchors import legal_dspark_anchors
from ..modeling.draft.block_targets import DSparkTargets, build_block_inputs, build_dspark_targets
from ..modeling.draft.documents import document_positions
from ..modeling.target.target_features import capture_features
from .draft_trainer import DraftTrainer
from .expert_balance import ExpertBalance
from .objectives.dflash import slot_weights
from .objectives.dspark import DSparkAlphas, DSparkLoss, SlotPredictions, dspark_loss
from .training_args import DraftTrainingArguments

logger = logging.get_logger(__name__)


class _HeadReached(BaseException):
    """Ends a target forward in front of its LM head; not an `Exception`, so no wrapper's handler swallows it."""


class DSparkTrainer(DraftTrainer):
    """
    [`DraftTrainer`] for drafts whose slot 0 predicts too (layout "N"): anchors where the next token is supervised, the
    three-term objective of [`blockdraft.trainer.objectives.dspark`] and balanced experts.

    The three terms have the same weights, so one weight of the accumulation window, summed over ranks, divides them.
    With `args.confidence_head_alpha=0` the confidence head is frozen and not evaluated.
    """

    objectives = ("dspark",)
    slot_layout = "N"
    loss_class = DSparkLoss

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, args: DraftTrainingArguments, **kwargs):
        if args.ddp_find_unused_parameters is None:
            # Every trained parameter takes part in every step, the heads of the last stage after the forward: a search
            # from the forward's output would miss them.
            args.ddp_find_unused_parameters = False
        super().__init__(model, target, args, **kwargs)

    def prepare_draft(self) -> None:
        """Freezes a confidence head that is off, and watches the routers."""
        args, draft = self.args, self.draft
        if draft.confidence_head is not None and args.confidence_head_alpha == 0:
            draft.confidence_head.requires_grad_(False)
        confidence = args.confidence_head_alpha if draft.confidence_head is not None else 0.0
        self.alphas = DSparkAlphas(args.ce_loss_alpha, args.l1_loss_alpha, confidence)
        if not any(self.alphas):
            raise ValueError(
                "`ce_loss_alpha`, `l1_loss_alpha` and `confidence_head_alpha` (counted as 0 where the draft has no "
                "confidence head) are all 0: nothing would be trained."
            )
        # Sharded heads are whole while they run, and get their gradient from hooks.
        if self.sharded:
            logger.warning("The draft's heads are sharded: the backward pass makes the logits once more.")
        bias_step = args.expert_bias_step
        if self.adapter is not None:
            # The routers' bias is the base's, and an adapter is loaded onto the base as it was.
            if bias_step not in (0, DraftTrainingArguments.expert_bias_step):
                logger.warning("`expert_bias_step` is not used: an adapter leaves the base's routers as they are.")
            bias_step = 0.0
        self.expert_balance = ExpertBalance(draft, bias_step)
        self.add_callback(self.expert_balance)

    def train(self, *args, **kwargs):
        """The base class's; a calibration belongs to the weights that it was made for, so an earlier one goes."""
        if self.draft_config.confidence_temperatures is not None:
            logger.warning("`confidence_temperatures` are of the draft's weights as they were: calibrate it again.")
            self.draft_config.confidence_temperatures = None
        return super().train(*args, **kwargs)

    def objective_settings(self) -> dict:
        return {
            "ce_loss_alpha": self.alphas.ce,
            "l1_loss_alpha": self.alphas.l1,
            "confidence_head_alpha": self.alphas.confidence,
            "confidence_head_stop_gradient": self.args.confidence_head_stop_gradient,
            "expert_bias_step": self.expert_balance.bias_step,
        }

    def legal_anchors(
        self, loss_mask: torch.Tensor, lengths: torch.Tensor, remaining: torch.Tensor | None
    ) -> torch.Tensor:
        # The reference pads each row to exactly `num_anchors` blocks. A padded block sees and is seen by itself alone,
        # has weight 0 and is not counted in the experts' load: a batch as wide as its richest row gives the same loss
        # and gradients, without the padding's cost.
        return legal_dspark_anchors(loss_mask, lengths, remaining)

    def block_weights(self, batch: dict) -> torch.Tensor:
        return slot_weights(self._block_targets(batch).mask, 0, self.gamma)

    def _block_targets(self, batch: dict) -> DSparkTargets:
        anchors = (batch["anchor_positions"], batch["block_keep_mask"])
        size, remaining = self.draft_config.block_size, self.remaining(batch)
        return build_dspark_targets(batch["input_ids"], batch["loss_mask"], *anchors, size, remaining)

    def block_loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> DSparkLoss:
        """The loss sums of a batch whose blocks are placed."""
        anchors, keep = inputs["anchor_positions"], inputs["block_keep_mask"]
        draft = self.draft
        config, targets = self.draft_config, self._block_targets(inputs)
        block_ids = build_block_inputs(inputs["input_ids"], anchors, keep, config.block_size, config.mask_token_id)
        with torch.no_grad():
            noise_embeds = draft.embed_block(block_ids, self.target.get_input_embeddings())
        if self.alphas.need_teacher:
            features, last_hidden = self.kept_states(inputs, self.target_states)
        else:
            [features] = self.kept_states(inputs, lambda batch: (self.target_features(batch),))
        self.expert_balance.counted_tokens = keep.repeat_interleave(config.block_size, dim=1)
        output = model(
            noise_embeds=noise_embeds,
            context_hidden_states=features,
            anchor_positions=anchors,
            block_keep_mask=keep,
            **self._documents(inputs),
        )
        shape = targets.token_ids.shape
        states = (output.last_hidden_state, output.confidence_states)
        slots = [*(state.view(*shape, -1) for state in states), targets.previous_token_ids]
        predict = self._predict
        if self.alphas.need_teacher:
            # Slot k's token follows position a + k; slots past the row's end are not supervised.
            positions = anchors[..., None] + torch.arange(config.block_size, device=anchors.device)
            rows, length = torch.arange(len(anchors), device=anchors.device), last_hidden.shape[1]
            slots.append(rows[:, None, None] * length + positions.clamp(max=length - 1))
            predict = partial(predict, teacher_states=last_hidden.flatten(0, 1))
        chunk_size, recompute = self.args.loss_chunk_size, self.sharded
        return dspark_loss(predict, slots, targets, self.alphas, self.gamma, chunk_size, recompute)

    def _predict(
        self,
        hidden_states: torch.Tensor,
        confidence_states: torch.Tensor,
        previous_token_ids: torch.Tensor,
        teacher_rows: torch.Tensor | None = None,
        teacher_states: torch.Tensor | None = None,
    ) -> SlotPredictions:
        """Predictions of n slots from the draft's output `[n, H]` (twice), the tokens before them `[n]` and, of what
        the target's head reads `[B * S, H]`, their rows `[n]`."""
        draft, head = self.draft, self.target.get_output_embeddings()
        logits, teacher_logits, confidence = draft.compute_logits(hidden_states, head), None, None
        if draft.markov_head is not None:
            transitions, embeddings = draft.markov_head(previous_token_ids)
            logits = logits + transitions.float()
        if teacher_rows is not None:
            with torch.no_grad():
                teacher_logits = draft.compute_logits(teacher_states[teacher_rows], head)
        if self.alphas.confidence > 0:
            if self.args.confidence_head_stop_gradient:
                confidence_states, embeddings = confidence_states.detach(), embeddings.detach()
            confidence = draft.confidence_head(confidence_states, embeddings)
        return SlotPredictions(logits, teacher_logits, confidence)

    def _documents(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What the draft is told about packed rows: its keys are rounded after their rotation, so that positions have
        to restart with each document."""
        if "document_ids" not in inputs:
            return {}
        positions = document_positions(inputs["document_ids"])
        slots = torch.arange(self.draft_config.block_size, device=positions.device)
        blocks = positions.gather(1, inputs["anchor_positions"])[..., None] + slots
        position_ids = torch.cat([positions, blocks.flatten(1)], dim=1)
        return {"document_ids": inputs["document_ids"], "position_ids": position_ids}

    @torch.no_grad()
    def target_states(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The draft's features `[B, S, features * hidden_size]` and the states that the target's LM head reads
        `[B, S, hidden_size]`, from one frozen forward that ends there.
        """
        self.check_packing(inputs)
        config, read = self.draft_config, []

        def keep_and_stop(head: nn.Module, args: tuple) -> None:
            read.append(args[0])
            raise _HeadReached

        hook = self.target.get_output_embeddings().register_forward_pre_hook(keep_and_stop)
        try:
            with capture_features(self.target, config.target_layer_ids, config.capture_point) as capture:
                try:
                    capture.run(**self.target_inputs(inputs))
                except _HeadReached:
                    pass
                features = capture.features(self.args.device)
        finally:
            hook.remove()
        if not read:
            raise ValueError(
                f"{type(self.target).__name__} makes its logits without calling `get_output_embeddings()`, so the "
                "states that its head reads are unknown. Train with `l1_loss_alpha=0` and `confidence_head_alpha=0`."
            )
        return features, read[0].to(self.args.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the terms, acceptance, confidence errors and the experts' loads to the base class's figures."""
        if "loss" in logs:
            logs = self.expert_balance.metrics() | logs
        super().log(logs, start_time)
