"""Attention of many draft blocks over the keys that they see and no others: exact, with its own backward.

A dense mask makes every block meet the keys of all blocks, and every row after its anchor, only to hide them. Here the
blocks of a row are taken in groups. A group's queries meet one slice of the context, from the first row that one of
them sees to the last (with ascending anchors, little is hidden in it), and each block's queries meet the block's own
keys. Where a small sliding window makes it cheaper, each block meets a window of its own instead of a shared slice.
Nothing but queries, keys, values and the output is kept for the backward, which computes the weights again.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.utils.generic import maybe_autocast

from .block_visibility import BlockVisibility

# A key of a window is copied before it is used, which costs a quarter more than reading it in a slice. Up to some
# width that does not count, and windows are taken where most blocks fill them: work is the same for any context then.
WINDOW_KEY_COST, SMALL_WINDOW, SMALL_WINDOW_KEY_COST = 1.25, 256, 0.9


class GroupLimits(NamedTuple):
    """When blocks no longer join a group.

    Attributes:
        scores (`int`): of a group; on a CPU they should stay in its caches.
        queries (`int`): that read the same keys; products of fewer are slow.
        hidden (`int`): keys of the slice, summed over blocks, that a block does not see: what computing them for
            nothing may cost, as against the calls for a further group. An eighth of what is seen is always allowed.
    """

    scores: int
    queries: int
    hidden: int


CPU_LIMITS, ACCELERATOR_LIMITS = GroupLimits(2**19, 128, 256), GroupLimits(2**26, 1024, 4096)


class BlockGroup(NamedTuple):
    """Blocks that are computed together.

    Attributes:
        row, start, stop (`int`): blocks `start` to `stop` - 1 of that row of the batch.
        low, high (`int`): the slice of the context, all that one of the queries sees; 0, 0 where windows are used.
        clear_low, clear_high (`int`): the part of the slice that every query sees, so that nothing is to be hidden;
            empty where the first is not below the second.
    """

    row: int
    start: int
    stop: int
    low: int
    high: int
    clear_low: int
    clear_high: int


@dataclass(frozen=True)
class VisibleKeys(BlockVisibility):
    """What the slots of many blocks see and how it is computed; made once a batch, for all layers with that window.

    Attributes:
        groups (`list[BlockGroup]`): covers all blocks.
        window (`int`, *optional*): rows of a window of each block's own, which takes the place of the groups' slices.
        rows (`[S + N * block_size]` int64): numbers of the keys, 0, 1, ...
        later (`[block_size, block_size]` bool): which slots (columns) come after a slot.
    """

    groups: list[BlockGroup]
    window: int | None
    rows: Tensor
    later: Tensor


def plan_visible_keys(
    visible: BlockVisibility, num_heads: int, shared_by: int, device: torch.device | None = None
) -> VisibleKeys:
    """Chooses groups or windows, and the groups. Reads the intervals on the host, which waits for their device.

    Args:
        visible ([`BlockVisibility`]): what N blocks in B rows see.
        num_heads (`int`): heads of the queries.
        shared_by (`int`): heads that have a key in common.
        device: where it will be computed; by default where `visible` is.
    """
    size, device = visible.block_size, visible.last.device if device is None else device
    limits = CPU_LIMITS if device.type == "cpu" else ACCELERATOR_LIMITS
    bounds = torch.stack([visible.first.amin(-1), visible.first.amax(-1), visible.last], dim=-1).tolist()
    groups = [
        group
        for row, blocks in enumerate(bounds)
        for group in _group_blocks(row, blocks, num_heads * size, shared_by * size, limits)
    ]
    widest = max((last - first for blocks in bounds for first, _, last in blocks), default=0)
    window = choose_window(groups, widest)
    if window is not None:
        together = max(limits.scores // (num_heads * size * (window + size)), 1)
        groups = [
            BlockGroup(row, start, min(start + together, len(blocks)), 0, 0, 0, 0)
            for row, blocks in enumerate(bounds)
            for start in range(0, len(blocks), together)
        ]
    rows = torch.arange(visible.context_length + visible.last.shape[1] * size, device=visible.last.device)
    later = torch.ones(size, size, dtype=torch.bool, device=rows.device).triu(1)
    return VisibleKeys(**vars(visible), groups=groups, window=window, rows=rows, later=later)


def choose_window(groups: list[BlockGroup], widest: int) -> int | None:
    """`widest`, the rows of context that the block with most of them sees, if a window of that size for each block
    is cheaper than the slices of `groups`; else `None`."""
    in_slices = sum((group.stop - group.start) * (group.high - group.low) for group in groups)
    in_windows = sum(group.stop - group.start for group in groups) * widest
    key_cost = SMALL_WINDOW_KEY_COST if widest <= SMALL_WINDOW else WINDOW_KEY_COST
    return widest if in_windows * key_cost < in_slices else None


def _group_blocks(
    row: int, bounds: list[list[int]], block_queries: int, block_readers: int, limits: GroupLimits
) -> list[BlockGroup]:
    """The groups of a row, of whose blocks `bounds` are the least and the greatest first row that a slot sees, and the
    end of what they see. A block has `block_queries` queries in all heads; `block_readers` of them share a key."""
    groups, seen = [], 0
    for index, (first, latest_first, last) in enumerate(bounds):
        new = BlockGroup(row, index, index + 1, first, last, latest_first, last)
        # Blocks that see no context, such as padded ones, would make the others' mask a full one.
        if groups and (groups[-1].high > groups[-1].low) == (last > first):
            old = groups[-1]
            low, high = min(old.low, new.low), max(old.high, new.high)
            clear = max(old.clear_low, new.clear_low), min(old.clear_high, new.clear_high)
            joined = BlockGroup(row, old.start, new.stop, low, high, *clear)
            blocks = joined.stop - joined.start
            keys, seen_by_all = blocks * (joined.high - joined.low), seen + last - first
            if (
                keys * block_queries <= limits.scores
                and blocks * block_readers <= limits.queries
                and keys - seen_by_all <= max(seen_by_all // 8, limits.hidden)
            ):
                groups[-1], seen = joined, seen_by_all
                continue
        groups.append(new)
        seen = last - first
    return groups


# Its groups differ from batch to batch, and torch.compile would make code of each: compiled layers call it as it is.
@torch.compiler.disable
def attend_visible(
    queries: Tensor,
    keys: Tensor,
    values: Tensor | None,
    visible: VisibleKeys,
    scaling: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """
    Args:
        queries: `[B, n, Q, d]` of Q = N * block_size slots.
        keys: `[B, m, S + Q, d]`, m = n or 1 (one key for all heads) or between, as in grouped-query attention.
        values: `[B, m, S + Q, dv]`; `None`: the keys are the values too.
        visible: who sees what.
        scaling: of the scores.
        sinks: `[n]`, logits that take part in the softmax of their head and have no value.

    Returns:
        `[B, Q, n, dv]` in the queries' dtype.
    """
    batch, heads, length, _ = queries.shape
    kv_heads, size = keys.shape[1], visible.block_size
    shared_by, blocks = heads // kv_heads, length // size
    # Heads with a common key are further queries of it: the R = block_size * n / m rows of a block.
    rows = queries.unflatten(2, (blocks, size)).unflatten(1, (kv_heads, shared_by)).permute(0, 1, 3, 4, 2, 5)
    if sinks is not None:
        sinks = sinks.view(kv_heads, 1, shared_by).expand(-1, size, -1).flatten(1)
    with maybe_autocast(queries.device.type, enabled=False):
        keys = keys.to(queries.dtype)
        values = None if values is None else values.to(queries.dtype)
        output = _VisibleAttention.apply(rows.flatten(3, 4), keys, values, sinks, visible, scaling)
    output = output.permute(0, 2, 3, 1, 4).unflatten(2, (size, shared_by)).transpose(3, 4)
    return output.reshape(batch, length, heads, -1)


class _VisibleAttention(torch.autograd.Function):
    """`[B, m, N, R, d]` queries, `[B, m, S + Q, d]` keys and so on, `[m, R]` sinks -> `[B, m, N, R, dv]`."""

    @staticmethod
    def forward(ctx, queries, keys, values, sinks, visible: VisibleKeys, scaling: float):
        ctx.visible, ctx.scaling = visible, scaling
        batch, kv_heads, blocks, rows, _ = queries.shape
        width = (keys if values is None else values).shape[-1]
        # In memory the heads of a slot stand together, as the projection of the output reads them.
        output = queries.new_empty(batch, blocks, rows, kv_heads, width).permute(0, 3, 1, 2, 4)
        for group in visible.groups:
            part = _Part(visible, group)
            split = part.keys(keys)
            weights = part.weights(part.queries(queries, scaling), split, sinks).to(queries.dtype)
            part.of(output).copy_(part.combine(weights, split if values is None else part.keys(values)))
        ctx.save_for_backward(queries, keys, values, sinks, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        queries, keys, values, sinks, output = ctx.saved_tensors
        visible, scaling = ctx.visible, ctx.scaling
        grad_queries = torch.empty_like(queries)
        # Half precision would lose what many groups add to a row.
        sums = torch.promote_types(keys.dtype, torch.float32)
        grad_keys = torch.zeros(keys.shape, dtype=sums, device=keys.device)
        grad_values = grad_keys if values is None else torch.zeros(values.shape, dtype=sums, device=keys.device)
        grad_sinks = None if sinks is None else torch.zeros_like(sinks)
        with maybe_autocast(queries.device.type, enabled=False):
            for group in visible.groups:
                part = _Part(visible, group)
                scaled, grad = part.queries(queries, scaling), part.queries(grad_output)
                split = part.keys(keys)
                weights = part.weights(scaled, split, sinks)
                # d score = weight * (d weight - sum of weight * d weight over the keys), the sum from the output.
                along = (grad * part.of(output)).sum(-1, keepdim=True, dtype=sums)
                grad_weights = part.products(grad, split if values is None else part.keys(values), weights.shape[-1])
                if sinks is not None:
                    grad_weights[..., -1] = 0
                grad_scores = grad_weights.to(sums).sub_(along).mul_(weights)
                if sinks is not None:
                    grad_sinks += grad_scores[..., -1].sum(1).to(sinks.dtype)
                grad_scores = grad_scores.to(queries.dtype)
                torch.mul(part.combine(grad_scores, split), scaling, out=part.of(grad_queries))
                part.add_transposed(grad_keys, grad_scores, scaled)
                part.add_transposed(grad_values, weights.to(queries.dtype), grad)
        grad_values = None if values is None else grad_values.to(values.dtype)
        return grad_queries, grad_keys.to(keys.dtype), grad_values, grad_sinks, None, None


class _Piece(NamedTuple):
    """Keys of a group: which columns of its scores they are, the rows of the keys, and in how many windows (1: all
    blocks of the group read all of them)."""

    columns: slice
    rows: slice | Tensor
    windows: int

    def of(self, tensor: Tensor) -> Tensor:
        """`[m, G, R, columns of all pieces]` -> its view `[m * windows, G / windows * R, columns of this one]`."""
        return tensor.view(tensor.shape[0] * self.windows, -1, tensor.shape[-1])[..., self.columns]


class _Part:
    """One group's share of the tensors: G blocks of R queries, W rows of context in the slice or in each window."""

    def __init__(self, visible: VisibleKeys, group: BlockGroup):
        self.visible, self.group, size, blocks = visible, group, visible.block_size, group.stop - group.start
        self.blocks = slice(group.start, group.stop)
        first, last = visible.first[group.row, self.blocks], visible.last[group.row, self.blocks]
        self.first, self.last = first[..., None], last[:, None, None]  # [G, block_size or 1, 1] and [G, 1, 1]
        start = visible.context_length + group.start * size
        own = slice(start, start + blocks * size)
        self.width = group.high - group.low if visible.window is None else visible.window
        self.num_keys = self.width + size
        if visible.window is None:
            in_context = _Piece(slice(0, self.width), slice(group.low, group.high), 1)
            in_block = _Piece(slice(self.width, self.num_keys), own, blocks)
            self.pieces = [in_context, in_block] if self.width else [in_block]
        else:
            starts = first.amin(-1, keepdim=True).clamp(max=visible.context_length - self.width)
            self.window = starts + visible.rows[: self.width]
            rows = torch.cat([self.window, visible.rows[own].view(blocks, size)], dim=1)
            self.pieces = [_Piece(slice(0, self.num_keys), rows, blocks)]

    def of(self, tensor: Tensor) -> Tensor:
        """`[B, m, N, R, d]` -> its view `[m, G, R, d]`."""
        return tensor[self.group.row, :, self.blocks]

    def queries(self, queries: Tensor, scaling: float = 1.0) -> Tensor:
        """`[B, m, N, R, d]` -> `[m, G, R, d]`, scaled, contiguous."""
        queries = self.of(queries)
        return torch.mul(queries, scaling, out=queries.new_empty(queries.shape))

    def keys(self, keys: Tensor) -> list[Tensor]:
        """`[B, m, S + Q, d]` -> of each piece `[m * windows, rows, d]`, a view where blocks share them."""
        keys = keys[self.group.row]
        return [
            keys[:, rows].reshape(len(keys) * windows, columns.stop - columns.start, -1)
            for columns, rows, windows in self.pieces
        ]

    def products(self, queries: Tensor, keys: list[Tensor], columns: int) -> Tensor:
        """`[m, G, R, d]` with the keys -> `[m, G, R, columns]`; a column for the sink is left as it is."""
        output = queries.new_empty(*queries.shape[:3], columns)
        for piece, rows in zip(self.pieces, keys, strict=True):
            scores = piece.of(output)
            torch.bmm(queries.view(*scores.shape[:2], -1), rows.transpose(1, 2), out=scores)
        return output

    def weights(self, queries: Tensor, keys: list[Tensor], sinks: Tensor | None) -> Tensor:
        """The softmax over context, own block and sink `[m, G, R, W + block_size (+ 1)]`, at least in fp32."""
        size = self.visible.block_size
        scores = self.products(queries, keys, self.num_keys + (sinks is not None))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        by_slot = scores.unflatten(2, (size, -1))
        for columns, rows in self._borders():
            hidden = (rows < self.first) | (rows >= self.last)  # [G, block_size, columns]
            by_slot[..., columns].masked_fill_(hidden.unsqueeze(2), float("-inf"))
        if self.visible.causal:
            by_slot[..., self.width : self.num_keys].masked_fill_(self.visible.later.unsqueeze(1), float("-inf"))
        if sinks is not None:
            scores[..., -1] = sinks.unsqueeze(1)
        return torch.softmax(scores, dim=-1)

    def combine(self, weights: Tensor, values: list[Tensor]) -> Tensor:
        """`[m, G, R, W + block_size (+ 1)]` weights of the values -> `[m, G, R, dv]`."""
        sums = [
            torch.bmm(piece.of(weights), rows).view(*weights.shape[:3], -1)
            for piece, rows in zip(self.pieces, values, strict=True)
        ]
        return sums[0] if len(sums) == 1 else sums[0].add_(sums[1])

    def add_transposed(self, total: Tensor, weights: Tensor, queries: Tensor) -> None:
        """Adds to each key of `total` `[B, m, S + Q, d]` the queries `[m, G, R, d]` by the weights that it has."""
        row, (heads, keys, width) = self.group.row, total.shape[1:]
        for piece in self.pieces:
            by_key = piece.of(weights).transpose(1, 2)
            added = torch.bmm(by_key, queries.view(len(by_key), -1, width))
            if isinstance(piece.rows, slice):
                total[row, :, piece.rows] += added.view(heads, -1, width)
            else:
                first = (row * heads + torch.arange(heads, device=total.device)) * keys
                index = (first[:, None] + piece.rows.flatten()).flatten()
                total.view(-1, width).index_add_(0, index, added.flatten(0, 1).to(total.dtype))

    def _borders(self) -> list[tuple[slice, Tensor]]:
        """Columns of the context in which something is hidden, and the context rows that they are."""
        if self.visible.window is not None:
            return [(slice(0, self.width), self.window.unsqueeze(1))]
        group = self.group
        low, high = max(group.clear_low, group.low), min(group.clear_high, group.high)
        borders = [(group.low, low), (high, group.high)] if low < high else [(group.low, group.high)]
        return [
            (slice(start - group.low, stop - group.low), self.visible.rows[start:stop])
            for start, stop in borders
            if start < stop
        ]
