"""The Trainer of block-parallel drafts: frozen target, random anchors, block loss, real decoding as evaluation."""

import inspect
import os
import shutil
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import IterableDataset
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length, rotate_checkpoints
from transformers.utils import logging

from ..hub_cards.card import write_adapter_card, write_card
from ..modeling.draft.anchors import Anchors, legal_anchors, sample_anchors
from ..modeling.draft.block_targets import BlockTargets, build_block_inputs, build_block_targets
from ..modeling.draft.documents import document_positions, document_remaining
from ..modeling.draft.prefix_lengths import sample_prefix_lengths
from ..modeling.target.pairing import check_pair
from ..modeling.target.target_features import capture_features
from ..modeling.target.target_identity import target_record
from ..modeling.target.target_transforms import check_head, transform_faults
from .adapters import adapt, base_draft, check_adapter, check_resumable, describe, recipe, save_adapter
from .data.dataset import DraftCollator
from .data.feature_cache import FeatureCache
from .data.packing import Documents, check_documents_apart
from .evaluation.held_out import HeldOutEvaluation
from .hub import HubPushing
from .muon import MuonAndOther, hidden_matrices
from .objectives.dflash import BlockLoss, block_loss, slot_weights
from .objectives.log_window import LogWindow
from .training_args import DraftTrainingArguments

logger = logging.get_logger(__name__)

# Resuming looks for `checkpoint-N`: what lies in here was not finished.
UNFINISHED_CHECKPOINTS = "unfinished"
# Arguments of Trainer for a loss and metrics of labels.
NOT_TAKEN = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")


