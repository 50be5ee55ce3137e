"""The blocks of a batch: where they are, what they hold, what their slots learn and see.

All of it is made once a batch, on the CPU and before any forward, so that the host never waits for a device behind the
target's forward.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..configuration.configuration_draft import DraftConfig
from ..modeling.draft.anchors import Anchors, legal_anchors, legal_dspark_anchors, sample_anchors
from ..modeling.draft.block_targets import build_block_inputs, build_block_targets, build_dspark_targets
from ..modeling.draft.block_visibility import BlockPlan
from ..modeling.draft.documents import document_positions, document_remaining
from ..modeling.draft.modeling_draft import DraftPreTrainedModel
from ..modeling.draft.prefix_lengths import sample_prefix_lengths
from .data.encoder import stable_row_id
from .objectives.slot_targets import SlotTargets, slot_targets

# Of a batch, what blocks are made of; the last three only where the caller has placed them.
ROWS = ("input_ids", "attention_mask", "loss_mask", "row_id", "document_ids", "document_row_ids")
GIVEN = ("anchor_positions", "block_keep_mask", "prefix_lengths")


@dataclass(frozen=True)
class BlockBatch:
    """The blocks of B rows, N of them in each.

    Attributes:
        anchor_positions (`[B, N]` int64): ascending in each row, 0 for padded blocks.
        block_keep_mask (`[B, N]` bool): False for padded blocks.
        input_ids (`[B, N * block_size]` int64): the known tokens of each block, then mask tokens.
        targets ([`SlotTargets`]): what the slots learn.
        plan ([`BlockPlan`]): what the slots see, for the draft's forward.
        row_counts (`[3]` int64): rows, rows without a block, mask tokens among the supervised tokens.
        previous_token_ids (`[B, N, block_size]` int64, *optional*): the true token before each slot's label, where
            slot 0 predicts too.
        position_ids (`[B, S + N * block_size]` int64, *optional*): of packed rows: positions of context and slots in
            their own documents.
    """

    anchor_positions: Tensor
    block_keep_mask: Tensor
    input_ids: Tensor
    targets: SlotTargets
    plan: BlockPlan
    row_counts: Tensor
    previous_token_ids: Tensor | None = None
    position_ids: Tensor | None = None

    def to(self, device: torch.device) -> "BlockBatch":
        """The same on another device. The host does not wait for the copies."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        moved = {name: part.to(device, non_blocking=True) for name, part in parts.items() if part is not None}
        return replace(self, **moved)


def build_block_batch(
    batch: dict[str, Tensor],
    draft: DraftPreTrainedModel,
    *,
    step: int,
    seed: int,
    num_anchors: int,
    gamma: float | None = None,
    prefix_weight_base: float | None = None,
    device: torch.device | None = None,
) -> BlockBatch:
    """Places the blocks of a batch and makes all that follows from their places.

    Args:
        batch: see [`~blockdraft.trainer.draft_trainer.DraftTrainer`].
        draft: whose `config` says what a block is, and which plans its attention.
        step, seed, num_anchors: of [`~blockdraft.modeling.draft.anchors.sample_anchors`].
        gamma: decay of the weights, see [`~blockdraft.trainer.objectives.slot_targets.slot_weights`].
        prefix_weight_base: draws how many tokens of each block are known, see
            [`~blockdraft.modeling.draft.prefix_lengths.sample_prefix_lengths`]. Default: the anchor alone is known.
        device: where the draft's forward will run. Default: where it is.

    Returns:
        [`BlockBatch`] on the CPU. N is at least 1: without a legal anchor there is one padded block, so that the
        forward runs and every parameter gets a (zero) gradient, for which other ranks wait.

    Raises:
        ValueError: if the batch has no `input_ids` or `loss_mask`, or if anchors have to be drawn and it has no
            `attention_mask` or `row_id`.
    """
    config, size = draft.config, draft.config.block_size
    needed = ("input_ids", "loss_mask") if "anchor_positions" in batch else ROWS[:3]
    if missing := [name for name in needed if name not in batch]:
        raise ValueError(f"The batch has no `{'`, no `'.join(missing)}`: collate rows with `DraftCollator`.")
    batch = {name: batch[name].cpu() for name in (*ROWS, *GIVEN) if name in batch}
    placed = _draw_blocks(batch, config, step, seed, num_anchors, prefix_weight_base)
    anchors = (placed["anchor_positions"], placed["block_keep_mask"])
    ids, mask, documents = batch["input_ids"], batch["loss_mask"], batch.get("document_ids")
    remaining = None if documents is None else document_remaining(documents, batch["attention_mask"].sum(-1))
    if config.sample_from_anchor:
        known = 1
        labels = build_dspark_targets(ids, mask, *anchors, size, remaining)
        targets, previous = slot_targets(labels.token_ids, labels.mask, 0, gamma), labels.previous_token_ids
    else:
        known = placed.get("prefix_lengths", 1)
        labels = build_block_targets(ids, mask, *anchors, size, document_remaining=remaining)
        targets, previous = slot_targets(labels.token_ids, labels.mask, known, gamma), None
    position_ids = None
    if documents is not None:
        # They start again in each document even where only distances count: a draft may round its rotated keys.
        positions = document_positions(documents)
        slots = positions.gather(1, anchors[0])[..., None] + torch.arange(size)
        position_ids = torch.cat([positions, slots.flatten(1)], dim=1)
    without_block = (~anchors[1].any(-1)).sum()
    masks_in_answers = ((ids == config.mask_token_id) & mask.bool()).sum()
    return BlockBatch(
        *anchors,
        input_ids=build_block_inputs(ids, *anchors, size, config.mask_token_id, known, remaining),
        targets=targets,
        plan=draft.plan_blocks(*anchors, ids.shape[1], documents, device),
        row_counts=torch.stack([torch.tensor(len(ids)), without_block, masks_in_answers]),
        previous_token_ids=previous,
        position_ids=position_ids,
    )


