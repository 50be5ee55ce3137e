"""What a run logs between two log lines: sums of block losses over batches and ranks."""

import time

import torch

from .dflash import BlockLoss


class LogWindow:
    """Sums of block losses since the last log, how many rows had no anchor, and how often answers held the mask token.

    Args:
        loss_class: [`BlockLoss`] or a subclass with more sums.
        block_size (`int`): slots of a block.
        device: where the losses are.
    """

    def __init__(self, loss_class: type[BlockLoss], block_size: int, device: torch.device):
        self._total = loss_class.zeros(block_size, device)
        self._rows = torch.zeros(3, device=device)  # all, those without an anchor, mask tokens in answers
        self._start = time.perf_counter()

    def add(self, loss: BlockLoss, row_counts: torch.Tensor) -> None:
        """Adds a batch: its loss sums, and `row_counts` of its [`BlockBatch`]."""
        self._total = self._total + loss
        self._rows += row_counts

    def metrics(self, accelerator) -> dict[str, float]:
        """Ratios of the sums over all ranks, by name. `acceptance_slot_K` is the share of blocks that are right up to
        slot K. Without a supervised slot there are neither losses nor estimates."""
        total = type(self._total)(**accelerator.reduce(vars(self._total)))
        rows, without_anchor, masks = accelerator.reduce(self._rows).tolist()
        metrics = {"rows_without_anchor": without_anchor / max(rows, 1)}
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