class DraftTrainer(HeldOutEvaluation, HubPushing, Trainer):
    """
    Trains a block-parallel draft against a frozen target.

    A batch holds `input_ids`, `attention_mask`, `loss_mask` `[B, S]` and `row_id` `[B]`, for packed rows (see
    [`~blockdraft.trainer.data.packing.pack_rows`]) `document_ids` `[B, S]` and `document_row_ids` too. A
    `datasets.IterableDataset` trains for `args.max_steps` and starts again at its end. Anchors and prefix lengths are
    drawn from (seed, global step, row id) unless the batch holds `anchor_positions`, `block_keep_mask` `[B, N]` and
    `prefix_lengths` `[B, N]`. The loss of an accumulation window is the weighted mean over all of its blocks on all
    ranks.

    The objective here is DFlash's; a subclass that has another one defines `objectives`, `slot_layout`, `loss_class`,
    `prepare_draft`, `objective_settings`, `legal_anchors`, `block_weights` and `block_loss`.

    Args:
        model ([`DraftPreTrainedModel`]): the draft.
        target (`PreTrainedModel`): the target, also with a PEFT adapter. It is put into evaluation mode, all its
            parameters, an adapter's too, lose their gradients, and it is never part of the model, of a checkpoint or
            of the optimizer.
        args ([`DraftTrainingArguments`]).
        target_revision (`str`, *optional*): commit or branch the target was loaded at, recorded in the draft's config.
        peft_config ([`~peft.LoraConfig`], *optional*): trains an adapter instead of the draft, see [`adapt`]; saved is
            the adapter alone. A `PeftModel` as `model` does the same.
        kwargs: those of [`~transformers.Trainer`] but `compute_loss_func`, `compute_metrics` and
            `preprocess_logits_for_metrics`; `processing_class` is the target's tokenizer.

    Raises:
        ValueError: if draft and target do not fit, `args.loss_type` is not an objective of this draft, or an argument
            or setting cannot be used.
    """

    objectives = ("fixed_anchor", "variable_prefix")
    slot_layout = "1+N"
    loss_class: type[BlockLoss] = BlockLoss

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel,
        args: DraftTrainingArguments,
        *,
        target_revision: str | None = None,
        peft_config: LoraConfig | None = None,
        **kwargs,
    ):
        if given := [name for name in NOT_TAKEN if kwargs.get(name) is not None]:
            raise ValueError(
                f"`{'`, `'.join(given)}`: not for drafts, whose loss and metrics are those of their blocks. Leave it "
                "out, or override `block_loss` or `evaluate`."
            )
        if peft_config is not None:
            model = adapt(model, peft_config)
        elif isinstance(model, PeftModel):
            check_adapter(model)
        check_pair(target, base_draft(model), kwargs.get("processing_class"))
        if kwargs.get("data_collator") is None:
            kwargs["data_collator"] = DraftCollator(pad_token_id=target.config.get_text_config().pad_token_id or 0)
        if isinstance(kwargs.get("train_dataset"), IterableDataset):
            # Without an end no rank runs out before another, and resuming reads past the same rows.
            kwargs["train_dataset"] = kwargs["train_dataset"].repeat(None)
            if args.accelerator_config.dispatch_batches is None:
                args.accelerator_config.dispatch_batches = False  # batches of different widths cannot be dispatched
        super().__init__(model=model, args=args, **kwargs)
        self.loss_is_scaled_for_ga = True
        self._saving = False
        self._row_order = torch.Generator()
        # PEFT's wrapper goes, its layers stay in the model.
        target = target.get_base_model() if isinstance(target, PeftModel) else target
        self.target = target.eval().requires_grad_(False)
        # What wraps and places the draft, FSDP or DeepSpeed, leaves the target where it is.
        if getattr(target, "hf_device_map", None) is None:
            self.target.to(args.device)
        if self.sharded and args.eval_decode_prompts:
            raise ValueError(
                f"`eval_decode_prompts` is {args.eval_decode_prompts}: one rank decodes, and would wait for ever for "
                "the others, as draft or target is sharded (FSDP, ZeRO-3). Set `eval_decode_prompts=0`, and measure "
                "the saved draft with `blockdraft evaluate`."
            )
        self.draft_config = self.draft.config
        for fault in transform_faults(self.target, self.draft_config):
            logger.warning(fault)
        check_head(self.target, self.draft, self.args.device)
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
        self.prepare_draft()
        self._target_takes = inspect.signature(target.get_decoder().forward).parameters
        self._documents_apart = False
        self.draft_config.target = target_record(target, self.processing_class, target_revision)
        self.draft_config.objective = {
            "loss_type": self.loss_type,
            "loss_decay_gamma": self.gamma,
            "num_anchors": args.num_anchors,
        } | self.objective_settings()
        self._window = LogWindow(self.loss_class, self.draft_config.block_size, self.args.device)
        self._features = FeatureCache(Path(args.output_dir)) if args.cache_features else None
        # By data set, `DecodingReport.headline()` of the final weights, for their card.
        self.card_metrics: dict[str, dict] | None = None
        self.data_record: dict = {}  # what the configuration's `training` says of the data
        if self.adapter is not None and args.activation_checkpointing:
            self.draft.enable_input_require_grads()

    @property
    def draft(self) -> PreTrainedModel:
        """The draft itself, with its adapter's layers in it where it has one."""
        return base_draft(self.accelerator.unwrap_model(self.model))

    @property
    def adapter(self) -> PeftModel | None:
        """The draft with its adapter, if an adapter is what is trained."""
        model = self.accelerator.unwrap_model(self.model)
        return model if isinstance(model, PeftModel) else None

    @property
    def sharded(self) -> bool:
        """Whether weights of draft or target are whole only while their module runs, on all ranks at once."""
        return (
            self.is_fsdp_enabled
            or is_deepspeed_zero3_enabled()
            or self.is_distributed_loading_by_transformers
            or self.target.is_distributed_loading_by_transformers
        )

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

    # ---- rows ---------------------------------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset=None) -> torch.utils.data.Sampler | None:
        """The base class's; with `group_by_length` an epoch's order depends on its seed and number alone, and not on
        what a resumed run, or another rank, has drawn before it."""
        sampler = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            sampler.generator = self._row_order
        return sampler

    def _run_epoch(self, *, epoch: int, **kwargs) -> None:
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self._row_order.manual_seed(seed + epoch)
        super()._run_epoch(epoch=epoch, **kwargs)

    # ---- one step -----------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The one that `args.optim` names, with Muon for the weight matrices beside AdamW."""
        given, sharded = self.optimizer is not None, self.is_fsdp_enabled or self.is_deepspeed_enabled
        optimizer = super().create_optimizer(model)
        # Muon needs whole matrices.
        takes_muon = self.args.muon and self.adapter is None and not given and not sharded
        if takes_muon and type(optimizer) is torch.optim.AdamW:
            self.optimizer = MuonAndOther(optimizer, hidden_matrices(self.draft))
        return self.optimizer

    def _get_num_items_in_batch(self, batch_samples: list[dict], device: torch.device) -> torch.Tensor:
        """Places the blocks of an accumulation window and sums their loss weights over micro-batches and ranks."""
        for batch in batch_samples:
            self.place_blocks(batch, self.state.global_step)
            self._window.count_rows(batch, self.draft_config.mask_token_id)
        weights = [self.block_weights(batch).sum() for batch in batch_samples]
        total = torch.stack(weights).sum().to(device) if weights else torch.zeros((), device=device)
        return self.accelerator.gather(total).sum()

    def place_blocks(self, batch: dict, step: int) -> None:
        """Adds `anchor_positions`, `block_keep_mask` and, for that objective, `prefix_lengths`, unless given."""
        if "row_id" not in batch:
            raise ValueError(
                "The batch has no `row_id`: anchors are drawn by it. Give every row of the dataset a stable id."
            )
        if "document_ids" in batch and "anchor_positions" not in batch:
            # Each document gets the blocks that it would get in a row of its own.
            documents = Documents(batch)
            self.place_blocks(documents.rows, step)
            batch.update(documents.placed())
            return
        args, block_size, row_ids = self.args, self.draft_config.block_size, batch["row_id"].tolist()
        if "anchor_positions" not in batch:
            legal = self.legal_anchors(batch["loss_mask"], batch["attention_mask"].sum(-1), self.remaining(batch))
            anchors = sample_anchors(legal, args.num_anchors, args.seed, step, row_ids)
            if anchors.keep.shape[1] == 0:
                # One padded block: the forward runs, every parameter gets a zero gradient, no rank waits for this one.
                anchors = Anchors(*(torch.nn.functional.pad(tensor, (0, 1)) for tensor in anchors))
            batch["anchor_positions"], batch["block_keep_mask"] = anchors
        if self.loss_type == "variable_prefix" and "prefix_lengths" not in batch:
            batch["prefix_lengths"] = sample_prefix_lengths(
                batch["block_keep_mask"], block_size, args.prefix_weight_base, args.seed, step, row_ids
            )

    def legal_anchors(
        self, loss_mask: torch.Tensor, lengths: torch.Tensor, remaining: torch.Tensor | None
    ) -> torch.Tensor:
        """`[B, S]` bool: where a block of this objective may stand."""
        return legal_anchors(loss_mask, self.draft_config.block_size, lengths, remaining)

    @staticmethod
    def remaining(batch: dict) -> torch.Tensor | None:
        """`[B, S]` tokens after each position in its document, where the rows are packed."""
        if "document_ids" not in batch:
            return None
        return document_remaining(batch["document_ids"], batch["attention_mask"].sum(-1))

    def block_weights(self, batch: dict) -> torch.Tensor:
        """`[B, N, block_size]` loss weights of a batch whose blocks are placed, known before any forward."""
        return slot_weights(self._block_targets(batch).mask, batch.get("prefix_lengths", 1), self.gamma)

    def _block_targets(self, batch: dict) -> BlockTargets:
        anchors = (batch["anchor_positions"], batch["block_keep_mask"])
        size, remaining = self.draft_config.block_size, self.remaining(batch)
        return build_block_targets(
            batch["input_ids"], batch["loss_mask"], *anchors, size, document_remaining=remaining
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ):
        """The batch's share of the window's weighted mean; `num_items_in_batch` is its weight on all ranks."""
        with self.accelerator.autocast():  # the target's forward and the head too; Trainer's is the draft's alone
            loss = self.block_loss(model, inputs)
        self._window.add(loss)
        weight = loss.weight if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over ranks, the weight is summed over them.
        ranks = 1 if num_items_in_batch is None else self.accelerator.num_processes
        value = loss.loss_sum / (weight + 1e-6) * ranks
        return (value, {}) if return_outputs else value

    def block_loss(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> BlockLoss:
        """The loss sums of a batch whose blocks are placed."""
        anchors = (inputs["anchor_positions"], inputs["block_keep_mask"])
        draft = self.draft
        config, prefix_lengths = self.draft_config, inputs.get("prefix_lengths", 1)
        head = self.target.get_output_embeddings()
        block_ids = build_block_inputs(
            inputs["input_ids"],
            *anchors,
            config.block_size,
            config.mask_token_id,
            prefix_lengths,
            self.remaining(inputs),
        )
        with torch.no_grad():
            noise_embeds = draft.embed_block(block_ids, self.target.get_input_embeddings())
        hidden_states = model(
            noise_embeds=noise_embeds,
            context_hidden_states=self.kept_states(inputs, lambda batch: (self.target_features(batch),))[0],
            anchor_positions=anchors[0],
            block_keep_mask=anchors[1],
            document_ids=inputs.get("document_ids"),
        ).last_hidden_state
        return block_loss(
            hidden_states,
            partial(draft.compute_logits, lm_head=head),
            self._block_targets(inputs),
            prefix_lengths,
            self.gamma,
            self.args.loss_chunk_size,
        )

    def kept_states(
        self, inputs: dict[str, torch.Tensor], compute: Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, ...]]
    ) -> tuple[torch.Tensor, ...]:
        """`compute(inputs)`; in training with `cache_features`, from disk where an earlier epoch has computed it."""
        if self._features is None or not self.model.training:
            return compute(inputs)
        return self._features.states(inputs, compute)

    @torch.no_grad()
    def target_features(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """`[B, S, features * hidden_size]`: one frozen forward, ended after the last layer that the draft reads."""
        self.check_packing(inputs)
        return self._read_features(inputs)

    def check_packing(self, inputs: dict[str, torch.Tensor]) -> None:
        """Refuses packed rows where the target mixes their documents; tried on the first that come."""
        if "document_ids" in inputs and not self._documents_apart:
            check_documents_apart(self.target, self._read_features, inputs)
            self._documents_apart = True

    def _read_features(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        config = self.draft_config
        with capture_features(
            self.target, config.target_layer_ids, config.capture_point, stop_after_last=True
        ) as capture:
            capture.run(**self.target_inputs(inputs))
            return capture.features(self.args.device)

    def target_inputs(self, inputs: dict[str, torch.Tensor]) -> dict:
        """What the target's forward gets for a batch."""
        if "document_ids" not in inputs:
            context = {"attention_mask": inputs["attention_mask"]}
        elif "document_ids" in self._target_takes:
            context = {"document_ids": inputs["document_ids"]}
        else:
            # Without an attention mask, transformers' own mask begins anew wherever the positions do.
            context = {"position_ids": document_positions(inputs["document_ids"])}
        return {"input_ids": inputs["input_ids"], "use_cache": False} | context

    # ---- logs ---------------------------------------------------------------------------------------------------

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
            self._window = LogWindow(self.loss_class, self.draft_config.block_size, self.args.device)
        super().log(logs, start_time)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial) -> str:
        run_dir = super()._get_output_dir(trial)
        return os.path.join(run_dir, UNFINISHED_CHECKPOINTS) if self._saving else run_dir

    def _save_checkpoint(self, model: nn.Module, trial) -> None:
        """A checkpoint appears under its name when it is complete."""
        run_dir, name = Path(self._get_output_dir(trial)), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staged, final = run_dir / UNFINISHED_CHECKPOINTS / name, run_dir / name
        best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        best_so_far = self.state.best_model_checkpoint
        self._saving = True
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:  # how the writers report a full disk
            shutil.rmtree(run_dir / UNFINISHED_CHECKPOINTS, ignore_errors=True)  # it may be what fills it
            raise OSError(f"{name} could not be saved ({error}); the checkpoints before it are complete.") from error
        finally:
            self._saving = False
        self.accelerator.wait_for_everyone()
        # Not every best step is one that is saved.
        self.state.best_model_checkpoint = str(best) if best == final or best.is_dir() else best_so_far
        if self.args.should_save:
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(staged, final)
            shutil.rmtree(run_dir / UNFINISHED_CHECKPOINTS)
            if self.args.push_to_hub:
                self._push_from_checkpoint(str(final))
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )
        self.accelerator.wait_for_everyone()  # all ranks load the best one, which may be this one

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Weights, configuration with provenance, code, tokenizer and card, or an adapter and its card; no pickled
        arguments."""
        directory = Path(output_dir or self.args.output_dir)
        self.draft_config.training = self._provenance()
        if self.adapter is not None:
            if self.args.should_save:
                save_adapter(directory, self.adapter, state_dict)
                write_adapter_card(directory, self.draft_config, describe(self.adapter), self._metrics_of_weights())
            return
        super()._save(str(directory), state_dict)
        if self.args.should_save:
            (directory / "training_args.bin").unlink(missing_ok=True)
            write_card(directory, self.draft_config, self._metrics_of_weights())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        check_resumable(self.adapter or self.draft, resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _metrics_of_weights(self) -> dict[str, dict] | None:
        """What was set for the final weights, or else what an evaluation at this very step decoded."""
        step, metrics = self._decoded
        if not self._saving and (self.card_metrics or self.args.load_best_model_at_end):
            return self.card_metrics
        return metrics if step == self.state.global_step else None

    def _state_of_weights(self) -> TrainerState:
        """The training's state at the weights there are: after its end at the best ones, where these were loaded."""
        best = self.state.best_model_checkpoint
        if self._saving or self.is_in_train or not (self.args.load_best_model_at_end and best and os.path.isdir(best)):
            return self.state
        return TrainerState.load_from_json(os.path.join(best, TRAINER_STATE_NAME))

    def _provenance(self) -> dict:
        args, state = self.args, self._state_of_weights()
        batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        provenance = {
            "global_step": state.global_step,
            "epoch": state.epoch,
            "batch_size": batch_size,
            "learning_rate": args.learning_rate,
            "lr_scheduler_type": args.lr_scheduler_type.value,
            "seed": args.seed,
            "dtype": "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32",
            "versions": {name: version(name) for name in ("blockdraft", "transformers", "torch")},
            "train_rows": len(self.train_dataset) if has_length(self.train_dataset) else None,
            "license": args.license,
            "license_name": args.license_name,
            "license_link": args.license_link,
            "datasets": args.datasets,
            "adapter": None if self.adapter is None else recipe(self.adapter),
        }
        return {name: value for name, value in provenance.items() if value is not None} | self.data_record
