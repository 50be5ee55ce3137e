"""Training runs that push to a small Hub on loopback."""

import torch
from draft_trainers import weights
from safetensors.torch import load
from transformers import TrainerCallback

REPO = "user/draft"
EVERY_SAVE = {
    "max_steps": 3,
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 1,
    "push_to_hub": True,
    "hub_model_id": REPO,
}


class WaitForPush(TrainerCallback):
    """Waits for each push before the next step, and calls `then` with its number."""

    def __init__(self, trainer, then=lambda step: None):
        self.trainer, self.then = trainer, then

    def on_save(self, args, state, control, **kwargs):
        self.trainer.publisher.wait()
        self.then(state.global_step)


def pushed_weights(hub, revision="main", folder=""):
    return load(hub.repos[REPO].tree(revision)[f"{folder}model.safetensors"].content)


def assert_on_the_hub(hub, trainer, revision="main", folder=""):
    torch.testing.assert_close(pushed_weights(hub, revision, folder), weights(trainer), rtol=0, atol=0)
