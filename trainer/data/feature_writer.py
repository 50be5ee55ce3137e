"""Writes a target's states of training rows into a folder that [`FeatureStore`] reads."""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers.utils import logging

from ...modeling.ops.number_formats import dtype_name
from ...modeling.saving.atomic_save import staged_directory
from .feature_shards import FP8, STATES, Columns, Shard, ShardIndex, columns_read, row_digest, to_fp8, write_shard
from .feature_store import FORMAT, MANIFEST, SERVED, all_documents, differences, documents, read_manifest

logger = logging.get_logger(__name__)

SHARD_BYTES = 2_000_000_000  # of a shard, unless one row is larger; a process holds one of them in memory

# Runs the target on `input_ids` and `attention_mask` `[B, S]`: features and, if it is wanted, its head's input.
ReadStates = Callable[[dict[str, Tensor]], tuple[Tensor, ...]]


@dataclass
class _Row:
    """A row whose states are to be written, and where it is: the number of its set, its own there, and its document's
    in it."""

    row_id: int | str
    digest: bytes
    columns: Columns
    length: int
    place: tuple[int, int, int]


@dataclass
class FeatureWriter:
    """
    Writes what a folder lacks; all processes call it together. A shard has its name only when it is whole, so an
    interrupted run goes on where it was, and one that was damaged since is written again, alone.

    Attributes:
        directory: the folder.
        settings: which states, see [`~blockdraft.trainer.data.feature_store.states_settings`].
        target: the target's [`~blockdraft.modeling.target.target_identity.target_record`], with its tokenizer.
        read: runs the target.
        accelerator: whose processes share the rows, each with a target of its own.
        dtype: of what is written, `auto` for the states' own, `bfloat16`, or `float8_e4m3fn` with a scale for each
            position.
        batch_size: rows that the target reads at a time.
        provenance: what else the manifest says.
    """

    directory: Path
    settings: dict
    target: dict
    read: ReadStates
    accelerator: Accelerator
    dtype: str = "auto"
    batch_size: int = 8
    provenance: dict = field(default_factory=dict)

    def write(self, sets: Sequence[Dataset]) -> None:
        """
        Writes the states of all rows in `sets`, of packed rows document by document. Says first how much that is.

        Raises:
            ValueError: if the folder holds the states of another target, or has no room.
        """
        self._sets, self._manifest = sets, read_manifest(self.directory)
        self._check_manifest()
        good = self._good_shards()
        rows = self._missing_rows(ShardIndex(good))
        listed = [entry["checksum"] for entry in self._manifest["shards"]] if self._manifest else []
        if not rows and self._manifest and self._manifest["complete"] and listed == [shard.checksum for shard in good]:
            return
        sizes = [self._bytes(row) for row in rows]
        parts = list(self._parts(rows, sizes))
        self._announce(rows, sum(sizes), len(parts), good)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process and parts:
            self._write_manifest(good, complete=False)
        first, process, step = self._next_number(), self.accelerator.process_index, self.accelerator.num_processes
        self.accelerator.wait_for_everyone()
        lost = _Lost()
        progress = tqdm(total=len(rows), desc="Caching features", unit="row", disable=process > 0)
        for number, part in enumerate(parts):
            if number % step == process:
                self._write_part(f"features-{first + number:05d}.safetensors", part, lost)
            progress.update(len(part))
        progress.close()
        lost.tell()
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self._write_manifest([Shard(path) for path in self._shard_files()], complete=True)
        self.accelerator.wait_for_everyone()

    # ---- what is there ------------------------------------------------------------------------------------------

    def _shard_files(self) -> list[Path]:
        return sorted(self.directory.glob("features-[0-9]*.safetensors"))

    def _next_number(self) -> int:
        return 1 + max((int(path.stem.removeprefix("features-")) for path in self._shard_files()), default=0)

    def _check_manifest(self) -> None:
        if (manifest := self._manifest) is None:
            if self._shard_files():
                raise ValueError(f"`features`: {self.directory} has shards, but no {MANIFEST}: choose another folder.")
            return
        found = differences(manifest, self.settings, self.target)
        if manifest["stored_dtype"] != self.dtype:
            found.append(f"`features_dtype`: {manifest['stored_dtype']} there, {self.dtype} here")
        then, now = manifest.get(SERVED), self.provenance.get(SERVED)
        if then != now:  # states by an engine and by the target itself do not mix unseen
            found.append(f"`served_features`: {then or 'none'} there, {now or 'none'} here")
        if found:
            raise ValueError(
                f"`features`: {self.directory} was written with other settings ({'; '.join(found)}). Choose another "
                "folder, or the same settings."
            )
        # Rows that are added keep as much as those that are there.
        self.settings = {name: manifest[name] for name in self.settings}

    def _good_shards(self) -> list[Shard]:
        """The shards that are as they were written; others are named and removed."""
        files, damaged = self._shard_files(), []
        share = files[self.accelerator.process_index :: self.accelerator.num_processes]
        for path in tqdm(share, desc="Checking features", disable=self.accelerator.process_index > 0):
            try:
                Shard(path).check()
            except ValueError as error:
                damaged.append((path.name, str(error)))
        damaged = dict(gather_object(damaged))
        if self.accelerator.is_main_process:
            self.directory.mkdir(parents=True, exist_ok=True)
            for name, error in damaged.items():
                logger.warning(f"{error}. It is written again.")
                (self.directory / name).unlink()
            for left in self.directory.glob(".saving-*"):  # of `staged_directory`, by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        return [Shard(path) for path in self._shard_files()]

    def _missing_rows(self, index: ShardIndex) -> list[_Row]:
        rows: dict[bytes, _Row] = {}
        for number, rows_of_set in enumerate(self._sets):
            for at, part, document in all_documents(rows_of_set):
                columns = columns_read(document.loss_mask, self.settings["context_window"])
                digest = row_digest(document.input_ids)
                if same := rows.get(digest):
                    same.columns = same.columns.joined(columns) if columns.stop else same.columns
                elif columns.stop and index.find(digest, columns) is None:
                    place = (number, at, part)
                    rows[digest] = _Row(document.row_id, digest, columns, len(document.input_ids), place)
        return list(rows.values())

    # ---- how much it is -----------------------------------------------------------------------------------------

    @cached_property
    def _layout(self) -> dict[str, tuple[int, torch.dtype]]:
        """Width and dtype of the states, by name: as before, or those of the first row."""
        if self._manifest:
            dtypes = self._manifest["dtypes"]
            return {name: (width, getattr(torch, dtypes[name])) for name, width in self._manifest["widths"].items()}
        read = (document for rows in self._sets for _, _, document in all_documents(rows))
        document = next(document for document in read if columns_read(document.loss_mask, None).stop)
        states = self._run([torch.as_tensor(document.input_ids)])
        return {name: (state.shape[-1], state.dtype) for name, state in zip(STATES, states, strict=False)}

    def _stored(self, name: str) -> torch.dtype:
        return self._layout[name][1] if self.dtype == "auto" else getattr(torch, self.dtype)

    def _bytes(self, row: _Row) -> int:
        """Bytes of a row on disk."""
        counts = dict(zip(STATES, row.columns.counts, strict=True))
        sizes = {name: width * self._stored(name).itemsize for name, (width, _) in self._layout.items()}
        scale = 4 if self.dtype != "auto" and self._stored("features") == FP8 else 0
        return sum(counts[name] * (size + scale) for name, size in sizes.items())

    def _parts(self, rows: list[_Row], sizes: list[int]) -> Iterator[list[_Row]]:
        """The rows of each shard, in their order, by their bytes; enough shards for all processes."""
        most = min(SHARD_BYTES, math.ceil(sum(sizes) / self.accelerator.num_processes))
        part, size = [], 0
        for row, row_size in zip(rows, sizes, strict=True):
            if part and size + row_size > most:
                yield part
                part, size = [], 0
            part.append(row)
            size += row_size
        if part:
            yield part

    def _announce(self, rows: list[_Row], size: int, shards: int, good: list[Shard]) -> None:
        """Says what will be written before a byte is. Raises a `ValueError` if there is no room for it."""
        free, there = shutil.disk_usage(self.directory).free, sum(map(len, good))
        if self.accelerator.is_main_process:
            print(
                f"features: {size / 1e9:.3g} GB to write ({len(rows)} rows, {sum(row.length for row in rows)} tokens, "
                f"{shards} shards); {there} rows are there; {self.directory} has {free / 1e9:.3g} GB free.",
                flush=True,
            )
        if size > free:
            raise ValueError(
                f"`features`: {size / 1e9:.3g} GB are to be written, and {self.directory} has {free / 1e9:.3g} GB "
                "free. Free some, choose another folder, or write less (`features_dtype` float8_e4m3fn, `max_length`)."
            )

    # ---- writing ------------------------------------------------------------------------------------------------

    def _run(self, rows: list[Tensor]) -> tuple[Tensor, ...]:
        """The target's states of rows of token ids, padded on the right."""
        inputs = {
            "input_ids": pad_sequence(rows, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        }
        inputs = {name: value.long().to(self.accelerator.device) for name, value in inputs.items()}
        with torch.no_grad(), self.accelerator.autocast():  # as in training
            return self.read(inputs)

    def _write_part(self, name: str, part: list[_Row], lost: "_Lost") -> None:
        part = sorted(part, key=lambda row: row.length)
        counts = [sum(row.columns.counts[place] for row in part) for place in range(len(STATES))]
        states = {
            state: torch.empty(count, self._layout[state][0], dtype=self._stored(state))
            for state, count in zip(STATES, counts, strict=True)
            if state in self._layout
        }
        scales = {f"{state}_scale": torch.empty(len(kept), 1) for state, kept in states.items() if kept.dtype == FP8}
        at = dict.fromkeys(STATES, 0)
        for first in range(0, len(part), self.batch_size):
            batch = part[first : first + self.batch_size]
            computed = self._run([self._tokens(row) for row in batch])
            for number, row in enumerate(batch):
                starts = (row.columns.start, row.columns.head_start)
                for state, values, start in zip(STATES, computed, starts, strict=False):
                    values = values[number, start : row.columns.stop]
                    place = slice(at[state], at[state] + len(values))
                    if (scale := scales.get(f"{state}_scale")) is None:
                        states[state][place] = values
                        kept = states[state][place].to(values)
                    else:
                        fp8, row_scale = to_fp8(values)
                        states[state][place], scale[place] = fp8, row_scale
                        kept = fp8.float() * row_scale
                    lost.add(state, values, kept, row)
                    at[state] += len(values)
        with staged_directory(self.directory) as staging:
            write_shard(staging / name, [(row.digest, row.columns) for row in part], states | scales)

    def _tokens(self, row: _Row) -> Tensor:
        number, at, part = row.place
        return torch.as_tensor(documents(self._sets[number][at])[part].input_ids)

    def _write_manifest(self, shards: list[Shard], complete: bool) -> None:
        manifest = {"format": FORMAT, "complete": complete, "target": self.target} | self.settings | self.provenance
        manifest |= {
            "stored_dtype": self.dtype,
            "widths": {name: width for name, (width, _) in self._layout.items()},
            "dtypes": {name: dtype_name(dtype) for name, (_, dtype) in self._layout.items()},
            "rows": sum(map(len, shards)),
            "positions": sum(shard.positions for shard in shards),
            "bytes": sum(shard.path.stat().st_size for shard in shards),
            "shards": [
                {"file": shard.path.name, "rows": len(shard), "positions": shard.positions, "checksum": shard.checksum}
                for shard in shards
            ],
        }
        with staged_directory(self.directory) as staging:
            (staging / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


class _Lost:
    """What rounding takes from the states, and rows whose states are no numbers."""

    def __init__(self):
        self._sums, self._rows = {}, set()

    def add(self, name: str, values: Tensor, kept: Tensor, row: _Row) -> None:
        values, kept = values.float(), kept.float()
        if not torch.isfinite(values).all():
            self._rows.add(row.row_id)
            return
        error, total = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (error + (values - kept).square().sum().item(), total + values.square().sum().item())

    def tell(self) -> None:
        for name, (error, total) in self._sums.items():
            if error:
                print(f"{name}: rounding changes the states by {math.sqrt(error / total):.2%} (root mean square).")
        if self._rows:
            logger.warning(
                f"The target's states of {len(self._rows)} rows have NaN or Inf, among them the row "
                f"{next(iter(self._rows))}."
            )
