"""Several rows in one: packing, anchors of packed rows, and whether a target keeps their documents apart."""

import inspect
from bisect import bisect_left, insort
from collections.abc import Callable

import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from torch import Tensor
from transformers import PreTrainedModel

from ...modeling.draft.documents import document_remaining
from .encoder import ROW, columns, stable_row_id

PACKED = Features({**ROW, "document_ids": List(Value("int32")), "document_row_ids": List(Value("int64"))})
PACK_BATCH = 2000  # rows among which those that fill a packed row are looked for
PROBE_TOKENS = 48


def pack_rows(dataset: Dataset | IterableDataset, max_length: int) -> Dataset | IterableDataset:
    """Packs training rows, so that a batch holds few padding tokens.

    Rows are neither cut nor left out: among each 2,000 rows in order, the longest first, each goes where it leaves the
    least room. A draft is trained on a packed row exactly as on its documents: same anchors, context, positions,
    labels and weights; `num_anchors` stays a document's. The target must keep documents apart: the trainer tries it.

    Args:
        dataset: rows of `input_ids`, `loss_mask`, `row_id`: a set (packed in a cached `map`) or a stream.
        max_length: longest packed row in tokens.

    Returns:
        Rows that have `document_ids` (1, 2, ... at each token) and `document_row_ids` (the ids of the rows that they
        were) too; their own `row_id` is a hash of those.

    Raises:
        ValueError: if a row is longer than `max_length`.
    """
    options = {"batched": True, "batch_size": PACK_BATCH, "fn_kwargs": {"max_length": max_length}, "features": PACKED}
    if isinstance(dataset, Dataset):
        options["desc"] = "Packing"
    return dataset.map(_pack_batch, remove_columns=list(ROW), **options)


def _pack_batch(batch: dict[str, list], max_length: int) -> dict[str, list]:
    rows = []
    for bin in best_fit([len(ids) for ids in batch["input_ids"]], max_length):
        names = [batch["row_id"][i] for i in bin]
        row = {name: [token for i in bin for token in batch[name][i]] for name in ("input_ids", "loss_mask")}
        row["row_id"] = stable_row_id("/".join(map(str, names)))
        row["document_ids"] = [number for number, i in enumerate(bin, start=1) for _ in batch["input_ids"][i]]
        row["document_row_ids"] = names
        rows.append(row)
    return columns(rows, PACKED)


def best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit-decreasing bin packing: indices of `lengths` by bin, in their order."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # free tokens of each bin, ascending, and its number
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[index] > capacity:
            raise ValueError(
                f"data: a row of {lengths[index]} tokens does not fit a packed row of max_length={capacity}: "
                "encode and pack with the same max_length"
            )
        place = bisect_left(rooms, (lengths[index], 0))
        if place == len(rooms):
            bins.append([])
            room, number = capacity, len(bins) - 1
        else:
            room, number = rooms.pop(place)
        bins[number].append(index)
        insort(rooms, (room - lengths[index], number))
    return sorted(sorted(bin) for bin in bins)


