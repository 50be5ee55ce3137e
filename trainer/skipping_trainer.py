"""The part of the drafts' Trainer that leaves rows out whose features or gradients are not finite."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate.utils import DistributedType
from torch import Tensor, nn
from transformers.utils import logging

from .features_trainer import FeaturesTrainer
from .training_log import LogWindow

logger = logging.get_logger(__name__)

# How many rows were left out since the beginning of the run, and why; in the log from the first one on.
FEATURES, GRADIENTS = "rows_skipped_for_features", "rows_skipped_for_gradients"
JUDGED_ROWS = 1000  # `max_skipped_share` is of as many at least: one of the first rows is not yet a share
NAMED_ROWS = 20  # in one message
MASKS = ("loss_mask", "block_keep_mask")  # of a batch, what decides which slots are supervised


class SkippingTrainer(FeaturesTrainer):
    """
    [`FeaturesTrainer`] that takes no step with gradients that are NaN or Inf. If those of an accumulation window are,
    the rows that made them so are named and counted, and the window is taken again without them, as if they had no
    anchor: the step is bit for bit that of a run in which nothing of these rows is supervised. As long as gradients
    are finite, nothing is looked at but their norm, which the base class computes.

    The counts are logged, so that `trainer_state.json` has them in `log_history`, and a run that is resumed goes on
    counting. With fp16 the loss scaler leaves out the whole step, and DeepSpeed has taken it before its gradients
    are known: rows are named and counted there too, and DeepSpeed's run ends with an error.
    """

    _window: LogWindow

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._tr_loss = torch.zeros((), device=self.args.device)  # the base class's, which makes it in `train`

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, None]:
        """The base class's; remembers what is there before an accumulation window."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._batches, self._before = batches, (self._tr_loss.clone(), copy.copy(self._window))
        return batches, None

    def forget_window(self) -> None:
        """Takes back what the batches of this window have added to gradients, losses and logs."""
        loss, window = self._before
        self._tr_loss, self._window = loss.clone(), copy.copy(window)
        self.model_wrapped.zero_grad()

    def _get_grad_norm(self, model: nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float:
        """The base class's; what it is asked for is the last thing before the optimizer's step."""
        norm = super()._get_grad_norm(model, grad_norm)
        if norm is None or math.isfinite(norm):
            return norm
        return self._take_without_faulty_rows(model, norm)

    def _take_without_faulty_rows(self, model: nn.Module, norm: Tensor | float) -> Tensor | float:
        """Takes the window again, on all ranks, until its gradients are finite; returns their norm."""
        skipped = [self._rows_without_finite_features(batch) for batch in self._batches]
        self._count(FEATURES, skipped)
        if self.args.fp16:
            return norm
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise FloatingPointError(
                f"The gradients of step {self.state.global_step + 1} are not finite, and DeepSpeed has taken it. "
                "Leave out the rows that are named above, if any, and go on from the last checkpoint."
            )
        while True:
            norm, faulty = self._take_again(model, skipped)
            if math.isfinite(norm):
                return norm
            faulty = [rows & ~known for rows, known in zip(faulty, skipped, strict=True)]
            if not self._count(GRADIENTS, faulty):
                raise FloatingPointError(
                    f"The gradients of step {self.state.global_step + 1} are not finite (NaN or Inf), though those of "
                    "each row are: weights or losses have become too large. Go on from a checkpoint with a lower "
                    "`learning_rate`, or in bfloat16 or float32."
                )
            skipped = [rows | known for rows, known in zip(faulty, skipped, strict=True)]

    def _take_again(self, model: nn.Module, skipped: list[Tensor]) -> tuple[Tensor | float, list[Tensor]]:
        """The norm of the window's gradients without the skipped rows, and by batch which rows (`[B]` bool) give the
        draft's inputs gradients that are not finite."""
        self.forget_window()
        batches = [without_rows(batch, rows) for batch, rows in zip(self._batches, skipped, strict=True)]
        weight, faulty = self.place_window(batches), []
        for batch in batches:
            last = batch is batches[-1]
            self.accelerator.gradient_state._set_sync_gradients(last)
            with nullcontext() if last else self.accelerator.no_sync(model), self._watched_inputs() as watched:
                self._tr_loss += self.training_step(model, batch, weight)
            rows = torch.zeros(len(batch["input_ids"]), dtype=torch.bool)
            for given in watched:
                if given.grad is not None:
                    rows |= rows_not_finite(given.grad)
            faulty.append(rows)
        norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        return super()._get_grad_norm(model, norm), faulty

    @contextmanager
    def _watched_inputs(self) -> Iterator[list[Tensor]]:
        """Yields a list to which forwards of the draft add its inputs, `[B, ...]`, which get gradients."""
        watched = []

        def watch(module: nn.Module, args: tuple, kwargs: dict) -> None:
            watched.extend(kwargs[name].requires_grad_() for name in ("noise_embeds", "context_hidden_states"))

        # Of an adapter the outermost module: PEFT calls the `forward` of those inside, not them.
        with (self.adapter or self.draft).register_forward_pre_hook(watch, with_kwargs=True):
            yield watched

    def _rows_without_finite_features(self, batch: dict) -> Tensor:
        inputs = self._prepare_inputs(batch)
        with self.accelerator.autocast():
            return rows_not_finite(self.target_states(inputs)[0])

    def _count(self, reason: str, skipped: list[Tensor]) -> int:
        """Names the rows of this rank, adds those of all ranks to the counts, and returns how many they are. Raises a
        `FloatingPointError` if there are too many by now."""
        names = [
            name for batch, rows in zip(self._batches, skipped, strict=True) for name in names_of_rows(batch, rows)
        ]
        step, what = self.state.global_step + 1, reason.removeprefix("rows_skipped_for_")
        if names:
            more = f" and {len(names) - NAMED_ROWS} more" if len(names) > NAMED_ROWS else ""
            logger.warning(
                f"Step {step} leaves out {', '.join(names[:NAMED_ROWS])}{more}: {what} are not finite (NaN or Inf)."
            )
        count = int(self.accelerator.reduce(torch.tensor(len(names), device=self.args.device)))
        if not count:
            return 0
        history = self.state.log_history
        before = next((entry for entry in reversed(history) if FEATURES in entry), {FEATURES: 0, GRADIENTS: 0})
        counts = {name: before[name] + count * (name == reason) for name in (FEATURES, GRADIENTS)}
        self.log(dict(counts))
        rows, total = step * self.get_total_train_batch_size(self.args), sum(counts.values())
        if total > self.args.max_skipped_share * max(rows, JUDGED_ROWS):
            raise FloatingPointError(
                f"{total} of {rows} rows have features or gradients that are not finite (NaN or Inf), the last ones "
                f"in step {step}: more than `max_skipped_share` ({self.args.max_skipped_share:g}) allows. A target "
                "in float16 may overflow: load it in bfloat16. Mend or leave out the rows that are named above, and "
                "go on from the last checkpoint."
            )
        return count


def rows_not_finite(values: Tensor) -> Tensor:
    """Which rows of `[B, ...]` hold NaN or Inf, `[B]` bool on the CPU."""
    return ~values.isfinite().flatten(1).all(1).cpu()


def without_rows(batch: dict[str, Tensor], skipped: Tensor) -> dict[str, Tensor]:
    """A batch in which nothing of the `skipped` rows (`[B]` bool) is supervised, and in which they are named, as their
    features must not be read; its blocks are to be placed again."""
    batch = batch | {"skipped_rows": skipped}
    return batch | {name: batch[name] * ~skipped[:, None].to(batch[name].device) for name in MASKS if name in batch}


def names_of_rows(batch: dict[str, Tensor], chosen: Tensor) -> list[str]:
    """The chosen rows (`[B]` bool) by their `row_id`, packed ones with those of their documents."""
    names = []
    for index in chosen.nonzero().flatten().tolist():
        name = f"row {batch['row_id'][index].item()}" if "row_id" in batch else f"row {index} of a batch without ids"
        if "document_row_ids" in batch:
            count = int(batch["document_ids"][index].max())
            name += f" (documents {', '.join(map(str, batch['document_row_ids'][index, :count].tolist()))})"
        names.append(name)
    return names
