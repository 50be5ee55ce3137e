"""The time budget of a chat target's training."""

import json
import math
import time
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, TrainerCallback

from .target_model import save_target

WARMUP = 0.02  # share of the time
SAVE_SECONDS = 480


class TimeBudget(TrainerCallback):
    """Ends training when the time is used up; until then shows what is left, and saves every eight minutes."""

    def __init__(self, max_minutes: float, tokenizer: PreTrainedTokenizerBase, checkpoint: str | None):
        self.max_seconds = max_minutes * 60
        self.tokenizer = tokenizer
        self.seconds = json.loads(Path(checkpoint, "budget.json").read_text())["seconds"] if checkpoint else 0.0

    def learning_rate_factor(self) -> float:
        """Linear warm-up, then a cosine to zero, over the share of the time that is used up."""
        used = min(self.seconds / self.max_seconds, 1.0)
        if used < WARMUP:
            return max(used / WARMUP, 0.01)
        return 0.5 * (1 + math.cos(math.pi * (used - WARMUP) / (1 - WARMUP)))

    def on_train_begin(self, args, state, control, **kwargs):
        left = self.max_seconds - self.seconds
        print(f"Training until {time.strftime('%H:%M', time.localtime(time.time() + left))}.", flush=True)
        self.first_step, self.first_seconds, self.started = state.global_step, self.seconds, time.monotonic()
        self.bar = tqdm(total=round(self.max_seconds), initial=round(self.seconds), unit="s", mininterval=30)

    def on_step_end(self, args, state, control, **kwargs):
        before, self.seconds = self.seconds, self.first_seconds + time.monotonic() - self.started
        self.bar.update(round(self.seconds) - round(before))
        control.should_training_stop = self.seconds >= self.max_seconds
        control.should_save = control.should_training_stop or self.seconds // SAVE_SECONDS > before // SAVE_SECONDS
        if state.global_step == self.first_step + 20:
            pace = 20 / (self.seconds - self.first_seconds)
            steps = state.global_step + pace * (self.max_seconds - self.seconds)
            epochs = state.epoch * steps / state.global_step
            print(f"{pace:.2f} steps/s: {steps:.0f} steps, {epochs:.1f} epochs in the time given.", flush=True)

    def on_save(self, args, state, control, model=None, **kwargs):
        budget = {"seconds": self.seconds, "steps": state.global_step, "epochs": state.epoch}
        Path(args.output_dir, f"checkpoint-{state.global_step}", "budget.json").write_text(json.dumps(budget))
        save_target(model, self.tokenizer, Path(args.output_dir, "latest"))

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()
