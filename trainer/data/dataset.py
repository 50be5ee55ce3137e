"""Chat rows to a training set or stream, and its batches."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from ...hub_cards.rules import is_repo_id
from ...modeling.target.target_identity import is_other_revision, weights_fingerprint
from .encoder import ENCODED, OUTCOME, ROW, RowEncoder, columns, examples, stable_row_id
from .rows import JSON_LINE, Source, open_rows

logger = logging.get_logger(__name__)

SHOWN_PROBLEMS = 20
STREAM_BATCH = 64  # rows of a stream that are encoded at a time
OWN_ANSWERS = "the target's own"
MUST_AGREE = ("target", "revision", "chat_template_sha256", "template_kwargs")  # in what `regenerate` recorded


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
    provenance: dict[str, dict] = field(default_factory=dict)

    def count(self, outcome: pa.Table) -> None:
        """Adds rows, given by their columns of `OUTCOME`."""
        problems = outcome["problem"].filter(pc.not_equal(outcome["problem"], ""))
        kept = outcome.filter(good_rows(outcome))
        self.rows += pc.sum(pc.equal(outcome["part"], 0)).as_py() or 0
        self.kept += len(kept)
        self.split += pc.sum(pc.equal(outcome["part"], 1)).as_py() or 0
        self.truncated += pc.sum(outcome["truncated"]).as_py() or 0
        for reason in pc.value_counts(outcome["dropped"]).to_pylist():
            if reason["values"]:
                self.dropped[reason["values"]] = self.dropped.get(reason["values"], 0) + reason["counts"]
        self.bad += len(problems)
        self.problems += problems[: SHOWN_PROBLEMS - len(self.problems)].to_pylist()
        self.open_turns += pc.sum(kept["open"]).as_py() or 0
        self.supervised_tokens += pc.sum(kept["supervised"]).as_py() or 0

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
        return "; ".join(parts)


def good_rows(outcome: pa.Table) -> pa.ChunkedArray:
    """Which rows are to be kept, by their columns of `OUTCOME`."""
    return pc.and_(pc.equal(outcome["dropped"], ""), pc.equal(outcome["problem"], ""))


def provenance_path(path: str | Path) -> Path:
    """Where `blockdraft regenerate` keeps the settings of the rows in `path`."""
    return Path(f"{path}.provenance.json")


def chat_template_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of a tokenizer's chat template."""
    return hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest()


def answers_of(
    names: Sequence[str | Path],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target_revision: str | None = None,
) -> str:
    """Whose answers a draft learns from, for its card: a target is best drafted by what learned from its own. Warns of
    files by `blockdraft regenerate` that are not known to be this target's, which was loaded at `target_revision`."""
    files = {str(name) for name in names}
    written = _read_provenance(sorted(files))
    if not written:
        return "those of the data"
    authors = [author(settings, target, tokenizer, target_revision) for settings in written.values()]
    answers = next((answers for answers in authors if answers != OWN_ANSWERS), OWN_ANSWERS)
    if answers != OWN_ANSWERS:
        writer = next(iter(written.values()))["target"]  # of all of them
        logger.warning(
            f"The answers in {', '.join(written)} are {answers}: `blockdraft regenerate` wrote them with "
            f"{writer}, the target is {target.config.name_or_path}. Where that makes a difference, the draft learns "
            "what its target would not say: regenerate them with this target and its chat template."
        )
    return answers if len(written) == len(files) else f"partly {answers}"


def author(
    settings: dict, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, target_revision: str | None
) -> str:
    """Whose the answers are that `blockdraft regenerate` wrote under `settings`: `OWN_ANSWERS` if they are this
    target's by its weights or, where those cannot be compared, by name (or folder) and commit; else whose, by name."""
    name, here = settings["target"], target.config.name_or_path
    folders = os.path.isdir(name) and os.path.isdir(here)
    same_name = name == here or (folders and os.path.samefile(name, here))
    # A card is published, its author's folders are not.
    shown = (name if is_repo_id(name) and not os.path.isdir(name) else Path(name).name) or "an unnamed model"
    same_dtype = settings.get("dtype") == str(target.dtype).removeprefix("torch.")  # a cast changes weights
    recorded = settings.get("weights_sha256") if same_dtype else None
    weights = recorded and weights_fingerprint(target)
    if weights:
        if weights != recorded:
            return f"those of {shown} with other weights" if same_name else f"those of {shown}"
    elif not same_name:
        return f"those of {shown}"
    elif is_other_revision(settings["revision"], target_revision):
        return f"those of {shown} at revision {settings['revision']}"
    if settings["chat_template_sha256"] != chat_template_digest(tokenizer):
        return f"{OWN_ANSWERS} under another chat template"
    return OWN_ANSWERS


def read_settings(path: Path) -> dict:
    """The settings in a file by `blockdraft regenerate`; raises `ValueError` if it is damaged."""
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
        if missing := [key for key in MUST_AGREE if key not in settings]:
            raise KeyError(*missing)
        return settings
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"data: {path} is damaged ({error!r}). Restore it, or delete it: its rows are then of unknown origin."
        ) from error


