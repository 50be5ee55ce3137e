"""Chat rows to a training set, and its batches."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset, Features, List, Value, concatenate_datasets
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from .chat_rows import Source, open_rows, read_row, row_id
from .loss_mask import encode_row

logger = logging.get_logger(__name__)

ENCODED = Features(
    {
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("int8")),
        "row_id": Value("int64"),
        "supervised": Value("int32"),
        "truncated": Value("bool"),
        "open": Value("bool"),
        "dropped": Value("string"),
        "problem": Value("string"),
    }
)


@dataclass
class DataReport:
    """What became of the rows that were read.

    Attributes:
        rows, kept: rows read, rows in the training set.
        truncated: rows longer than `max_length`, whether kept or dropped.
        dropped: how many rows were left out, by reason.
        bad: one message for each row that could not be read, with its file, row index and field.
        open_turns: kept rows whose last supervised turn does not end with a stop token.
        supervised_tokens: in the kept rows.
        provenance: by file, the settings under which `blockdraft regenerate` wrote it.
    """

    rows: int
    kept: int
    truncated: int
    dropped: dict[str, int]
    bad: list[str]
    open_turns: int
    supervised_tokens: int
    provenance: dict[str, dict] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [
            f"{self.kept} of {self.rows} rows kept",
            f"{self.supervised_tokens} supervised tokens",
            f"{self.truncated} truncated",
            *(f"{count} dropped: {reason}" for reason, count in self.dropped.items()),
        ]
        if self.bad:
            parts.append(f"{len(self.bad)} bad, the first: {self.bad[0]}")
        if self.open_turns:
            parts.append(f"{self.open_turns} without a stop token at the end (see stop_token_ids)")
        return "; ".join(parts)


def stable_row_id(row_id: int | str) -> int:
    """An int64 that names the row in every process and run: an int is itself, a string its SHA-256's first 63 bits."""
    if isinstance(row_id, str):
        return int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:8]) >> 1
    return int(row_id)


def _encode_example(example: dict, index: int, name: str, first: int, max_length: int, **options) -> dict:
    """One example as a row of `ENCODED`; what is wrong with it goes into `problem` or `dropped`."""
    ids, mask, is_open, dropped, problem, key = [], [], False, "", "", first + index
    try:
        row = read_row(example)
        if row is None:
            dropped = "blank line"
        else:
            key = stable_row_id(row_id(row, key))
            ids, mask, is_open = encode_row(row, **options)
    except ValueError as error:
        problem = f"{name}: row {index}: {error}"
    supervised = sum(mask[:max_length])
    if not (problem or dropped or supervised):
        cut_away = any(mask)
        dropped = f"no supervised token within max_length={max_length}" if cut_away else "no answer to learn from"
    return {
        "input_ids": ids[:max_length],
        "loss_mask": mask[:max_length],
        "row_id": key,
        "supervised": supervised,
        "truncated": len(ids) > max_length,
        "open": is_open and len(ids) <= max_length,
        "dropped": dropped,
        "problem": problem,
    }


def provenance_path(path: str | Path) -> Path:
    """Where `blockdraft regenerate` keeps the settings of the rows in `path`."""
    return Path(f"{path}.provenance.json")


