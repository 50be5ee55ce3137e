"""What a training run logs, and what it shows of that: one line a log, above a progress bar that stays. The line has
the few figures that one watches; all of them go to `log_history`, to the trackers of `report_to` and to the report."""

import time

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback

from .objectives.dflash import BlockLoss

# Figures of a [`LogWindow`] that a line shows, in this order.
SHOWN = {
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.3f}",
    "estimated_tau": "estimated tau {:.2f}",
    "tau": "tau {:.2f}",
    "supervised_tokens_per_second": "{:,.0f} tokens/s",
    "learning_rate": "lr {:.2e}",
}
MARK = "rows_without_anchor"  # a figure that every window has, behind its prefix


class LogWindow:
    """Sums of block losses since the last log, how many rows had no anchor, and how often answers held the mask
    token."""

    def __init__(self, loss_class: type[BlockLoss], block_size: int, device: torch.device):
        self._total = loss_class.zeros(block_size, device)
        self._rows = torch.zeros(3, device=device)  # all, those without an anchor, mask tokens in answers
        self._start = time.perf_counter()

    def add(self, loss: BlockLoss, row_counts: torch.Tensor) -> None:
        """Adds a batch's loss sums, and `row_counts` of its [`BlockBatch`]."""
        self._total = self._total + loss
        self._rows = self._rows + row_counts  # a copy of the window keeps its own

    def metrics(self, accelerator) -> dict[str, float]:
        """Ratios of the sums over all ranks, by name. `acceptance_slot_K` is the share of blocks that are right up to
        slot K. Without a supervised slot there are neither losses nor estimates."""
        total = type(self._total)(**accelerator.reduce(vars(self._total)))
        rows, without_anchor, masks = accelerator.reduce(self._rows).tolist()
        metrics = {MARK: without_anchor / max(rows, 1)}
        if masks:
            metrics["mask_tokens_in_answers"] = masks
        if total.valid_blocks:
            estimates = total.metrics()
            metrics |= {
                "loss": total.loss.item(),
                "estimated_tau": estimates.pop("accept_len"),
                "supervised_tokens_per_second": total.slot_valid.sum().item() / (time.perf_counter() - self._start),
            } | estimates
            for slot in total.slot_valid.nonzero().flatten().tolist():
                metrics[f"acceptance_slot_{slot}"] = (total.slot_accepted[slot] / total.slot_valid[slot]).item()
        return metrics


def minutes(seconds: float) -> str:
    """A duration as text, in hours and minutes or in minutes and seconds."""
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def say(text: str) -> None:
    """Prints a line above the progress bars there are."""
    with tqdm.external_write_mode():
        print(text, flush=True)


def log_line(logs: dict[str, float], step: int, max_steps: int) -> str:
    """One line for what [`~transformers.Trainer`] logs at a time: figures of a training window, of an evaluation
    (behind its prefix, `eval_` or that of a data set), of the whole training at its end, or others, which are then all
    shown. `max_steps` is 0 outside of training."""
    parts = [f"step {step}/{max_steps}" if max_steps else f"step {step}"]
    mark = next((name for name in logs if name.endswith(MARK)), None)
    if mark is not None:
        prefix = mark.removesuffix(MARK)
        parts += [prefix.removesuffix("_")] if prefix else []
        parts += [text.format(logs[prefix + name]) for name, text in SHOWN.items() if prefix + name in logs]
    elif "train_runtime" in logs:
        parts += [f"trained in {minutes(logs['train_runtime'])}", f"mean loss {logs['train_loss']:.4f}"]
    else:
        parts += [f"{name} {value:.4g}" for name, value in logs.items()]
    return " | ".join(parts)


class TrainingLog(TrainerCallback):
    """Prints [`log_line`] of every log on the main process, above a progress bar, which is left out with
    `disable_tqdm` and where the output is no terminal."""

    def on_train_begin(self, args, state, control, **kwargs):
        hidden = True if args.disable_tqdm or not state.is_world_process_zero else None  # None: unless a terminal
        steps = {"initial": state.global_step, "total": state.max_steps}
        self.bar = tqdm(desc="training", disable=hidden, dynamic_ncols=True, **steps)

    def on_step_end(self, args, state, control, **kwargs):
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            say(log_line(logs, state.global_step, state.max_steps))

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()
