"""Ctrl-C during training: finish the step, save it, stop."""

import signal

from transformers import TrainerCallback
from transformers.utils import logging

logger = logging.get_logger(__name__)


class SaveOnInterrupt(TrainerCallback):
    """
    The first Ctrl-C ends training after the current step with a checkpoint, and then raises `KeyboardInterrupt`; a
    second one interrupts at once, and training can be resumed from the last complete checkpoint.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        self._interrupted = False
        self._previous = signal.signal(signal.SIGINT, self._remember)
        self._saved = state.global_step

    def _remember(self, signum, frame):
        self._interrupted = True
        signal.signal(signal.SIGINT, self._previous)
        logger.warning("Interrupted: saving a checkpoint after this step. Press Ctrl-C again to stop at once.")

    def on_step_end(self, args, state, control, **kwargs):
        if self._interrupted and state.global_step != self._saved:
            control.should_save = control.should_training_stop = True

    # With `save_strategy="best"` an evaluation decides again whether its step is saved, and Ctrl-C may come during it.
    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        self._saved = state.global_step
        if self._interrupted:
            control.should_training_stop = True
            # With `save_total_limit=1`, `train` would delete this checkpoint at its end and keep the best one.
            state.best_model_checkpoint = None

    def on_train_end(self, args, state, control, **kwargs):
        signal.signal(signal.SIGINT, self._previous)
        if self._interrupted:
            raise KeyboardInterrupt(
                f"after step {state.global_step}, and step {self._saved} is saved in {args.output_dir}"
            )