def _draw_blocks(
    rows: dict[str, Tensor], config: DraftConfig, step: int, seed: int, num_anchors: int, prefix_base: float | None
) -> dict[str, Tensor]:
    """`anchor_positions`, `block_keep_mask` and, if asked for, `prefix_lengths`, `[B, N]`, as given or drawn."""
    if "document_ids" in rows and "anchor_positions" not in rows:
        # Each document gets the blocks that it would get in a row of its own.
        documents = Documents(rows)
        return documents.in_packed_rows(_draw_blocks(documents.rows, config, step, seed, num_anchors, prefix_base))
    placed = {name: rows[name] for name in GIVEN if name in rows}
    if "anchor_positions" not in placed:
        mask, lengths = rows["loss_mask"], rows["attention_mask"].sum(-1)
        if config.sample_from_anchor:
            # The reference pads each row to exactly `num_anchors` blocks. A padded block sees and is seen by itself
            # alone, has weight 0 and is not counted in the experts' load: a batch as wide as its richest row gives the
            # same loss and gradients, without the padding's cost.
            legal = legal_dspark_anchors(mask, lengths)
        else:
            legal = legal_anchors(mask, config.block_size, lengths)
        anchors = sample_anchors(legal, num_anchors, seed, step, _row_ids(rows))
        if anchors.keep.shape[1] == 0:
            anchors = Anchors(*(pad(tensor, (0, 1)) for tensor in anchors))
        placed |= {"anchor_positions": anchors.positions, "block_keep_mask": anchors.keep}
    if prefix_base is not None and "prefix_lengths" not in placed:
        keep, row_ids = placed["block_keep_mask"], _row_ids(rows)
        placed["prefix_lengths"] = sample_prefix_lengths(keep, config.block_size, prefix_base, seed, step, row_ids)
    return placed


def _row_ids(rows: dict[str, Tensor]) -> list[int]:
    if "row_id" not in rows:
        raise ValueError(
            "The batch has no `row_id`, by which anchors are drawn: give every row of the dataset a stable id."
        )
    return rows["row_id"].tolist()


class Documents:
    """The documents of a packed batch, contiguous and numbered from 1, laid out as `rows` of their own: `loss_mask`,
    `attention_mask` `[documents, longest]` and `row_id` `[documents]`."""

    def __init__(self, batch: dict[str, Tensor]):
        ids, real = batch["document_ids"], batch["attention_mask"].bool()
        begins = real.clone()
        begins[:, 1:] &= ids[:, 1:] != ids[:, :-1]
        self._batch_size = len(ids)
        self._row, self._start = begins.nonzero(as_tuple=True)
        number = (begins.cumsum(-1) - 1)[self._row, self._start]
        lengths = document_remaining(ids, real.sum(-1))[self._row, self._start] + 1
        offsets = torch.arange(int(lengths.max()))
        inside = (offsets < lengths[:, None]).long()
        places = (self._start[:, None] + offsets).clamp(max=ids.shape[1] - 1)
        if "document_row_ids" in batch:
            names = batch["document_row_ids"][self._row, number]
        else:
            pairs = zip(batch["row_id"][self._row].tolist(), number.tolist(), strict=True)
            names = torch.tensor([stable_row_id(f"{row_id}/{document}") for row_id, document in pairs])
        self.rows = {
            "loss_mask": batch["loss_mask"][self._row[:, None], places] * inside,
            "attention_mask": inside,
            "row_id": names,
        }

    def in_packed_rows(self, placed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Blocks `[documents, N]` of `rows`, as blocks `[B, N]` of the packed rows; N is 1 at least."""
        keep = placed["block_keep_mask"]
        blocks = placed | {"anchor_positions": placed["anchor_positions"] + self._start[:, None]}
        row = self._row[:, None].expand_as(keep)[keep]  # ascending, as are the positions of each row
        counts = row.bincount(minlength=self._batch_size)
        column = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        shape = (self._batch_size, max(1, int(counts.max())))
        return {
            name: value.new_full(shape, name == "prefix_lengths").index_put_((row, column), value[keep])
            for name, value in blocks.items()
        }
