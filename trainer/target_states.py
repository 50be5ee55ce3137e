"""What a frozen target gives to training: the features that its draft reads, and the states that its LM head reads."""

import inspect
from collections.abc import Iterable
from contextlib import suppress

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..configuration.configuration_draft import DraftConfig
from ..modeling.draft.documents import document_positions
from ..modeling.target.positions import check_length, has_position_table
from ..modeling.target.target_features import capture_features

TOO_LONG = "Encode the rows with a lower `max_length`."
PROBE_TOKENS = 48  # of a row, on which it is tried whether a target keeps documents apart


def check_row_lengths(target: PreTrainedModel, datasets: Iterable) -> None:
    """Raises a `ValueError` if a row of one of these is longer than the target's table of positions, where it has one.
    Streams, which have no end, are held against it row by row, and packed rows have positions for each document."""
    for rows in datasets if has_position_table(target) else ():
        if isinstance(rows, Dataset) and "document_ids" not in rows.column_names:
            check_length(target, max(map(len, rows["input_ids"]), default=0), "The longest row", TOO_LONG)


class _HeadReached(BaseException):
    """Ends a target forward in front of its LM head; not an `Exception`, so no wrapper's handler swallows it."""


class TargetStates:
    """Reads the states of a frozen causal LM, which are wanted on `device`: one forward a batch, which ends where
    nothing more is read. `config.target_layer_ids` and `capture_point` say what the draft reads."""

    def __init__(self, target: PreTrainedModel, config: DraftConfig, device: torch.device):
        self._target, self._config, self._device = target, config, device
        self._accepts = inspect.signature(target.get_decoder().forward).parameters
        self._keeps_documents_apart = False
        self._has_table = has_position_table(target)

    @torch.no_grad()
    def read(self, inputs: dict[str, Tensor], head_input: bool = False) -> tuple[Tensor, ...]:
        """
        Runs the target on a batch of `input_ids` and `attention_mask`, or `document_ids` in its place for packed rows,
        all `[B, S]`.

        Returns:
            The draft's features `[B, S, F * hidden_size]`, F = `len(target_layer_ids)`, and with `head_input` what the
            target's LM head reads, `[B, S, hidden_size]`, in the target's dtype.

        Raises:
            ValueError: if the rows are packed and the target mixes their documents (tried on the first that come), if
                one is longer than its table of positions, or if it makes its logits without calling the head whose
                input is wanted.
        """
        if "document_ids" in inputs and not self._keeps_documents_apart:
            self._check_documents_apart(inputs)
            self._keeps_documents_apart = True
        elif self._has_table and "document_ids" not in inputs:
            check_length(self._target, inputs["input_ids"].shape[1], "The longest row of a batch", TOO_LONG)
        return self._features_and_head_input(inputs) if head_input else (self._features(inputs),)

    def _features(self, inputs: dict[str, Tensor]) -> Tensor:
        where = (self._config.target_layer_ids, self._config.capture_point)
        with capture_features(self._target, *where, stop_after_last=True) as capture:
            capture.run(**self._target_inputs(inputs))
            return capture.features(self._device)

    def _features_and_head_input(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        read = []

        def keep_and_stop(head: nn.Module, args: tuple) -> None:
            read.append(args[0])
            raise _HeadReached

        where = (self._config.target_layer_ids, self._config.capture_point)
        hook = self._target.get_output_embeddings().register_forward_pre_hook(keep_and_stop)
        with hook, capture_features(self._target, *where) as capture:
            with suppress(_HeadReached):
                capture.run(**self._target_inputs(inputs))
            features = capture.features(self._device)
        if not read:
            raise ValueError(
                f"{type(self._target).__name__} makes its logits without calling `get_output_embeddings()`, so the "
                "states that its head reads are unknown. Train with `l1_loss_alpha=0` and `confidence_head_alpha=0`."
            )
        return features, read[0].to(self._device)

    def _target_inputs(self, inputs: dict[str, Tensor]) -> dict:
        if "document_ids" not in inputs:
            context = {"attention_mask": inputs["attention_mask"]}
        elif "document_ids" in self._accepts:
            context = {"document_ids": inputs["document_ids"]}
        else:
            # Without an attention mask, transformers' own mask starts again wherever the positions do.
            context = {"position_ids": document_positions(inputs["document_ids"])}
        return {"input_ids": inputs["input_ids"], "use_cache": False} | context

    def _check_documents_apart(self, inputs: dict[str, Tensor]) -> None:
        """Refuses a target that mixes the documents of packed rows. Tried on the first tokens of a batch's first two
        rows, as three documents in one row and as rows of their own."""
        name = type(self._target).__name__
        if not {"document_ids", "position_ids"} & set(self._accepts):
            raise ValueError(
                f"The rows are packed, but {name} takes no `position_ids` and cannot keep documents apart. Train with "
                "`packing` off."
            )
        ids = inputs["input_ids"][:2, :PROBE_TOKENS]
        width = ids.shape[1]
        documents = (torch.arange(width, device=ids.device) * 3 // width + 1).expand_as(ids)
        packed = self._features({"input_ids": ids, "document_ids": documents}).float()
        parts = ids.split(documents[0].bincount()[1:].tolist(), dim=1)
        alone = [self._features({"input_ids": part, "attention_mask": torch.ones_like(part)}) for part in parts]
        alone = torch.cat(alone, dim=1).float()
        leak = ((packed - alone).norm(dim=-1) / alone.norm(dim=-1)).max().item()
        if leak > (1e-3 if self._target.dtype == torch.float32 else 0.05):
            raise ValueError(
                f"The rows are packed, but {name} cannot keep documents apart: its features change by {leak:.0%} with "
                "the documents before. Its layers carry a state along the row, or its attention "
                f"({self._target.config._attn_implementation}) ignores positions that start again. Train with "
                "`packing` off, or load the target with `attn_implementation` sdpa."
            )
