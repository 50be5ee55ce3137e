"""Ctrl-C, or a scheduler's signal, during training: finish the step, save it, stop."""

import signal

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Ctrl-C, and by what schedulers (Slurm, Kubernetes) announce that they will end a job.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class SaveOnInterrupt(TrainerCallback):
    """
    Ctrl-C, SIGTERM or SIGUSR1 ends training after the current step with a checkpoint, and then raises
    `KeyboardInterrupt`. It is enough that one of several ranks gets it: they agree at the end of each step, so that
    all save the same one and leave together.

    A second Ctrl-C interrupts at once, and training can be resumed from the last complete checkpoint. Another SIGTERM
    or SIGUSR1 changes nothing: a scheduler may send it to a launcher, which passes it on, and to its processes too.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        self._received = self._interrupted = False
        self._previous = {number: signal.signal(number, self._remember) for number in SIGNALS}
        self._saved = state.global_step

    def _remember(self, signum, frame):
        if not self._received:
            logger.warning(f"Interrupted ({signal.Signals(signum).name}): saving a checkpoint after this step.")
        self._received = True
        if signum == signal.SIGINT:
            signal.signal(signum, self._previous[signum])
            logger.warning("Press Ctrl-C again to stop at once.")

    def _is_interrupted(self, args) -> bool:
        """Whether any rank got a signal. All ranks ask at the same points of training, and get the same answer."""
        if args.world_size == 1:
            return self._received
        if not self._interrupted:
            self._interrupted = bool(reduce(torch.tensor(float(self._received), device=args.device), "sum"))
        return self._interrupted

    def on_step_end(self, args, state, control, **kwargs):
        if self._is_interrupted(args) and state.global_step != self._saved:
            control.should_save = control.should_training_stop = True

    # With `save_strategy="best"` an evaluation decides again whether its step is saved; a signal may come during it.
    on_epoch_end = on_step_end

    def on_save(self, args, state, control, **kwargs):
        self._saved = state.global_step
        if self._is_interrupted(args):
            control.should_training_stop = True
            # With `save_total_limit=1`, `train` would delete this checkpoint at its end and keep the best one.
            state.best_model_checkpoint = None

    def on_train_end(self, args, state, control, **kwargs):
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._is_interrupted(args):
            raise KeyboardInterrupt(
                f"after step {state.global_step}, and step {self._saved} is saved in {args.output_dir}"
            )
