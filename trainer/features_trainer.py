"""The part of the drafts' Trainer that gets the target's states of a batch: by running the target, or from disk."""

from functools import cached_property, partial
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel
from transformers.utils import logging

from ..modeling.target.embedding_and_head import has_layers
from .data.feature_store import SERVED, TARGET_STATES, FeatureStore, StatesCollator, states_settings
from .data.feature_writer import FeatureWriter
from .data.provenance import chat_template_digest
from .data.served_features import ServedFeatures, ServedLayers
from .engine_trainer import EngineTrainer
from .target_states import TargetStates

logger = logging.get_logger(__name__)


class FeaturesTrainer(EngineTrainer):
    """A Trainer that holds a frozen `target`. With `args.features`, batches come with what the target computed of
    them earlier ([`BatchStates`]), and a target without layers will do; with `args.cache_features` that is written
    before the first step."""

    target: PreTrainedModel

    @property
    def needs_head_input(self) -> bool:
        """Whether the objective compares the draft with the target's own logits."""
        return False

    @property
    def features_directory(self) -> Path:
        return Path(self.args.features or Path(self.args.output_dir, "features"))

    @property
    def _states_settings(self) -> dict:
        return states_settings(self.draft_config, self.needs_head_input)

    @cached_property
    def _target_states(self) -> TargetStates:
        return TargetStates(self.target, self.draft_config, self.args.device)

    def target_states(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What [`TargetStates.read`] gives for a batch: the draft's features and, if the objective needs it, what the
        target's head reads. A batch that comes with them does not run the target. Raises a `ValueError` if it also
        says where its blocks are."""
        if TARGET_STATES not in inputs:
            return self._target_states.read(inputs, head_input=self.needs_head_input)
        if "anchor_positions" in inputs:
            raise ValueError(
                "The batch has `anchor_positions`, but stored features are those that drawn blocks read: leave them "
                "out, or train without `features` and `cache_features`."
            )
        return inputs[TARGET_STATES].on(self.args.device)

    def check_features_settings(self) -> None:
        """Raises a `ValueError` for what a target without layers cannot do; warns of settings without effect."""
        args = self.args
        if args.served_features and not args.cache_features:
            logger.warning("`served_features` is not used: set `cache_features`, or run `blockdraft cache-features`.")
        if args.features_dtype != "auto" and args.features and not args.cache_features:
            logger.warning("`features_dtype` is not used: what is in `features` has its dtype.")
        if has_layers(self.target):
            return
        if not args.features or (args.cache_features and not args.served_features):
            raise ValueError(
                "The target was loaded without its layers, so its features must be on disk: set `features` to the "
                "folder that `blockdraft cache-features` wrote, without `cache_features`, or load the whole target."
            )
        if args.eval_decode_prompts:
            raise ValueError(
                f"`eval_decode_prompts` is {args.eval_decode_prompts}: with `features` the target is not loaded and "
                "cannot decode. Set `eval_decode_prompts=0`, and measure the saved draft with `blockdraft evaluate`; "
                "or set `cache_features` too, which loads the target."
            )

    def train(self, *args, **kwargs):
        """The base class's; with `cache_features` first writes the features that are missing."""
        if self.args.cache_features:
            if self.args.features or self._reads_rows_again():
                self.cache_features()
            else:
                logger.warning("`cache_features` has no effect: training ends with its first epoch.")
        return super().train(*args, **kwargs)

    def _reads_rows_again(self) -> bool:
        args, rows = self.args, self.train_dataset
        if args.max_steps <= 0 or isinstance(rows, IterableDataset):
            return args.max_steps > 0 or args.num_train_epochs > 1
        return args.max_steps * self.get_total_train_batch_size(args) > len(rows)

    def cache_features(self) -> None:
        """Writes the target's states of all training and evaluation rows that `features_directory` lacks; all later
        batches read them, and no step runs the target. All ranks share the rows. Raises a `ValueError` for streams,
        whose rows have no end."""
        sets = self._row_sets()
        if any(isinstance(rows, IterableDataset) for rows in sets):
            raise ValueError(
                "The features of all rows are written before the first step, and a stream has no last row: leave "
                "`streaming` off, or `cache_features`."
            )
        tokenizer = self.processing_class
        provenance = {"chat_template_sha256": None if tokenizer is None else chat_template_digest(tokenizer)}
        read, lacking = partial(self._target_states.read, head_input=self.needs_head_input), None
        if self.args.served_features:
            served = self._served_features()
            sets, lacking = self._served_rows(served, sets)
            read, provenance = served.read, provenance | {SERVED: served.layers.record()}
            if not any(map(len, sets)):
                raise ValueError(f"{lacking}.")
        FeatureWriter(
            self.features_directory,
            self._states_settings,
            self.draft_config.target,
            read,
            self.accelerator,
            dtype=self.args.features_dtype,
            batch_size=self.args.per_device_eval_batch_size,
            provenance=provenance,
        ).write(sets)
        if lacking:
            raise ValueError(
                f"{lacking}. What is there has been written; the same command adds the others once they have been "
                "served (`served_wait` waits for them)."
            )
        self.read_features()

    def _served_features(self) -> ServedFeatures:
        args = self.args
        layers = ServedLayers(
            tuple(args.served_layer_ids), args.served_index, args.served_final_norm, args.served_attn_res_stream
        )
        if warning := layers.warning(self.target.config.get_text_config(decoder=True)):
            logger.warning(warning)
        return ServedFeatures(args.served_features, layers, self.draft_config, self.target, self.needs_head_input)

    def _served_rows(self, served: ServedFeatures, sets: list[Dataset]) -> tuple[list[Dataset], str | None]:
        """The rows that have been served, the same on all ranks, and what to say of the others."""
        window, found = self._states_settings["context_window"], [None, None]
        if self.accelerator.is_main_process:
            rows = served.wait_for(sets, self.args.served_wait, window)
            print(rows.message, flush=True)
            found = [rows.kept, rows.message if rows.missing else None]
        kept, lacking = broadcast_object_list(found)
        return [rows.select(numbers) for rows, numbers in zip(sets, kept, strict=True)], lacking

    def _row_sets(self) -> list:
        return [rows for rows in (self.train_dataset, *self.evaluation_sets) if rows is not None]

    def read_features(self) -> None:
        """From now on, batches come with the target's states in `features_directory`. Raises a `ValueError` if these
        are another target's or other layers', with the differences, or if rows lack them that no target can run."""
        store = FeatureStore(self.features_directory)
        store.check(self._states_settings, self.draft_config.target)
        self.draft_config.target = store.manifest["target"]  # of the whole target, with its weights
        if SERVED in store.manifest:
            self._data_settings |= {"served_features": store.manifest[SERVED]}
        required = not has_layers(self.target)
        for rows in self._row_sets() if required else ():
            if not isinstance(rows, IterableDataset):  # whose rows are looked for as they come
                store.check_rows(rows)
        collator = self.data_collator
        if isinstance(collator, StatesCollator):  # of features that were read before
            collator = collator.collator
        self.data_collator = StatesCollator(collator, store, required)
