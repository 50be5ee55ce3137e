"""Runs that end as if their process had been killed."""

from transformers import TrainerCallback

STEPS = 6
SETTINGS = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
SETTINGS |= {"learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2}


class Killed(BaseException):
    """What no handler of errors catches, like the end of the process."""


class KillAfter(TrainerCallback):
    """In the middle of the step after this one, which is the last that is saved."""

    def __init__(self, step: int):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed
