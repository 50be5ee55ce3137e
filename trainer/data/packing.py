"""Several rows in one, so that a batch holds few padding tokens."""

from bisect import bisect_left, insort

from datasets import Dataset, Features, IterableDataset, List, Value

from .encoder import ROW, columns, stable_row_id

NAMES = ("input_ids", "loss_mask", "row_id")
PACKED = Features(
    {name: ROW[name] for name in NAMES}
    | {"document_ids": List(Value("int32")), "document_row_ids": List(Value("int64"))}
)
PACK_BATCH = 2000  # rows among which those that fill a packed row are looked for


def pack_rows(dataset: Dataset | IterableDataset, max_length: int) -> Dataset | IterableDataset:
    """Packs training rows, a set (in a cached `map`) or a stream, into rows of at most `max_length` tokens.

    Rows are neither cut nor left out: among each 2,000 rows in order, the longest first, each goes where it leaves the
    least room. A draft is trained on a packed row exactly as on its documents: same anchors, context, positions,
    labels and weights; `num_anchors` counts for each document. The target must keep documents apart, which the trainer
    checks on the first packed batch.

    Returns:
        Rows that have `document_ids` (1, 2, ... at each token) and `document_row_ids` (the ids of the rows that they
        were) too; their own `row_id` is a hash of those.

    Raises:
        ValueError: if a row is longer than `max_length`, or the rows lack a column of those that `prepare_dataset`
            makes.
    """
    needed, given = ("input_ids", "loss_mask", "row_id"), dataset.column_names
    if missing := [name for name in needed if given is not None and name not in given]:
        raise ValueError(f"data: the rows have no `{'`, no `'.join(missing)}`: pack what `prepare_dataset` makes.")
    options = {"batched": True, "batch_size": PACK_BATCH, "fn_kwargs": {"max_length": max_length}, "features": PACKED}
    if isinstance(dataset, Dataset):
        options["desc"] = "Packing"
    return dataset.select_columns(list(NAMES)).map(_pack_batch, remove_columns=list(NAMES), **options)


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
