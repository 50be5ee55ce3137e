"""The part of the drafts' Trainer that knows what shares out a training over processes: DDP, FSDP2, DeepSpeed."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import has_length

from .evaluation.decoding import served_dtype
from .muon import MuonAndOther, hidden_matrices
from .saving_trainer import SavingTrainer
from .sharding import check_fsdp, keep_precision, prepare_sharding, whole_copy, without_weights
from .training_args import ADAMW


class EngineTrainer(SavingTrainer):
    """
    [`SavingTrainer`] of a draft whose weights may be sharded (FSDP2, ZeRO-3), and of its `target`, which no engine
    wraps. Raises a `ValueError` for a way of sharding that cannot be.
    """

    target: PreTrainedModel

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._empty_draft: nn.Module | None = None  # of a sharded one
        if self.is_fsdp_enabled:
            check_fsdp(self.accelerator.state.fsdp_plugin)
            keep_precision(self.accelerator.state.fsdp_plugin)
        elif self.args.fsdp:
            raise ValueError(
                f"`fsdp`: accelerate shards on GPUs and other accelerators, not on {self.args.device.type}. Leave it "
                "out: every process then holds the whole draft."
            )

    @property
    def sharded(self) -> bool:
        """Whether weights of the draft are whole only while their module runs, on all ranks at once."""
        return self.is_fsdp_enabled or is_deepspeed_zero3_enabled() or self.is_distributed_loading_by_transformers

    @property
    def takes_muon(self) -> bool:
        """Whether weight matrices are trained with Muon, which needs them one by one."""
        if self._given_optimizer or self.adapter is not None or self.is_deepspeed_enabled:
            return False
        if self.optimizer_cls_and_kwargs is None:
            return self.args.muon and self.args.optim in ADAMW
        return self.args.muon and self.optimizer_cls_and_kwargs[0] is torch.optim.AdamW

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The one that `args.optim` names, with Muon for the weight matrices beside AdamW."""
        optimizer = super().create_optimizer(model)
        if self.takes_muon and type(optimizer) is torch.optim.AdamW and (matrices := hidden_matrices(self.draft)):
            self.optimizer = MuonAndOther(optimizer, matrices)
        return self.optimizer

    def _prepare_for_training(self, *args, **kwargs):
        if self.sharded and self._empty_draft is None:
            self._empty_draft = without_weights(self.draft).to(self.target.dtype)
        if self.is_fsdp_enabled:
            prepare_sharding(self.draft, self.accelerator)
        return super()._prepare_for_training(*args, **kwargs)

    @contextmanager
    def served_draft(self) -> Iterator[PreTrainedModel]:
        """The draft as it will be served: in its target's dtype, and whole on every rank. All ranks come here."""
        if self._empty_draft is not None:
            yield whole_copy(self._empty_draft, self.draft)
            return
        with served_dtype(self.draft, self.target.dtype):
            yield self.draft

    def waited_for(self, loader: DataLoader) -> int:
        """In how many batches more than this rank has it has to take part, since others wait for its part of the
        weights in every forward. Of a stream all ranks have as many."""
        if not self.sharded or not has_length(loader):
            return 0
        batches = self.accelerator.gather(torch.tensor([len(loader)], device=self.args.device))
        return int(batches.max()) - len(loader)
