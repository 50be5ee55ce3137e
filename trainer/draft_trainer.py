"""The Trainer of block-parallel drafts: frozen target, random anchors, block loss, real decoding as evaluation."""

import math
import os
from collections.abc import Mapping
from functools import partial

import torch
from datasets import IterableDataset
from peft import LoraConfig, PeftModel
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PrinterCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import ModelOutput, logging

from ..modeling.target.embedding_and_head import has_layers
from ..modeling.target.pairing import check_pair
from ..modeling.target.target_identity import target_record
from ..modeling.target.target_transforms import check_head, transform_faults
from .adapters import adapt, base_draft, check_adapter
from .block_batch import BlockBatch, build_block_batch
from .data.dataset import DraftCollator, check_rows
from .evaluation.decoding import evaluate_decoding, held_out_prompts, promises_too_much
from .evaluation.decoding_report import DecodingReport
from .objectives.dflash import BlockLoss, dflash_loss
from .sharding import check_placement, check_whole
from .skipping_trainer import SkippingTrainer
from .target_states import check_row_lengths
from .training_args import DraftTrainingArguments
from .training_log import LogWindow, TrainingLog
from .trial import noted, try_ending

logger = logging.get_logger(__name__)

# Arguments of Trainer for a loss and metrics of labels.
NOT_TAKEN = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")
EVALUATION_STEP = -1  # evaluation draws the same anchors at every step
HELD_OUT = "held-out prompts"  # what a card calls an evaluation set without a name


