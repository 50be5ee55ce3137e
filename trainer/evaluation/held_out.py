"""How [`DraftTrainer`] evaluates: the loss over held-out rows, and real decoding of their prompts."""

import math

import torch
from accelerate.utils import broadcast_object_list
from datasets import IterableDataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers.utils import logging

from ..objectives.log_window import LogWindow
from .decoding import evaluate_decoding, held_out_prompts, promises_too_much

logger = logging.get_logger(__name__)

EVALUATION_STEP = -1  # evaluation draws the same anchors at every step
HELD_OUT = "held-out prompts"  # what a card calls an evaluation set without a name


class HeldOutEvaluation:
    """The evaluation part of [`~transformers.Trainer`], for drafts."""

    _decoded: tuple[int, dict[str, dict]] = (-1, {})  # the step of the last evaluation, and what each set gave

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """
        Loss, token accuracy and estimated acceptance over the evaluation rows, and tau from real decoding of
        `args.eval_decode_prompts` of their prompts on the main process. Several data sets, by name, are evaluated in
        turn; of a stream the first prompts are decoded.
        """
        self._decoded = (self.state.global_step, {})
        own = eval_dataset is None
        dataset = self.eval_dataset if own else eval_dataset
        if not isinstance(dataset, dict):
            return self._evaluate_set(dataset, self.get_eval_dataloader(eval_dataset), HELD_OUT, metric_key_prefix)
        metrics = {}
        for name, rows in dataset.items():
            loader = self.get_eval_dataloader(name if own else rows)
            metrics |= self._evaluate_set(rows, loader, name, f"{metric_key_prefix}_{name}")
        return metrics

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """
        The base class's, which keeps its workers between evaluations for `self.eval_dataset` and each set of it alone.
        No rank is given rows twice to have as many batches as the others, except where a sharded model makes all ranks
        wait for each other in every forward.
        """
        own = eval_dataset is None or isinstance(eval_dataset, str)
        even_batches = self.accelerator.even_batches
        self.accelerator.even_batches = even_batches and self.sharded
        try:
            # The base class keeps one loader for all that have no name, whatever rows are given.
            return super().get_eval_dataloader(eval_dataset) if own else super().get_test_dataloader(eval_dataset)
        finally:
            self.accelerator.even_batches = even_batches

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix: str = "test"):
        """Refused with a `ValueError`: what a draft predicts depends on where its blocks stand."""
        raise ValueError(
            "`predict` is not for drafts, which predict blocks of a row and not its labels: use `evaluate`."
        )

    def _evaluate_set(self, dataset, loader: DataLoader, set_name: str, metric_key_prefix: str) -> dict[str, float]:
        training = self.model.training
        window = LogWindow(self.loss_class, self.draft_config.block_size, self.args.device)
        self.model.eval()
        with torch.no_grad():
            for batch in tqdm(loader, desc="Evaluating", disable=self.args.disable_tqdm):
                self.place_blocks(batch, EVALUATION_STEP)
                window.count_rows(batch, self.draft_config.mask_token_id)
                with self.accelerator.autocast():
                    window.add(self.block_loss(self.model, self._prepare_inputs(batch)))
        metrics = window.metrics(self.accelerator)
        if self.args.eval_decode_prompts:
            metrics |= self._decoding_metrics(dataset, set_name)
            if promises_too_much(metrics.get("estimated_tau", 1.0), metrics.get("tau", math.inf)):
                logger.warning(
                    f"The rows promise a tau of {metrics['estimated_tau']:.2f}, real decoding gives "
                    f"{metrics['tau']:.2f}: they are not the target's own answers, or leak into training, or target, "
                    "tokenizer or layer ids differ from those of the features. `blockdraft doctor` looks for more."
                )
        self.model.train(training)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _decoding_metrics(self, dataset, set_name: str) -> dict[str, float]:
        """Measured on the main process, known to all."""
        metrics, count = {}, self.args.eval_decode_prompts
        if self.accelerator.is_main_process:
            rows = list(dataset.take(count)) if isinstance(dataset, IterableDataset) else dataset
            report = evaluate_decoding(
                self.target,
                self.draft,
                held_out_prompts(rows, count),
                max_new_tokens=self.args.eval_max_new_tokens,
                compare_with_plain=False,
                disable_tqdm=self.args.disable_tqdm,
            )
            metrics = {name: value for name, value in report.metrics().items() if not math.isnan(value)}
            self._decoded[1][set_name] = report.headline()
        return broadcast_object_list([metrics])[0]
