"""The Trainer of DSpark drafts: what differs from DFlash's."""

from functools import partial

import torch
from torch import nn
from transformers.utils import ModelOutput, logging

from .block_batch import BlockBatch
from .draft_trainer import DraftTrainer
from .expert_balance import ExpertBalance
from .objectives.dspark import DSparkAlphas, DSparkLoss, SlotPredictions, dspark_loss
from .training_args import DraftTrainingArguments

logger = logging.get_logger(__name__)


# What `initialize_embeddings_and_head` copies into a draft.
COPIES = ("embed_tokens.", "lm_head.")


class DSparkTrainer(DraftTrainer):
    """
    [`DraftTrainer`] for drafts whose slot 0 predicts too (layout "N"), with DSpark's objective of three terms
    ([`blockdraft.trainer.objectives.dspark`], arXiv 2607.05147), anchors where the next token is supervised, and
    balanced experts where the draft has any.

    The three terms have the same weights, so one weight of the accumulation window, summed over ranks, divides them.
    With `args.confidence_head_alpha=0` the confidence head is frozen and not evaluated.
    """

    objectives = ("dspark",)
    slot_layout = "N"
    loss_class = DSparkLoss
    # Every trained parameter takes part in every step, the heads of the last stage after the forward: a search from
    # the forward's output would miss them.
    ddp_find_unused_parameters = False

    def prepare_draft(self) -> None:
        """Freezes a confidence head that is off, and watches the routers. Raises a `ValueError` for copies of the
        target's embedding and head that are to be trained, or if no term of the loss has a weight."""
        args, draft = self.args, self.draft
        if any(weight.requires_grad for name, weight in draft.named_parameters() if name.startswith(COPIES)):
            raise ValueError(
                "The draft's copies of embedding and head are trainable, but the loss is that of the target's own, "
                "which verify, and a saved draft has none: call `draft.set_embedding_head_trainable(False)`."
            )
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
        # The routers' bias is the base's, and an adapter is loaded onto the base as it was.
        self.expert_balance = ExpertBalance(draft, 0.0 if self.adapter is not None else args.expert_bias_step)
        self.add_callback(self.expert_balance)
        if args.expert_bias_step not in (0, DraftTrainingArguments.expert_bias_step):
            if not self.expert_balance.routers:
                logger.warning("`expert_bias_step` is not used: the draft has no routed experts.")
            elif self.adapter is not None:
                logger.warning("`expert_bias_step` is not used: an adapter leaves the base's routers as they are.")

    def train(self, *args, **kwargs):
        """The base class's; a calibration belongs to the weights it was made for, so an earlier one is dropped."""
        if self.draft_config.confidence_temperatures is not None:
            logger.warning("`confidence_temperatures` are dropped: calibrate the trained weights again.")
            self.draft_config.confidence_temperatures = None
        return super().train(*args, **kwargs)

    def objective_settings(self) -> dict:
        settings = {
            "ce_loss_alpha": self.alphas.ce,
            "l1_loss_alpha": self.alphas.l1,
            "confidence_head_alpha": self.alphas.confidence,
            "confidence_head_stop_gradient": self.args.confidence_head_stop_gradient,
        }
        if self.expert_balance.routers:
            settings["expert_bias_step"] = self.expert_balance.bias_step
        return settings

    def forget_window(self) -> None:
        super().forget_window()
        self.expert_balance.forget_step()

    @property
    def needs_head_input(self) -> bool:
        return self.alphas.need_teacher

    def run_draft(self, model: nn.Module, blocks: BlockBatch, features: torch.Tensor) -> ModelOutput:
        """The base class's; padded blocks do not count in the experts' load."""
        keep = blocks.block_keep_mask
        self.expert_balance.counted_tokens = keep.repeat_interleave(self.draft_config.block_size, dim=1)
        return super().run_draft(model, blocks, features)

    def block_loss(self, output: ModelOutput, blocks: BlockBatch, head_input: torch.Tensor | None) -> DSparkLoss:
        shape = blocks.targets.token_ids.shape
        states = (output.last_hidden_state, output.confidence_states)
        slots = [*(state.view(*shape, -1) for state in states), blocks.previous_token_ids]
        predict = self._predict
        if self.needs_head_input:
            # Slot k's token follows position a + k; slots past the row's end are not supervised.
            anchors, length = blocks.anchor_positions, head_input.shape[1]
            positions = anchors[..., None] + torch.arange(shape[-1], device=anchors.device)
            rows = torch.arange(len(anchors), device=anchors.device)
            slots.append(rows[:, None, None] * length + positions.clamp(max=length - 1))
            predict = partial(predict, teacher_states=head_input.flatten(0, 1))
        return dspark_loss(predict, slots, blocks.targets, self.alphas, self.args.loss_chunk_size, self.sharded)

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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the experts' loads to the base class's figures."""
        if "loss" in logs:
            logs = self.expert_balance.metrics() | logs
        super().log(logs, start_time)