def _read_provenance(names: list[str]) -> dict[str, dict]:
    """The settings of those files that `blockdraft regenerate` wrote; they must agree on target and template."""
    found = {name: provenance_path(name) for name in names}
    settings = {name: read_settings(path) for name, path in found.items() if path.is_file()}
    for name, other in settings.items():
        first_name, first = next(iter(settings.items()))
        for key in MUST_AGREE:
            if other[key] != first[key]:
                raise ValueError(
                    f"data: {name} was regenerated with {key}={other[key]!r}, {first_name} with {first[key]!r}; "
                    "a draft learns one target under one template: train on sets made alike"
                )
    return settings


def prepare_dataset(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    max_bad_fraction: float = 0.0,
    num_proc: int | None = None,
    **settings,
) -> tuple[Dataset, DataReport]:
    """Turns chat rows into training rows with the columns `input_ids`, `loss_mask` (0 or 1) and `row_id` (int64).

    Encoding is a cached `Dataset.map`: rows lie in a file and memory does not grow with them; the same rows,
    tokenizer, template and settings are encoded once, whichever process asks (a dataset in memory: every time). Row
    indices in messages count from 0 in their file. Rows without an `id` are numbered over all files.

    Args:
        source: a `datasets.Dataset`, one or more paths (`.jsonl`, `.json`, `.parquet`) or names of Hub datasets; see
            [`~blockdraft.trainer.data.rows.open_rows`].
        max_length: longer rows lose their end, in tokens.
        max_bad_fraction: up to this fraction of unreadable rows is left out and reported; more is an error.
        num_proc: processes that encode.
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

    report, ids = DataReport(provenance=_read_provenance([name for name, _ in opened])), []
    for table in encoded.select_columns([*OUTCOME, "row_id"]).with_format("arrow").iter(batch_size=10_000):
        report.count(table)
        ids.append(table["row_id"].filter(good_rows(table)).combine_chunks())
    report.check(max_bad_fraction)
    if not report.kept:
        raise ValueError(f"data: no row is left to train on: {report}")
    if report.kept < len(encoded):
        kept = {"function": _is_good, "input_columns": ["dropped", "problem"], "batched": True}
        encoded = encoded.filter(**kept, desc="Leaving out rows")
    if report.bad or report.dropped or report.open_turns or report.split:
        logger.warning(str(report))
    if repeated := report.kept - len(pc.unique(pa.chunked_array(ids))):
        logger.warning(
            f"{repeated} rows have an `id` that another row has too: where both are in one step, their anchors are "
            "drawn alike. Give rows ids of their own, or none."
        )
    return encoded.select_columns(list(ROW)), report


def _encode_batch(batch: dict[str, list], indices: list[int], encoder: RowEncoder, name: str, first: int) -> dict:
    rows = zip(examples(batch), indices, strict=True)
    return columns(
        [part for row, index in rows for part in encoder(row, f"{name}: row {index}", first + index)], ENCODED
    )


def _is_good(dropped: list[str], problem: list[str]) -> list[bool]:
    return [not (left_out or bad) for left_out, bad in zip(dropped, problem, strict=True)]


def prepare_stream(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    max_bad_fraction: float = 0.0,
    **settings,
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
    _read_provenance([name for name, _ in opened])

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
        outcome = pa.table(columns(encoded, OUTCOME), schema=OUTCOME.arrow_schema)
        self.report.count(outcome)
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
    """Interleaves sets or streams: each next row comes from one of them, drawn with these probabilities.

    Shorter parts start again until every row of every part was seen once. Give the parts different `id_prefix`es.

    Raises:
        ValueError: unless there is one positive probability for each part.
    """
    if len(probabilities) != len(parts) or not all(probability > 0 for probability in probabilities):
        raise ValueError(
            f"data_mix={list(probabilities)} must have one positive share for each of the {len(parts)} sources"
        )
    shares = [probability / sum(probabilities) for probability in probabilities]
    return interleave_datasets(list(parts), shares, seed=seed, stopping_strategy="all_exhausted")


@dataclass
class DraftCollator:
    """Right-pads rows into a batch of `input_ids`, `attention_mask`, `loss_mask` (all `[B, S]` int64, padding 0 in the
    masks) and `row_id` (`[B]` int64), with `document_ids` (`[B, S]`, 0 for padding) and `document_row_ids` (`[B, D]`,
    padding 0) if the rows are packed."""

    pad_token_id: int

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        batch = {
            "input_ids": _pad([row["input_ids"] for row in rows], self.pad_token_id),
            "attention_mask": _pad([[1] * len(row["input_ids"]) for row in rows], 0),
            "loss_mask": _pad([row["loss_mask"] for row in rows], 0),
            "row_id": torch.tensor([stable_row_id(row["row_id"]) for row in rows]),
        }
        for name in ("document_ids", "document_row_ids"):
            if name in rows[0]:
                batch[name] = _pad([row[name] for row in rows], 0)
        return batch


def _pad(rows: list, value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=value
    )
