"""Files of a target's states: which positions of a row are kept, and how one shard is written and read.

A shard is one safetensors file with the rows one after the other:

| tensor | shape | |
| --- | --- | --- |
| `features`, `head_input` | `[positions, width]` | what the draft reads, and what the target's head reads |
| `features_scale`, `head_input_scale` | `[positions, 1]` fp32 | with FP8: what a position is multiplied by |
| `digest` | `[rows, 16]` uint8 | XXH3-128 of a row's tokens, by which it is found |
| `columns` | `[rows, 3]` int64 | [`Columns`] of the row |
| `checksum` | `[rows, 8]` uint8 | XXH3-64 of all that is kept of the row |

`head_input` is there where the objective needs it. The header holds the checksum of the last three.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...modeling.ops.cache_rounding import E4M3_MAX, SMALLEST_NORMAL, round_to_e4m3

STATES = ("features", "head_input")
INDEX = ("digest", "columns", "checksum")
INDEX_CHECKSUM = "index_checksum"
FP8 = torch.float8_e4m3fn


class Columns(NamedTuple):
    """Positions of a row: features are kept from `start`, what the head reads from `head_start`, both to `stop`."""

    start: int
    head_start: int
    stop: int

    def covers(self, other: "Columns") -> bool:
        return self.start <= other.start and self.head_start <= other.head_start and other.stop <= self.stop

    def joined(self, other: "Columns") -> "Columns":
        starts = min(self.start, other.start), min(self.head_start, other.head_start)
        return Columns(*starts, max(self.stop, other.stop))

    @property
    def counts(self) -> tuple[int, int]:
        """How many positions there are of features and of what the head reads."""
        return self.stop - self.start, self.stop - self.head_start


class RowStates(NamedTuple):
    """What is kept of a row: `features` `[columns.counts[0], F * hidden_size]` and, if the objective needs it,
    `head_input` `[columns.counts[1], hidden_size]`, both in the target's dtype."""

    columns: Columns
    features: Tensor
    head_input: Tensor | None


def columns_read(loss_mask: Sequence[int], window: int | None) -> Columns:
    """
    The positions that blocks of a row may read, wherever their anchors are drawn. An anchor is supervised and its
    context lies before it; its slots are compared with what the target predicts for supervised tokens.

    Args:
        loss_mask: of the row, not padded.
        window: context positions before an anchor that the draft reads; `None`: all.
    """
    supervised = np.flatnonzero(np.asarray(loss_mask))
    if not len(supervised):
        return Columns(0, 0, 0)
    first, stop = int(supervised[0]), int(supervised[-1])
    return Columns(0 if window is None else max(0, first - window), first, stop)


def row_digest(input_ids: Sequence[int]) -> bytes:
    """What a row is found by: data sets that were joined may have the same row ids."""
    return xxhash.xxh3_128_digest(np.ascontiguousarray(input_ids, dtype="<i4"))


def to_fp8(states: Tensor) -> tuple[Tensor, Tensor]:
    """States `[n, width]` as E4M3 numbers and a scale for each position, `[n, 1]` fp32."""
    scale = states.float().abs().amax(-1, keepdim=True).clamp(min=E4M3_MAX * SMALLEST_NORMAL) / E4M3_MAX
    return round_to_e4m3(states.float() / scale), scale


def write_shard(path: Path, rows: Iterable[tuple[bytes, Columns]], states: dict[str, Tensor]) -> None:
    """Writes a shard from its rows' digests and columns, and their `states` (see this module), whose positions follow
    each other in the order of the rows."""
    digests, columns = zip(*rows, strict=True)
    columns = torch.tensor(columns)
    checksums = [list(_checksum(states, *place)) for place in _places(columns.numpy())]
    index = {
        "digest": torch.tensor([list(digest) for digest in digests], dtype=torch.uint8),
        "columns": columns,
        "checksum": torch.tensor(checksums, dtype=torch.uint8),
    }
    save_file(states | index, path, metadata={INDEX_CHECKSUM: _index_checksum(index)})


