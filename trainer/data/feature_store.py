"""A target's states of training rows in a folder: what it holds, and how a batch gets them.

The folder has shards ([`~blockdraft.trainer.data.feature_shards`]) and `manifest.json`, which says whose states they
are and which shards belong to them. Rows are found by their tokens, whatever their order, shard, packing or row id.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from ...configuration.configuration_draft import DraftConfig
from ...modeling.target.pairing import compared_weights
from ...modeling.target.target_identity import is_other_revision
from .feature_shards import Columns, RowStates, Shard, ShardIndex, columns_read, row_digest

MANIFEST = "manifest.json"
FORMAT = 1
READ_ROWS = 1000  # rows that are looked at together
DOCUMENT_COLUMNS = ("input_ids", "loss_mask", "row_id", "document_ids", "document_row_ids")
SERVED = "served"  # in a manifest: which states an engine wrote, and by which conventions
TARGET_STATES = "target_states"  # of a batch: its `BatchStates`
REPAIR = "`blockdraft cache-features` with the same settings writes what is missing or damaged, and nothing else"
# Of a target's record, what must agree where both sides know it.
SAME_TARGET = ("architecture", "model_type", "hidden_size", "num_hidden_layers", "dtype", "embedding_rows")
SAME_TARGET += ("quantization", "adapters", "tokenizer_length", "tokenizer_sha256", "tokenization_sha256")


class Document(NamedTuple):
    """A row, or one of the rows that were packed into it."""

    input_ids: Sequence[int]
    loss_mask: Sequence[int]
    row_id: int


class StatesSource(Protocol):
    """Where the states of rows come from.

    Attributes:
        widths, dtypes: by name, `features` and, if the objective needs it, `head_input`.
        context_window: how many positions before an anchor the draft reads; `None`: all.
        name: what messages call it.
    """

    widths: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]
    context_window: int | None
    name: str

    def find(self, document: Document, columns: Columns) -> RowStates | None:
        """The states of a document at `columns`, or at more positions; `None` if it has none of this document. Raises
        a `ValueError` that names the file if they cannot be used."""


def states_settings(config: DraftConfig, head_input: bool) -> dict:
    """Which states of its target a draft is trained on, as a manifest says it."""
    windows = config.context_windows
    return {
        "target_layer_ids": list(config.target_layer_ids),
        "capture_point": config.capture_point,
        "head_input": head_input,
        "context_window": None if None in windows else max(windows),
    }


def documents(row: Mapping) -> list[Document]:
    """A training row as the rows that were packed into it, or as itself."""
    if "document_ids" not in row:
        return [Document(row["input_ids"], row["loss_mask"], row["row_id"])]
    ids = np.asarray(row["document_ids"])
    bounds = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    names = row.get("document_row_ids", [row["row_id"]] * (len(bounds) - 1))
    return [
        Document(row["input_ids"][start:stop], row["loss_mask"][start:stop], name)
        for start, stop, name in zip(bounds, bounds[1:], names, strict=False)
    ]


def all_documents(rows: Dataset) -> Iterator[tuple[int, int, Document]]:
    """The documents of all rows, each with the number of its row and its own in it."""
    columns = [name for name in DOCUMENT_COLUMNS if name in rows.column_names]
    batches = rows.select_columns(columns).with_format("numpy").iter(READ_ROWS)
    for start, batch in zip(range(0, len(rows), READ_ROWS), batches, strict=True):
        for at in range(len(batch["input_ids"])):
            for part, document in enumerate(documents({name: values[at] for name, values in batch.items()})):
                yield start + at, part, document


class FeatureStore:
    """The states in a folder that `blockdraft cache-features` wrote, a [`StatesSource`]. Raises a `ValueError` if
    there are none, or not all that were to be written, or if a shard is missing or damaged; it names the file."""

    def __init__(self, directory: str | Path):
        self.directory, self.name = Path(directory), f"`features`: {directory}"
        self.manifest = read_manifest(self.directory)
        if self.manifest is None:
            raise ValueError(f"{self.name} has no {MANIFEST}. `blockdraft cache-features` writes it.")
        if not self.manifest["complete"]:
            raise ValueError(f"{self.name} is not complete: {REPAIR}.")
        self.widths = self.manifest["widths"]
        self.dtypes = {name: getattr(torch, dtype) for name, dtype in self.manifest["dtypes"].items()}
        self.context_window = self.manifest["context_window"]
        self._index = ShardIndex([self._open(**entry) for entry in self.manifest["shards"]])

    def _open(self, file: str, checksum: str, **_) -> Shard:
        with _with_repair():
            shard = Shard(self.directory / Path(file).name)
            if shard.checksum != checksum:
                raise ValueError(f"{shard.path}: the shard is not the one that {MANIFEST} lists")
        return shard

    def __reduce__(self):
        return type(self), (self.directory,)  # open files stay in their process

    def check(self, settings: dict, target: dict) -> None:
        """Raises a `ValueError` with the differences unless these are the states that `settings` (see
        [`states_settings`]) ask for, of a target with this record."""
        if found := differences(self.manifest, settings, target):
            raise ValueError(
                f"{self.name} is not for this training: {'; '.join(found)}. Train with what it was written with, or "
                "write another folder with `blockdraft cache-features`."
            )

    def check_rows(self, rows: Dataset) -> None:
        """Raises a `ValueError` if there are no states of some of these rows."""
        lacking, first = 0, None
        for _, _, document in all_documents(rows):
            columns = columns_read(document.loss_mask, self.context_window)
            if columns.stop and self._index.find(row_digest(document.input_ids), columns) is None:
                lacking, first = lacking + 1, first or document
        if first:
            raise ValueError(f"{missing(self, first)} (It lacks {lacking} rows.)")

    def find(self, document: Document, columns: Columns) -> RowStates | None:
        """See [`StatesSource`]."""
        if (place := self._index.find(row_digest(document.input_ids), columns)) is None:
            return None
        shard, row = place
        with _with_repair():
            return shard.read(row, self.dtypes)


def read_manifest(directory: Path) -> dict | None:
    """What `manifest.json` says; `None` without one. Raises a `ValueError` if it is damaged or of another format."""
    path = directory / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"format {manifest['format']}, not {FORMAT}")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`features`: {path} is damaged ({error!r}): write the features into another folder."
        ) from error
    return manifest


def differences(manifest: dict, settings: dict, target: dict) -> list[str]:
    """What of a manifest does not suit the states that `settings` ask for, of a target with this record."""
    there, found = manifest["target"], []
    names = [name for name in SAME_TARGET if there[name] is not None and target[name] is not None]
    names += (compared := compared_weights(there, target))
    if not compared and is_other_revision(there["revision"], target["revision"]):
        names.append("revision")
    pairs = {f"the target's {name}": (there[name], target[name]) for name in names}
    pairs |= {f"`{name}`": (manifest[name], settings[name]) for name in ("target_layer_ids", "capture_point")}
    for name, (then, now) in pairs.items():
        if then != now:
            found.append(f"{name}: {then} there, {now} here")
    if settings["head_input"] and not manifest["head_input"]:
        found.append("it does not hold what the target's head reads, which this objective needs")
    window, needed = manifest["context_window"], settings["context_window"]
    if window is not None and (needed is None or needed > window):
        found.append(f"it holds {window} positions before an answer, and the draft reads {needed or 'all'}")
    return found


@contextmanager
def _with_repair() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{error}. {REPAIR}.") from error


@dataclass
class BatchStates:
    """The states of a batch, on the CPU until its forward: an accumulation window of them may be more than a device
    holds. (It has no `to`, by which accelerate would move them with the batch.)

    Attributes:
        features (`[B, S, F * hidden_size]`): what the draft reads, zero where no block reads it.
        head_input (`[B, S, hidden_size]`, *optional*): what the target's head reads, likewise.
    """

    features: Tensor
    head_input: Tensor | None

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        states = (self.features,) if self.head_input is None else (self.features, self.head_input)
        return tuple(state.to(device, non_blocking=True) for state in states)

    def pin_memory(self) -> "BatchStates":
        """For a loader with `pin_memory`."""
        return BatchStates(
            *(state if state is None else state.pin_memory() for state in (self.features, self.head_input))
        )


@dataclass
class StatesCollator:
    """Adds the target's states to the batches of another collator, in the processes of a loader if it has any
    (`dataloader_num_workers`), ahead of the steps.

    Attributes:
        collator: makes the batch.
        source: where the states come from.
        required: whether a row that it lacks is an error; otherwise its batch has no states.
    """

    collator: Callable[[list[dict]], dict]
    source: StatesSource
    required: bool

    def __call__(self, rows: list[dict]) -> dict:
        batch = self.collator(rows)
        states = self._states(rows, *batch["input_ids"].shape)
        return batch if states is None else batch | {TARGET_STATES: states}

    def _states(self, rows: list[dict], *shape: int) -> BatchStates | None:
        source = self.source
        states = {name: torch.zeros(*shape, width, dtype=source.dtypes[name]) for name, width in source.widths.items()}
        for number, row in enumerate(rows):
            offset = 0
            for document in documents(row):
                columns = columns_read(document.loss_mask, source.context_window)
                if columns.stop:  # its blocks read something
                    if (found := source.find(document, columns)) is None:
                        if not self.required:
                            return None
                        raise ValueError(missing(source, document))
                    start, head_start, stop = (offset + place for place in found.columns)
                    states["features"][number, start:stop] = found.features
                    if "head_input" in states:
                        states["head_input"][number, head_start:stop] = found.head_input
                offset += len(document.input_ids)
        return BatchStates(states["features"], states.get("head_input"))


def missing(source: StatesSource, document: Document) -> str:
    """A message about a row that has no states."""
    return (
        f"{source.name} has no states of the row {document.row_id} ({len(document.input_ids)} tokens): it was written "
        "for other data, or another chat template or `max_length`. `blockdraft cache-features` with these settings "
        "adds what is missing."
    )
