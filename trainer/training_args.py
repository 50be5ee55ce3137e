"""Training arguments of block-parallel drafts: our settings beside those of transformers."""

import os
from dataclasses import dataclass

from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy

from .training_settings import NOT_TAKEN, TrainingSettings

ADAMW = ("adamw_torch", "adamw_torch_fused")  # values of `optim` beside which Muon can stand


@dataclass
class DraftTrainingArguments(TrainingSettings, TrainingArguments):
    """[`~transformers.TrainingArguments`] with the settings and defaults of block-parallel training, see
    [`TrainingSettings`]. Raises a `ValueError` that names the setting if one cannot be."""

    def __post_init__(self):
        super().__post_init__()
        self.check_settings()
        for name, (off, reason) in NOT_TAKEN.items():
            if getattr(self, name) != off:
                raise ValueError(f"`{name}` is not for drafts: {reason}. Leave it out.")
        if (sizes := self.parallelism_config) and max(sizes.tp_size, sizes.cp_size, sizes.sp_size) > 1:
            raise ValueError(
                "`parallelism_config` splits tensors or rows over devices, and a draft's blocks read whole rows: "
                "leave out `tp_size`, `cp_size` and `sp_size`; FSDP and DeepSpeed share out the weights."
            )
        if self.hub_token is not None:
            raise ValueError(
                "`hub_token` is not accepted, it would end up in files and logs: log in with `hf auth login`, or set "
                "the environment variable HF_TOKEN."
            )
        if self.n_gpu > 1:
            raise ValueError(
                "Several GPUs in one process (DataParallel) are not supported. Start with `accelerate launch` or "
                "`torchrun`, or show one GPU with CUDA_VISIBLE_DEVICES=0."
            )

        # What the launcher of accelerate sets for several processes on CPUs, of which it starts one without MPI.
        several = {"ACCELERATE_DYNAMO_BACKEND", "MASTER_PORT"} <= os.environ.keys() and "RANK" not in os.environ
        if several and self.world_size == 1:
            raise ValueError(
                "accelerate was told of several processes and has started one, as it does for a configuration that "
                "says MULTI_CPU. Give that file to `blockdraft train --accelerate_config`, start with `torchrun`, "
                "or say MULTI_GPU in it, which starts processes on CPUs too. If one process is meant, unset "
                "MASTER_PORT."
            )

    def without_effect(self, by_deepspeed: bool) -> dict[str, str]:
        """Settings that change nothing in a run, whatever its objective, and why; `by_deepspeed`: what trains it."""
        found = {}
        if by_deepspeed and self.muon and self.optim in ADAMW:
            found["muon"] = "DeepSpeed flattens the matrices that Muon needs as they are, so AdamW trains them"
        if self.eval_steps is not None and self.eval_strategy != IntervalStrategy.STEPS:
            found["eval_steps"] = f'`eval_strategy` is "{self.eval_strategy.value}"'
        if self.activation_checkpointing_kwargs and not self.activation_checkpointing:
            found["activation_checkpointing_kwargs"] = "`activation_checkpointing` is off"
        if self.optim_target_modules and not self.optim.value.startswith(("galore", "apollo")):
            found["optim_target_modules"] = f"`optim` is {self.optim.value}, neither GaLore nor APOLLO"
        return found