class Documents:
    """The documents of a packed batch, laid out as rows of their own.

    Args:
        batch: `loss_mask`, `attention_mask`, `document_ids` `[B, S]` and `row_id` `[B]`; `document_row_ids` `[B, D]`
            where [`pack_rows`] made it. Documents are contiguous, numbered from 1.

    Attributes:
        rows: `loss_mask`, `attention_mask` `[documents, longest]` and `row_id` `[documents]`.
    """

    def __init__(self, batch: dict[str, Tensor]):
        ids, real = batch["document_ids"], batch["attention_mask"].bool()
        begins = real.clone()
        begins[:, 1:] &= ids[:, 1:] != ids[:, :-1]
        self.batch_size = len(ids)
        self.row, self.start = begins.nonzero(as_tuple=True)
        number = (begins.cumsum(-1) - 1)[self.row, self.start]
        lengths = document_remaining(ids, real.sum(-1))[self.row, self.start] + 1
        offsets = torch.arange(int(lengths.max()), device=ids.device)
        inside = (offsets < lengths[:, None]).long()
        places = (self.start[:, None] + offsets).clamp(max=ids.shape[1] - 1)
        if "document_row_ids" in batch:
            names = batch["document_row_ids"][self.row, number]
        else:
            pairs = zip(batch["row_id"][self.row].tolist(), number.tolist(), strict=True)
            names = torch.tensor([stable_row_id(f"{row_id}/{document}") for row_id, document in pairs])
        self.rows = {
            "loss_mask": batch["loss_mask"][self.row[:, None], places] * inside,
            "attention_mask": inside,
            "row_id": names,
        }

    def placed(self) -> dict[str, Tensor]:
        """The blocks that were placed in `rows`, as blocks `[B, N]` of the packed rows; N is 1 at least."""
        keep = self.rows["block_keep_mask"]
        blocks = {"anchor_positions": self.rows["anchor_positions"] + self.start[:, None]}
        if "prefix_lengths" in self.rows:
            blocks["prefix_lengths"] = self.rows["prefix_lengths"]
        row = self.row[:, None].expand_as(keep)[keep]  # ascending, as are the positions of each row
        counts = row.bincount(minlength=self.batch_size)
        column = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        shape = (self.batch_size, max(1, int(counts.max())))
        kept = {"block_keep_mask": torch.ones_like(row, dtype=torch.bool)}
        kept |= {name: value[keep] for name, value in blocks.items()}
        return {
            name: value.new_full(shape, 1 if name == "prefix_lengths" else 0).index_put_((row, column), value)
            for name, value in kept.items()
        }


def document_leak(features: Callable[[dict[str, Tensor]], Tensor], batch: dict[str, Tensor]) -> float:
    """How much documents of a packed row change each other's features, tried on tokens of a batch.

    Args:
        features: maps a batch to the target's features `[B, S, F]`.
        batch: packed, `[B, S]`; the first tokens of its first two rows are cut into three documents.

    Returns:
        The largest distance of a token's features in the packed row from those in a row of its document's own, as a
        share of their norm.
    """
    ids = batch["input_ids"][:2, :PROBE_TOKENS]
    width = ids.shape[1]
    documents = (torch.arange(width, device=ids.device) * 3 // width + 1).expand_as(ids)
    packed = features({"input_ids": ids, "attention_mask": torch.ones_like(ids), "document_ids": documents}).float()
    alone = torch.cat(
        [
            features({"input_ids": part, "attention_mask": torch.ones_like(part)}).float()
            for part in ids.split(documents[0].bincount()[1:].tolist(), dim=1)
        ],
        dim=1,
    )
    return ((packed - alone).norm(dim=-1) / alone.norm(dim=-1)).max().item()


def check_documents_apart(
    target: PreTrainedModel, features: Callable[[dict[str, Tensor]], Tensor], batch: dict[str, Tensor]
) -> None:
    """Raises `ValueError` if a target mixes the documents of packed rows; `features` and `batch` as in
    [`document_leak`]."""
    name = type(target).__name__
    if not {"document_ids", "position_ids"} & set(inspect.signature(target.get_decoder().forward).parameters):
        raise ValueError(
            f"The rows are packed, but {name} takes no `position_ids` and cannot keep documents apart. Train with "
            "`packing` off."
        )
    leak = document_leak(features, batch)
    if leak > (1e-3 if target.dtype == torch.float32 else 0.05):
        raise ValueError(
            f"The rows are packed, but {name} cannot keep documents apart: its features change by {leak:.0%} with the "
            "documents before. Its layers carry a state along the row, or its attention "
            f"({target.config._attn_implementation}) does not heed positions that start again. Train with `packing` "
            "off, or load the target with `attn_implementation` sdpa."
        )