class DraftTrainer(SkippingTrainer):
    """
    Trains a block-parallel draft against a frozen target, with DFlash's objectives (arXiv 2602.06036).

    A batch holds `input_ids`, `attention_mask`, `loss_mask` `[B, S]` and `row_id` `[B]`, for packed rows (see
    [`~blockdraft.trainer.data.packing.pack_rows`]) `document_ids` `[B, S]` and `document_row_ids` `[B, D]` too. A
    `datasets.IterableDataset` trains for `args.max_steps` and starts again at its end. Anchors and prefix lengths are
    drawn from (seed, global step, row id) unless the batch holds `anchor_positions`, `block_keep_mask` and
    `prefix_lengths` `[B, N]`; a row without an id is named by its content. The loss of an accumulation window is the
    weighted mean over its blocks on all ranks.

    A trainer of another method is a subclass that sets `objectives`, `slot_layout` and `loss_class` and overrides
    `prepare_draft`, `objective_settings`, `needs_head_input` and `block_loss`.

    Args:
        model ([`DraftPreTrainedModel`]): the draft.
        target (`PreTrainedModel`): the target, also with a PEFT adapter. It is put into evaluation mode, its
            parameters lose their gradients, and it is never part of the model, of a checkpoint or of the optimizer.
        args ([`DraftTrainingArguments`]).
        target_revision (`str`, *optional*): commit or branch the target was loaded at, recorded in the draft's config.
        peft_config ([`~peft.LoraConfig`], *optional*): trains and saves an adapter instead of the draft, see
            [`adapt`]. A `PeftModel` as `model` does the same.
        answers (`str`, *optional*): whose answers the rows hold, recorded in the draft's config.
        data_settings (`dict`, *optional*): how the rows were made, such as `max_length`, recorded there too.
        kwargs: those of [`~transformers.Trainer`] but `compute_loss_func`, `compute_metrics` and
            `preprocess_logits_for_metrics`; `processing_class` is the target's tokenizer.

    Raises:
        ValueError: if draft and target do not fit, or an argument or setting cannot be used.
    """

    objectives = ("fixed_anchor", "variable_prefix")
    slot_layout = "1+N"
    loss_class: type[BlockLoss] = BlockLoss
    ddp_find_unused_parameters: bool | None = None  # unless the arguments say it; `None`: the base class decides

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel,
        args: DraftTrainingArguments | None = None,
        *,
        target_revision: str | None = None,
        peft_config: LoraConfig | None = None,
        answers: str | None = None,
        data_settings: Mapping | None = None,
        **kwargs,
    ):
        if not isinstance(args, DraftTrainingArguments):
            given = "missing" if args is None else f"a {type(args).__name__}"
            raise ValueError(
                f"`args` is {given}: give `blockdraft.DraftTrainingArguments(output_dir=...)`, which takes all that "
                "TrainingArguments takes, and the settings of drafts."
            )
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = self.ddp_find_unused_parameters
        if given := [name for name in NOT_TAKEN if kwargs.get(name) is not None]:
            raise ValueError(
                f"`{'`, `'.join(given)}`: not for drafts, whose loss and metrics are those of their blocks. Leave it "
                "out, or override `block_loss` or `evaluate`."
            )
        if peft_config is not None:
            model = adapt(model, peft_config)
        elif isinstance(model, PeftModel):
            check_adapter(model)
        check_whole(target=target, draft=model)
        check_placement(target, args.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        check_pair(target, base_draft(model), kwargs.get("processing_class"))
        if kwargs.get("data_collator") is None:
            kwargs["data_collator"] = DraftCollator(pad_token_id=target.config.get_text_config().pad_token_id or 0)
            for name in ("train_dataset", "eval_dataset"):
                check_rows(kwargs.get(name), name)
        if isinstance(kwargs.get("train_dataset"), IterableDataset):
            # Without an end no rank runs out before another, and resuming reads past the same rows.
            kwargs["train_dataset"] = kwargs["train_dataset"].repeat(None)
            if args.accelerator_config.dispatch_batches is None:
                args.accelerator_config.dispatch_batches = False  # batches of different widths cannot be dispatched
        super().__init__(model=model, args=args, answers=answers, data_settings=data_settings, **kwargs)
        self.remove_callback(PrinterCallback if args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
        self.add_callback(TrainingLog)
        self.loss_is_scaled_for_ga = True
        self._row_order = torch.Generator()

        # PEFT's wrapper goes, its layers stay in the model.
        target = target.get_base_model() if isinstance(target, PeftModel) else target
        self.target = target.eval().requires_grad_(False)
        # What wraps and places the draft, FSDP or DeepSpeed, leaves the target where it is.
        if getattr(target, "hf_device_map", None) is None:
            self.target.to(args.device)
        self.check_features_settings()
        for fault in transform_faults(self.target, self.draft_config) if has_layers(target) else ():
            logger.warning(fault)
        check_head(self.target, self.draft, self.args.device)
        check_row_lengths(self.target, [self.train_dataset, *self.evaluation_sets])

        if self.draft_config.slot_layout != self.slot_layout:
            raise ValueError(
                f"{type(self).__name__} trains drafts with `slot_layout` {self.slot_layout!r}, not "
                f'{self.draft_config.slot_layout!r}: take DraftTrainer for "1+N", DSparkTrainer for "N".'
            )
        self.gamma = args.gamma(self.draft_config.block_size)
        self.loss_type = args.loss_type or self.objectives[0]
        if self.loss_type not in self.objectives:
            raise ValueError(
                f"`loss_type` is {self.loss_type!r}: a {self.draft_config.model_type} draft trains with "
                f"{' or '.join(self.objectives)}."
            )
        if unused := args.unused_settings(self.loss_type):
            logger.warning(f"The objective {self.loss_type} does not use {', '.join(unused)}.")
        for name, reason in args.without_effect(self.is_deepspeed_enabled).items():
            logger.warning(f"`{name}` has no effect: {reason}.")
        self.prepare_draft()
        self.draft_config.target = target_record(target, self.processing_class, target_revision)
        self.draft_config.objective = {
            "loss_type": self.loss_type,
            "loss_decay_gamma": self.gamma,
            "num_anchors": args.num_anchors,
        } | self.objective_settings()
        if args.features and not args.cache_features:
            self.read_features()
        self._window = self._new_window()
        if self.adapter is not None and args.activation_checkpointing:
            self.draft.enable_input_require_grads()

    def train(self, *args, **kwargs):
        """The base class's; tries before the first step what the run needs at its end, see [`try_ending`]."""
        try_ending(self)
        return super().train(*args, **kwargs)

    # ---- the objective ------------------------------------------------------------------------------------------

    def prepare_draft(self) -> None:
        """What an objective has to check or set before training."""
        if not self.draft_config.is_causal and self.draft_config.sliding_window is None:
            logger.warning(
                "The draft is bidirectional (`is_causal=False`), without positions or a `sliding_window`: its masked "
                "slots cannot tell themselves apart and all predict the same distribution. Set `is_causal=True`."
            )

    def objective_settings(self) -> dict:
        """What the draft's configuration records about the objective, beside its name, decay and anchors."""
        if self.loss_type == "variable_prefix":
            return {"prefix_weight_base": self.args.prefix_weight_base}
        return {}

    def block_loss(self, output: ModelOutput, blocks: BlockBatch, head_input: torch.Tensor | None) -> BlockLoss:
        """The loss sums of a batch, from the output of the draft's forward over `blocks` and, if `needs_head_input`,
        what the target's LM head reads, `[B, S, hidden_size]`."""
        compute_logits = partial(self.draft.compute_logits, lm_head=self.target.get_output_embeddings())
        return dflash_loss(output.last_hidden_state, compute_logits, blocks.targets, self.args.loss_chunk_size)

    # ---- rows ---------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset=None) -> torch.utils.data.Sampler | None:
        """The base class's; with `group_by_length` an epoch's order depends on its seed, its number and the rows of a
        step alone, and not on how many ranks share these out, or on what was drawn before."""
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator, sampler.batch_size = self._row_order, self.get_total_train_batch_size(self.args)
        return sampler

    def _run_epoch(self, *, epoch: int, **kwargs) -> None:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._row_order.manual_seed(seed + epoch)
        super()._run_epoch(epoch=epoch, **kwargs)

    # ---- one step -----------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator, num_batches: int, device: torch.device) -> tuple[list, torch.Tensor]:
        """The batches of an accumulation window, each with its [`BlockBatch`] as `blocks`, and their loss weight on
        all ranks, `[]` float32."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, self.place_window(batches)

    def place_window(self, batches: list[dict]) -> torch.Tensor:
        """Gives each batch of a window its `blocks`; returns their loss weight on all ranks, `[]` float32."""
        for batch in batches:
            batch["blocks"] = self.place_blocks(batch, self.state.global_step)
        weights = [batch["blocks"].targets.weights.sum() for batch in batches]
        total = torch.stack(weights).sum() if weights else torch.zeros(())
        return self.accelerator.gather(total.to(self.args.device)).sum()

    def place_blocks(self, batch: dict[str, torch.Tensor], step: int) -> BlockBatch:
        """The blocks of a batch at a global step, on the CPU, see [`build_block_batch`]."""
        args = self.args
        settings = {"seed": args.seed, "num_anchors": args.num_anchors, "gamma": self.gamma, "device": args.device}
        base = args.prefix_weight_base if self.loss_type == "variable_prefix" else None
        return build_block_batch(batch, self.draft, step=step, prefix_weight_base=base, **settings)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, BlockLoss]:
        """
        A batch's share of the loss of its accumulation window. One forward of the frozen target, without gradient,
        gives the features that the draft reads; one forward of the draft predicts all blocks.

        Args:
            model (`nn.Module`): the draft, as it is wrapped for training or not.
            inputs (`dict`): a batch, see the class, on the draft's device. Blocks that are not placed yet (`blocks`, a
                [`BlockBatch`]) are placed: where they belong at this global step in training, where every evaluation
                has them in evaluation mode.
            return_outputs (`bool`): return the sums of the batch too.
            num_items_in_batch (`[]` float32, *optional*): weight of the window on all ranks, of
                [`~DraftTrainer.get_batch_samples`]. Default: the weight of this batch alone.

        Returns:
            The loss, `[]` float32: the batch's weighted sum over `num_items_in_batch`, times the number of ranks, over
            which gradients are averaged. With `return_outputs` also the [`BlockLoss`], which is detached but for
            `loss_sum`.

        Raises:
            ValueError: if anchors have to be drawn and the batch has no `row_id`, if the rows are packed and the
                target mixes their documents, or if a batch that comes with the target's states places its blocks.
        """
        training = self.model.training
        step = self.state.global_step if training else EVALUATION_STEP
        blocks = (inputs.get("blocks") or self.place_blocks(inputs, step)).to(self.args.device)
        with self.accelerator.autocast():  # the target's forward and the head too; Trainer's is the draft's alone
            features, *head_input = self.target_states(inputs)
            if "skipped_rows" in inputs:
                features = features.masked_fill(inputs["skipped_rows"][:, None, None], 0)
            output = self.run_draft(model, blocks, features)
            sums = self.block_loss(output, blocks, head_input[0] if self.needs_head_input else None)
        if training:
            self._window.add(sums, blocks.row_counts)
        weight = sums.weight if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over ranks, the weight is summed over them.
        ranks = 1 if num_items_in_batch is None else self.accelerator.num_processes
        loss = sums.loss_sum / (weight + 1e-6) * ranks
        return (loss, sums) if return_outputs else loss

    def run_draft(self, model: nn.Module, blocks: BlockBatch, features: torch.Tensor) -> ModelOutput:
        """The draft's forward over all blocks of a batch, given the features `[B, S, F * hidden_size]`."""
        with torch.no_grad():
            noise_embeds = self.draft.embed_block(blocks.input_ids, self.target.get_input_embeddings())
        return model(
            noise_embeds=noise_embeds,
            context_hidden_states=features,
            block_plan=blocks.plan,
            position_ids=blocks.position_ids,
        )

    # ---- evaluation and logs ------------------------------------------------------------------------------------

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """
        Loss, token accuracy and estimated acceptance over the evaluation rows, and tau from real decoding of
        `args.eval_decode_prompts` of their prompts, which the ranks share out; by name, the same on every rank.

        Args:
            eval_dataset (*optional*): rows, or several sets of rows by name, which are evaluated in turn. Of a stream
                the first prompts are decoded. Default: `self.eval_dataset`.
            metric_key_prefix (`str`): of the metrics; a set's name follows it. (`ignore_keys` is not used.)
        """
        own = eval_dataset is None
        dataset = self.eval_dataset if own else eval_dataset
        named = isinstance(dataset, dict)
        metrics, headlines = {}, {}
        for name, rows in dataset.items() if named else [(HELD_OUT, dataset)]:
            prefix = f"{metric_key_prefix}_{name}" if named else metric_key_prefix
            own_name = name if named else None  # what the base class keeps a loader under
            found = self._block_metrics(self.get_eval_dataloader(own_name if own else rows))
            if self.args.eval_decode_prompts:
                with noted("`--eval_decode_prompts 0` evaluates without decoding."):
                    report = self.decode(rows, compare_with_plain=False, disable_tqdm=self.args.disable_tqdm or None)
                found |= {key: value for key, value in report.metrics().items() if not math.isnan(value)}
                headlines[name] = report.headline()
            if promises_too_much(found.get("estimated_tau", 1.0), found.get("tau", math.inf)):
                logger.warning(
                    f"By its rows the draft should reach a tau of {found['estimated_tau']:.2f}; real decoding gives "
                    f"{found['tau']:.2f}. Either the rows are not the target's own answers, or they leak into "
                    "training, or target, tokenizer or layer ids differ from those of the features. `blockdraft "
                    "doctor` looks for more."
                )
            found = {f"{prefix}_{key}": value for key, value in found.items()}
            self.log(found)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
            metrics |= found
        if headlines:
            self.record_decoding(headlines)
        return metrics

    def _block_metrics(self, loader: DataLoader) -> dict[str, float]:
        """The metrics of the loss over evaluation rows, summed over ranks."""
        training, window = self.model.training, self._new_window()
        self.model.eval()
        with torch.no_grad():
            waited_for = self.waited_for(loader)
            for batch in tqdm(loader, desc="Evaluating", disable=self.args.disable_tqdm or None, leave=False):
                batch["blocks"] = self.place_blocks(batch, EVALUATION_STEP)
                _, sums = self.compute_loss(self.model, self._prepare_inputs(batch), return_outputs=True)
                window.add(sums, batch["blocks"].row_counts)
            if waited_for:
                # Others wait for this rank's part of the weights in every forward.
                row = self._prepare_inputs(self.data_collator([loader.dataset[0]]))
                row["loss_mask"] = torch.zeros_like(row["loss_mask"])
                for _ in range(waited_for):
                    self.compute_loss(self.model, row)
        self.model.train(training)
        return window.metrics(self.accelerator)

    def decode(self, rows, **settings) -> DecodingReport:
        """
        Decodes `args.eval_decode_prompts` prompts of evaluation rows with the draft as it will be served. All ranks
        have to come here: they share out the prompts, and each gets the whole report. `settings` are those of
        [`evaluate_decoding`].
        """
        settings = {"max_new_tokens": self.args.eval_max_new_tokens, "over_ranks": True} | settings
        with self.served_draft() as draft:
            return evaluate_decoding(self.target, draft, self.decoding_prompts(rows), **settings)

    def decoding_prompts(self, rows) -> list[list[int]]:
        """The prompts of evaluation rows that are decoded, see [`held_out_prompts`]; of a stream the first ones."""
        count = self.args.eval_decode_prompts
        return held_out_prompts(list(rows.take(count)) if isinstance(rows, IterableDataset) else rows, count)

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        """
        The base class's, which keeps its workers between evaluations for `self.eval_dataset` and each set of it alone.
        No rank is given rows twice to have as many batches as the others.
        """
        own = eval_dataset is None or isinstance(eval_dataset, str)
        even_batches = self.accelerator.even_batches
        self.accelerator.even_batches = False
        try:
            # The base class keeps one loader for all that have no name, whatever rows are given.
            return super().get_eval_dataloader(eval_dataset) if own else super().get_test_dataloader(eval_dataset)
        finally:
            self.accelerator.even_batches = even_batches

    def predict(self, test_dataset, ignore_keys=None, metric_key_prefix: str = "test"):
        """Refused with a `ValueError`: what a draft predicts depends on where its blocks are."""
        raise ValueError(
            "`predict` is not for drafts, which predict blocks of a row and not its labels: use `evaluate`."
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds accuracy, estimated tau, acceptance by slot, supervised tokens a second and rows without an anchor."""
        if "loss" in logs:
            logs = self._window.metrics(self.accelerator) | logs  # the loss stays the Trainer's own, a mean over steps
            if "mask_tokens_in_answers" in logs:
                logger.warning_once(
                    f"The answers hold `mask_token_id` {self.draft_config.mask_token_id}: there a draft cannot tell a "
                    "known token from a masked slot. `propose_mask_token_ids(tokenizer, vocab_size, rows)` lists "
                    "better ones."
                )
            self._window = self._new_window()
        super().log(logs, start_time)

    def _new_window(self) -> LogWindow:
        return LogWindow(self.loss_class, self.draft_config.block_size, self.args.device)
