"""Ctrl-C during training: finish the step, save it, stop."""

import signal

from transformers import TrainerCallback
from transformers.utils import logging

logger = logging.get_logger(__name__)


class SaveOnInterrupt(TrainerCallback):
    """
    The first Ctrl-C ends training after the running step with a checkpoint, and then raises `KeyboardInterrupt`; a
    second one interrupts at once, and training can go on from the last complete checkpoint.
    """

    def __init__(self):
        self._interrupted = False
        self._previous = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._interrupted = False
        self._previous = signal.signal(signal.SIGINT, self._remember)

    def _remember(self, signum, frame):
        self._interrupted = True
        signal.signal(signal.SIGINT, self._previous)
        logger.warning("Interrupted: saving a checkpoint after this step. Press Ctrl-C again to stop at once.")

    def on_step_end(self, args, state, control, **kwargs):
        if self._interrupted:
            control.should_save = control.should_training_stop = True
        return control

    def on_train_end(self, args, state, control, **kwargs):
        signal.signal(signal.SIGINT, self._previous)
        if self._interrupted:
            raise KeyboardInterrupt(f"stopped after step {state.global_step}, which is saved in {args.output_dir}")
