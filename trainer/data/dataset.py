"""Chat rows to a training set or stream, and its batches."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import has_length
from transformers.utils import logging

from .encoder import ENCODED, OUTCOME, ROW, RowEncoder, columns, examples, stable_row_id
from .provenance import read_provenance
from .rows import JSON_LINE, Source, open_rows

logger = logging.get_logger(__name__)

SHOWN_PROBLEMS = 20
STREAM_BATCH = 64  # rows of a stream that are encoded at a time


@dataclass
class DataReport:
    """What became of the rows that were read.

    Attributes:
        rows, kept: rows read; rows in the training set.
        split: conversations that gave one row a turn, since the chat template rewrites earlier turns.
        truncated: rows longer than `max_length`, whether kept or dropped.
        dropped: how many rows were left out, by reason.
        bad: how many rows could not be read.
        problems: of the first of them, one message each, with file, row index and field.
        open_turns: kept rows whose last supervised turn does not end with a stop token.
        supervised_tokens: in the kept rows.
        unused: how many rows have a field without effect, by its name.
        provenance: by file, the settings under which `blockdraft regenerate` wrote it.
    """

    rows: int = 0
    kept: int = 0
    split: int = 0
    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    bad: int = 0
    problems: list[str] = field(default_factory=list)
    open_turns: int = 0
    supervised_tokens: int = 0
    unused: dict[str, int] = field(default_factory=dict)
    provenance: dict[str, dict] = field(default_factory=dict)

    def count(self, row: dict) -> None:
        """Adds an encoded row, given by its fields of `OUTCOME`."""
        self.rows += row["part"] == 0
        self.split += row["part"] == 1
        self.truncated += row["truncated"]
        for name in row["unused"]:
            self.unused[name] = self.unused.get(name, 0) + 1
        if row["dropped"]:
            self.dropped[row["dropped"]] = self.dropped.get(row["dropped"], 0) + 1
        elif row["problem"]:
            self.bad += 1
            if len(self.problems) < SHOWN_PROBLEMS:
                self.problems.append(row["problem"])
        else:
            self.kept += 1
            self.open_turns += row["open"]
            self.supervised_tokens += row["supervised"]

    def check(self, max_bad_fraction: float, least_rows: int = 0) -> None:
        """Raises `ValueError` if more than this fraction of the rows, counted as `least_rows` at least, is bad."""
        if self.bad > max_bad_fraction * max(self.rows, least_rows):
            raise ValueError(
                f"{self.bad} of {self.rows} rows are bad, more than max_bad_fraction={max_bad_fraction} allows:\n  "
                + "\n  ".join(self.problems[:5])
            )

    def __str__(self) -> str:
        parts = [
            f"{self.kept} rows kept of {self.rows}" if self.split else f"{self.kept} of {self.rows} rows kept",
            f"{self.supervised_tokens} supervised tokens",
            f"{self.truncated} truncated",
            *(f"{count} dropped: {reason}" for reason, count in self.dropped.items()),
        ]
        if self.split:
            parts.append(f"{self.split} split into one row a turn, as the chat template rewrites earlier turns")
        if self.bad:
            parts.append(f"{self.bad} bad, the first: {self.problems[0]}")
        if self.open_turns:
            parts.append(f"{self.open_turns} without a stop token at the end (see stop_token_ids)")
        if self.unused:
            parts.append(
                "fields without effect: " + ", ".join(f"{name} ({count} rows)" for name, count in self.unused.items())
            )
        return "; ".join(parts)


def prepare_dataset(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    max_bad_fraction: float = 0.0,
    num_proc: int | None = None,
    may_be_empty: bool = False,
    **settings,
) -> tuple[Dataset, DataReport]:
    """Turns chat rows into training rows with the columns `input_ids`, `loss_mask` (0 or 1), `row_id` (int64) and
    `prompt_length` (how many of the ids serving sends for the last supervised answer) and `conversation_id` (int64),
    by which [`hold_out`] splits them.

    Encoding is a cached `Dataset.map`: rows lie in a file and memory does not grow with them; the same rows,
    tokenizer, template and settings are encoded once, whichever process asks (a dataset in memory: every time). Row
    indices in messages count from 0 in their file. Rows without an `id` are numbered over all files.

    Args:
        source: a `datasets.Dataset`, one or more paths (`.jsonl`, `.json`, `.parquet`) or names of Hub datasets; see
            [`~blockdraft.trainer.data.rows.open_rows`].
        max_length: longer rows lose their end, in tokens.
        max_bad_fraction: up to this fraction of unreadable rows is left out and reported; more is an error.
        num_proc: processes that encode.
        may_be_empty: whether no row with an answer is no error.
        settings: the others of [`~blockdraft.trainer.data.encoder.RowEncoder`]: `assistant_turns`, `stop_token_ids`,
            `template_kwargs`, `train_on_thinking`, `thinking_tags`, `id_prefix`.

    Raises:
        ValueError: if too many rows are bad (the first are named by file, row and field) or no row remains.
    """
    encoder = RowEncoder(tokenizer, max_length, **settings)
    parts, first = [], 0
    for name, dataset in (opened := open_rows(source)):
        parts.append(
            dataset.map(
                _encode_batch,
                with_indices=True,
                batched=True,
                fn_kwargs={"encoder": encoder, "name": name, "first": first},
                remove_columns=dataset.column_names,
                features=ENCODED,
                num_proc=num_proc,
                # Not the default hash of the arguments: it changes with what a tokenizer did before.
                new_fingerprint=encoder.fingerprint(dataset._fingerprint, name, first),
                desc=f"Encoding {Path(name).name}",
            )
        )
        first += len(dataset)
    encoded = concatenate_datasets(parts)

    report, ids = DataReport(provenance=read_provenance([name for name, _ in opened])), []
    for batch in encoded.select_columns([*OUTCOME, "row_id"]).iter(batch_size=10_000):
        for row in examples(batch):
            report.count(row)
        ids.append(np.array(batch["row_id"])[_are_good(batch["dropped"], batch["problem"])])
    report.check(max_bad_fraction)
    if not (report.kept or may_be_empty):
        raise ValueError(f"data: no row is left to train on: {report}")
    if report.kept < len(encoded):
        encoded = encoded.filter(
            _are_good, input_columns=["dropped", "problem"], batched=True, desc="Leaving out rows"
        )
    if report.bad or report.dropped or report.open_turns or report.split or report.unused:
        logger.warning(str(report))
    if repeated := report.kept - len(np.unique(np.concatenate(ids))):
        logger.warning(
            f"{repeated} rows have an `id` that another row has too: where both are in one step, their anchors are "
            "drawn alike. Give rows ids of their own, or none."
        )
    return encoded.select_columns(list(ROW)), report


def _encode_batch(batch: dict[str, list], indices: list[int], encoder: RowEncoder, name: str, first: int) -> dict:
    rows = zip(examples(batch), indices, strict=True)
    encoded = [part for row, index in rows for part in encoder(row, f"{name}: row {index}", first + index)]
    return columns(encoded, ENCODED)


def _are_good(dropped: list[str], problem: list[str]) -> list[bool]:
    return [not (left_out or bad) for left_out, bad in zip(dropped, problem, strict=True)]


def prepare_stream(
    source: Source, tokenizer: PreTrainedTokenizerBase, max_length: int, max_bad_fraction: float = 0.0, **settings
) -> IterableDataset:
    """Chat rows as a stream of training rows like those of [`prepare_dataset`], encoded while they are read.

    A row without an `id` is named by a hash of its content, whatever the order, shard or worker it is read by. Each
    process logs what became of its rows, at 1,000 rows, 10,000 and so on, and after a pass. Train with `max_steps`: a
    trainer starts a stream again at its end, and reads past what it has seen when it resumes. Shuffle it with
    `stream.shuffle(seed, buffer_size)`.

    Args: those of [`prepare_dataset`]; `max_bad_fraction` applies to the rows so far, counted as 100 at least.

    Raises:
        ValueError: if the settings cannot be or no row remains; while it is read, if too many rows are bad.
    """
    encoder = RowEncoder(tokenizer, max_length, **settings)
    opened = open_rows(source, streaming=True)
    read_provenance([name for name, _ in opened])

    def encoded(log: bool) -> IterableDataset:
        return concatenate_datasets(
            [
                dataset.map(
                    _StreamEncoder(encoder, name, max_bad_fraction, log),
                    with_indices=True,
                    batched=True,
                    batch_size=STREAM_BATCH,
                    remove_columns=dataset.column_names or list(next(iter(dataset))),
                    features=ROW,
                )
                for name, dataset in opened
            ]
        )

    if next(iter(encoded(log=False)), None) is None:
        raise ValueError(f"data: no row is left to train on in {', '.join(name for name, _ in opened)}")
    return encoded(log=True)


class _StreamEncoder:
    """The map of a stream: leaves out what is bad or dropped, counts it and, if it is to `log`, says so."""

    def __init__(self, encoder: RowEncoder, name: str, max_bad_fraction: float, log: bool):
        self.encoder, self.name, self.max_bad_fraction, self.log = encoder, name, max_bad_fraction, log
        self.report, self.next_log, self.told = DataReport(), 1000, {str(DataReport())}

    def __call__(self, batch: dict[str, list], indices: list[int]) -> dict[str, list]:
        if indices[0] == 0:
            self._tell()  # of the pass before, if its last batch was a full one
            self.report, self.next_log = DataReport(), 1000
        encoded = []
        for index, row in zip(indices, examples(batch), strict=True):
            content = row.get(JSON_LINE) or json.dumps(row, sort_keys=True, default=str)
            encoded += self.encoder(row, f"{self.name}: row {index} of this process", content)
        for row in encoded:
            self.report.count(row)
        self.report.check(self.max_bad_fraction, least_rows=100)
        if len(indices) < STREAM_BATCH:
            self._tell(" to its end")
        elif self.report.rows >= self.next_log:
            self._tell()
            self.next_log *= 10
        return columns([row for row in encoded if not (row["dropped"] or row["problem"])], ROW)

    def _tell(self, how_far: str = "") -> None:
        """Each count once: passes are mostly alike."""
        if self.log and (text := str(self.report)) not in self.told:
            self.told.add(text)
            logger.warning(f"{self.name}, read by this process{how_far}: {text}")


def mix(parts: Sequence[Dataset] | Sequence[IterableDataset], probabilities: Sequence[float], seed: int):
    """Interleaves sets or streams: each next row comes from one of them, drawn with these probabilities. Shorter parts
    start again until every row of every part was seen once. Give the parts different `id_prefix`es. Raises a
    `ValueError` unless there is one positive probability for each part."""
    if len(probabilities) != len(parts) or not all(probability > 0 for probability in probabilities):
        raise ValueError(
            f"data_mix={list(probabilities)} must have one positive share for each of the {len(parts)} sources"
        )
    shares = [probability / sum(probabilities) for probability in probabilities]
    return interleave_datasets(list(parts), shares, seed=seed, stopping_strategy="all_exhausted")


def hold_out(rows: Dataset, fraction: float, seed: int) -> dict[str, Dataset]:
    """Splits the rows of [`prepare_dataset`] into `train` and `test`: a share of the conversations, at least one, is
    held out with all of its rows (one a turn, where the chat template rewrites earlier turns; several with one `id`).
    Raises a `ValueError` if there is one conversation only."""
    conversations: dict[int, list[int]] = {}
    for index, conversation in enumerate(rows["conversation_id"][:]):
        conversations.setdefault(conversation, []).append(index)
    held_out = max(1, round(fraction * len(conversations)))
    if held_out >= len(conversations):
        raise ValueError(
            f"The data have {len(conversations)} conversations (rows of one `id` are one), of which {held_out} would "
            "be held out: none is left to train on. Give more rows, or `eval_data`."
        )
    split = Dataset.from_dict({"rows": [*conversations.values()]}).train_test_split(test_size=held_out, seed=seed)
    return {name: rows.select([i for indices in part["rows"][:] for i in indices]) for name, part in split.items()}


def check_columns(columns: Collection[str]) -> None:
    """Raises a `ValueError` if rows to train on lack a column that they must have."""
    if missing := [name for name in ("input_ids", "loss_mask") if name not in columns]:
        raise ValueError(
            f"The rows have no `{'`, no `'.join(missing)}` among their columns ({', '.join(sorted(columns))}): "
            "`prepare_dataset` makes rows to train on from chats. `loss_mask` is 1 where a token is to be learned."
        )


def check_rows(rows, setting: str) -> None:
    """[`check_columns`] of a set or stream of rows, or several by name, as far as its columns are known; warns that
    rows without a `row_id` get one."""
    if isinstance(rows, dict):
        for name, part in rows.items():
            check_rows(part, f"{setting}[{name!r}]")
        return
    if isinstance(rows, Dataset | IterableDataset):
        columns = rows.column_names
    else:
        columns = list(rows[0]) if rows is not None and has_length(rows) and len(rows) else None
    if columns is None:
        return
    check_columns(columns)
    if "row_id" not in columns:
        logger.warning(
            f"`{setting}` has no column `row_id`, by which anchors are drawn: its rows are named by their content."
        )


@dataclass
class DraftCollator:
    """Right-pads rows into a batch of `input_ids`, `attention_mask`, `loss_mask` (all `[B, S]` int64, padding 0 in the
    masks) and `row_id` (`[B]` int64), with `document_ids` (`[B, S]`, 0 for padding) and `document_row_ids` (`[B, D]`,
    padding 0) if the rows are packed. A row without a `row_id` gets a hash of its content. Raises a `ValueError` for
    rows without `input_ids` or `loss_mask`."""

    pad_token_id: int

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        check_columns(rows[0])
        batch = {
            "input_ids": _pad([row["input_ids"] for row in rows], self.pad_token_id),
            "attention_mask": _pad([[1] * len(row["input_ids"]) for row in rows], 0),
            "loss_mask": _pad([row["loss_mask"] for row in rows], 0),
            "row_id": torch.tensor([_id_of(row) for row in rows]),
        }
        packed = [name for name in ("document_ids", "document_row_ids") if name in rows[0]]
        return batch | {name: _pad([row[name] for row in rows], 0) for name in packed}


def _id_of(row: dict) -> int:
    if row.get("row_id") is not None:
        return stable_row_id(row["row_id"])
    return stable_row_id(json.dumps([torch.as_tensor(row[name]).tolist() for name in ("input_ids", "loss_mask")]))


def _pad(rows: list, value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=value
    )