class Shard:
    """A shard that was written. Raises a `ValueError` that names the file if it is missing or damaged."""

    def __init__(self, path: Path):
        self.path = path
        try:
            # Its numbers stay on disk until they are read.
            self._file = safe_open(path, framework="pt")
            self._names = sorted(set(self._file.keys()) - set(INDEX))
            index = {name: self._file.get_tensor(name) for name in INDEX}
            metadata = self._file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path}: the shard cannot be read ({error})") from error
        if metadata.get(INDEX_CHECKSUM) != _index_checksum(index):
            raise ValueError(f"{path}: the shard's index is damaged")
        self.checksum = metadata[INDEX_CHECKSUM]
        self.digests = [row.tobytes() for row in index["digest"].numpy()]
        self._columns, self._checksums = index["columns"].numpy(), index["checksum"].numpy()
        self._places = list(_places(self._columns))

    def __len__(self) -> int:
        return len(self.digests)

    def columns(self, row: int) -> Columns:
        return Columns(*self._columns[row].tolist())

    @property
    def positions(self) -> int:
        return int((self._columns[:, 2] - self._columns[:, 0]).sum())

    def check(self) -> None:
        """Reads all of it. Raises a `ValueError` if it is not what was written."""
        for row in range(len(self)):
            self._parts(row)

    def read(self, row: int, dtypes: Mapping[str, torch.dtype]) -> RowStates:
        """The states of a row, in a dtype for each of `STATES`. Raises a `ValueError` if they are not what was
        written."""
        parts = self._parts(row)

        def decoded(name: str) -> Tensor | None:
            if (states := parts.get(name)) is None or states.dtype != FP8:
                return None if states is None else states.to(dtypes[name])
            return (states.float() * parts[f"{name}_scale"]).to(dtypes[name])

        return RowStates(self.columns(row), *map(decoded, STATES))

    def _parts(self, row: int) -> dict[str, Tensor]:
        start, count, head_start, head_count = self._places[row]
        slices = {"features": slice(start, start + count), "head_input": slice(head_start, head_start + head_count)}
        parts = {name: self._file.get_slice(name)[slices[name.removesuffix("_scale")]] for name in self._names}
        if _checksum(parts, 0, count, 0, head_count) != self._checksums[row].tobytes():
            raise ValueError(f"{self.path}: the shard is damaged at its row {row}")
        return parts


def _index_checksum(index: dict[str, Tensor]) -> str:
    digest = xxhash.xxh3_64()
    for name in INDEX:
        digest.update(_bytes(index[name]))
    return digest.hexdigest()


def _places(columns: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """Where each row lies in `features` and in `head_input`: first position and count of each."""
    start = head_start = 0
    for row in columns.tolist():
        count, head_count = Columns(*row).counts
        yield start, count, head_start, head_count
        start, head_start = start + count, head_start + head_count


def _checksum(states: dict[str, Tensor], start: int, count: int, head_start: int, head_count: int) -> bytes:
    digest = xxhash.xxh3_64()
    for name in sorted(states):
        first, number = (start, count) if name.startswith("features") else (head_start, head_count)
        digest.update(_bytes(states[name][first : first + number]))
    return digest.digest()


def _bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a contiguous CPU tensor, not copied."""
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8).flatten().numpy()


class ShardIndex:
    """Finds rows in shards; where several have a row, in the last one that has all of it that is wanted."""

    def __init__(self, shards: Sequence[Shard]):
        self._shards = shards
        halves = np.frombuffer(b"".join(digest for shard in shards for digest in shard.digests), "<u8").reshape(-1, 2)
        places = [(number, row) for number, shard in enumerate(shards) for row in range(len(shard))]
        order = np.argsort(halves[:, 0], kind="stable")
        self._digests, self._places = halves[order], np.array(places, dtype=np.int32).reshape(-1, 2)[order]

    def find(self, digest: bytes, columns: Columns) -> tuple[Shard, int] | None:
        """The shard of a row and its number there; `None` if no shard has it at these columns."""
        first, second = np.frombuffer(digest, "<u8")
        halves = self._digests[:, 0]
        same = slice(np.searchsorted(halves, first), np.searchsorted(halves, first, side="right"))
        for number, row in reversed(self._places[same][self._digests[same, 1] == second].tolist()):
            if self._shards[number].columns(row).covers(columns):
                return self._shards[number], row
        return None
