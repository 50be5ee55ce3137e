"""What a run logs between two log lines: sums of block losses over batches and ranks."""

import time

import torch

from .dflash import BlockLoss


class LogWindow:
    """Sums of block losses since the last log, how many rows had no anchor, how often answers held the mask token."""

    def __init__(self, loss_class: type[BlockLoss], block_size: int, device: torch.device):
        self._total = loss_class.zeros(block_size, device)
        self._rows = torch.zeros(3, device=device)  # all, those without an anchor, mask tokens in answers
        self._start = time.perf_counter()

    def add(self, loss: BlockLoss) -> None:
        self._total = self._total + loss

    def count_rows(self, batch: dict[str, torch.Tensor], mask_token_id: int) -> None:
        keep = batch["block_keep_mask"]
        masks = (batch["input_ids"] == mask_token_id) & batch["loss_mask"].bool()
        counts = torch.stack([torch.tensor(len(keep)), (~keep.any(-1)).sum().cpu(), masks.sum().cpu()])
        self._rows += counts.to(self._rows.device)

    def metrics(self, accelerator) -> dict[str, float]:
        """Ratios of the sums over all ranks; a slot's acceptance counts it and every slot before it as right."""
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