def _read_provenance(names: list[str]) -> dict[str, dict]:
    """The settings of those files that `blockdraft regenerate` wrote; they must agree on target and template."""
    found = {name: provenance_path(name) for name in names}
    settings = {name: json.loads(path.read_text())["settings"] for name, path in found.items() if path.is_file()}
    for name, other in settings.items():
        first_name, first = next(iter(settings.items()))
        for key in ("target", "revision", "chat_template_sha256", "template_kwargs"):
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
    assistant_turns: str = "all",
    stop_token_ids: Sequence[int] | None = None,
    template_kwargs: dict | None = None,
    max_bad_fraction: float = 0.0,
    num_proc: int | None = None,
) -> tuple[Dataset, DataReport]:
    """Turns chat rows into training rows with the columns `input_ids`, `loss_mask` (0 or 1) and `row_id` (int64).

    Encoding is a cached `Dataset.map`. Row indices in messages count from 0 in their file.

    Args:
        source: a `datasets.Dataset`, or one or more paths (`.jsonl`, `.json`, `.parquet`).
        max_length: longer rows lose their end, in tokens.
        assistant_turns, stop_token_ids, template_kwargs: see `encode_row`.
        max_bad_fraction: up to this fraction of unreadable rows is left out and reported; more is an error.

    Raises:
        ValueError: if too many rows are bad (the first are named by file, row and field) or no row remains.
    """
    if assistant_turns not in ("all", "last"):
        raise ValueError(f"assistant_turns must be 'all' or 'last', not {assistant_turns!r}")
    if max_length < 1:
        raise ValueError(f"max_length must be positive, not {max_length}")
    options = {
        "tokenizer": tokenizer,
        "assistant_turns": assistant_turns,
        "stop_token_ids": list(stop_token_ids) if stop_token_ids else None,
        "template_kwargs": template_kwargs,
    }
    parts, first = [], 0
    for name, dataset in (opened := open_rows(source)):
        parts.append(
            dataset.map(
                _encode_example,
                with_indices=True,
                fn_kwargs={"name": name, "first": first, "max_length": max_length, **options},
                remove_columns=dataset.column_names,
                features=ENCODED,
                num_proc=num_proc,
                desc=f"Encoding {Path(name).name}",
            )
        )
        first += len(dataset)
    encoded = concatenate_datasets(parts)

    outcome = encoded.select_columns(["supervised", "truncated", "open", "dropped", "problem"])[:]
    bad = [problem for problem in outcome["problem"] if problem]
    if len(bad) > max_bad_fraction * len(encoded):
        raise ValueError(
            f"{len(bad)} of {len(encoded)} rows are bad, more than max_bad_fraction={max_bad_fraction} allows:\n  "
            + "\n  ".join(bad[:5])
        )
    good = [not (a or b) for a, b in zip(outcome["problem"], outcome["dropped"], strict=True)]
    kept = encoded.select([i for i, is_good in enumerate(good) if is_good])
    report = DataReport(
        rows=len(encoded),
        kept=len(kept),
        truncated=sum(outcome["truncated"]),
        dropped=dict(Counter(reason for reason in outcome["dropped"] if reason)),
        bad=bad,
        open_turns=sum(is_open for is_open, is_good in zip(outcome["open"], good, strict=True) if is_good),
        supervised_tokens=sum(outcome["supervised"]),
        provenance=_read_provenance([name for name, _ in opened]),
    )
    if not len(kept):
        raise ValueError(f"data: no row is left to train on: {report}")
    if report.bad or report.dropped or report.open_turns:
        logger.warning(str(report))
    return kept.select_columns(["input_ids", "loss_mask", "row_id"]), report


@dataclass
class DraftCollator:
    """Right-pads rows into a batch of `input_ids`, `attention_mask`, `loss_mask` (all `[B, S]` int64, padding 0 in the
    masks) and `row_id` (`[B]` int64), with `document_ids` (`[B, S]`, 0 for padding) if the rows are packed."""

    pad_token_id: int

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        batch = {
            "input_ids": _pad([row["input_ids"] for row in rows], self.pad_token_id),
            "attention_mask": _pad([[1] * len(row["input_ids"]) for row in rows], 0),
            "loss_mask": _pad([row["loss_mask"] for row in rows], 0),
            "row_id": torch.tensor([stable_row_id(row["row_id"]) for row in rows]),
        }
        if "document_ids" in rows[0]:
            batch["document_ids"] = _pad([row["document_ids"] for row in rows], 0)
        return batch


def _pad(rows: list, value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.as_tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=value
    )
