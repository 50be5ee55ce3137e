"""CSA2, DeepSeek V4.1's attention: a window plus compressed keys of older tokens, chosen by an indexer; its cache.

Layers with a compression ratio come in three kinds. A Full layer compresses keys anew and chooses among them, a
Reindex layer chooses anew among the keys of the Full layer below, a Reuse layer takes over keys and choice. What they
pass on is a [`CompressedState`].
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from ...configuration.configuration_deepseek_v41 import DEEPSEEK_V41_ATTENTION, DeepseekV41TextConfig
from ..ops.fp32 import Fp32Linear
from ..ops.number_formats import round_to_mxfp4, round_to_nvfp4
from ..target.cache_rollback import check_crop
from .deepseek_v41_layers import DeepseekV41RMSNorm, DeepseekV41WindowAttention, rotate
from .token_plan import GroupPlan, Movable, TokenPlan


def select_best(scores: Tensor, count: int) -> Tensor:
    """Marks `[..., C]` the `count` highest scores `[..., C]` of each row, the earlier one where they are equal, never
    -inf: a choice that does not depend on how long the row is, so that decoding and a full forward agree."""
    if count < scores.shape[-1]:
        least = scores.topk(count, dim=-1).values[..., -1:]
        above, equal = scores > least, scores == least
        room = count - above.sum(-1, keepdim=True)
        scores = scores.masked_fill(~(above | (equal & (equal.cumsum(-1) <= room))), -math.inf)
    return scores > -math.inf


def candidate_blocks(scores: Tensor, visible_groups: Tensor, block_size: int, num_blocks: int) -> Tensor:
    """
    The blocks of groups among which later layers may choose: the best by their best group, the newest always.

    Args:
        scores: `[B, S, C]`, -inf where a group must not be seen.
        visible_groups: `[B or 1, S]`, complete groups at each query.
        block_size, num_blocks: groups of a block, and blocks that are kept.

    Returns:
        `[B, S, C]` bool, of groups.
    """
    width = scores.shape[-1]
    blocks = nn.functional.pad(scores, (0, -width % block_size), value=-math.inf).unflatten(-1, (-1, block_size))
    best = blocks.amax(-1)
    newest = torch.div(visible_groups - 1, block_size, rounding_mode="floor")
    numbers = torch.arange(best.shape[-1], device=best.device)
    best = best.masked_fill(numbers == newest.unsqueeze(-1), math.inf)
    kept = select_best(best, num_blocks).repeat_interleave(block_size, dim=-1)[..., :width]
    return kept & (scores > -math.inf)


def index_scores(queries: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """Sum over heads of `relu(query * key) * weight`: `[B, S, h, d]`, `[B, C, d]`, `[B, S, h]` -> `[B, S, C]`."""
    products = (queries.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, queries.shape[1:3])
    weighted = products.relu() * weights.unsqueeze(-1)
    return weighted.sum(2, dtype=torch.float32).to(queries.dtype)


@dataclass(frozen=True)
class CompressedState(Movable):
    """What layers with a ratio hand on to those above, fresh in every forward.

    Attributes:
        keys (`[B, C, D]`): compressed keys, which are also the values.
        index_keys (`[B, C, d]`): what the indexer compares queries with.
        plan ([`GroupPlan`]): the groups.
        selected (`[B, S, C]` bool): the choice of each query.
        candidates (`[B, S, C]` bool, *optional*): what layers above may choose from.
    """

    keys: Tensor
    index_keys: Tensor
    plan: GroupPlan
    selected: Tensor | None = None
    candidates: Tensor | None = None


class DeepseekV41CacheLayer(CacheLayerMixin):
    """
    Cache layer of one V4.1 layer: the columns of the last tokens (window keys, open groups' projections, token ids)
    and the rows of all complete groups (compressed and index keys).

    While it records, it keeps the columns of all tokens since the last `crop`, which is what `crop` can take back.
    Groups need no record: those that are not complete any more are written anew.
    """

    _layer_type = DEEPSEEK_V41_ATTENTION
    is_sliding = False

    def __init__(self, **kwargs):
        super().__init__()
        self.record_past = False
        self.reset()

    @property
    def is_croppable(self) -> bool:
        return self.record_past

    def activate_past_recording(self) -> None:
        self.record_past = True

    def history(self, name: str) -> int:
        """How many earlier tokens' columns are at hand."""
        return self.columns[name].shape[1] if name in self.columns else 0

    def append(self, name: str, new: Tensor, keep: int) -> Tensor:
        """New tokens' columns `[B, S, ...]` behind the earlier ones; the last `keep` stay for the next forward."""
        columns = torch.cat([self.columns[name], new], dim=1) if name in self.columns else new
        self.keep[name] = keep
        self.columns[name] = columns if self.record_past else columns[:, max(0, columns.shape[1] - keep) :]
        return columns

    def store(self, name: str, new: Tensor, plan: GroupPlan) -> Tensor:
        """Writes the rows `[B, n, ...]` of new groups to their places; returns all rows, `[B, C, ...]`."""
        if name not in self.rows:
            self.rows[name] = new
        elif len(plan.ids) == 1:
            self.rows[name] = torch.cat([self.rows[name][:, : plan.total - new.shape[1]], new], dim=1)
        else:
            # Rows of a batch complete different groups. What is not complete is overwritten before it is ever seen.
            grown = plan.total + new.shape[1] - self.rows[name].shape[1]
            rows = nn.functional.pad(self.rows[name], (0, 0, 0, max(0, grown)))
            self.rows[name] = rows.scatter(1, plan.ids.unsqueeze(-1).expand(-1, -1, new.shape[-1]), new)
        return self.rows[name][:, : plan.total]

    def advance(self, length: int) -> None:
        """Counts the tokens of a forward; called once by its layer."""
        self.is_initialized = True
        self.seen += length
        self.recorded += length if self.record_past else 0

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens; for the errors see [`check_crop`]."""
        check_crop(tokens_to_remove, self.record_past, self.recorded)
        self.seen += tokens_to_remove
        self.recorded = 0
        for name, columns in self.columns.items():
            end = columns.shape[1] + tokens_to_remove
            self.columns[name] = columns[:, max(0, end - self.keep[name]) : end]

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def reset(self) -> None:
        self.columns: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.keep: dict[str, int] = {}
        self.devices: dict[str, torch.device] = {}  # of what is offloaded
        self.seen = self.recorded = 0
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the first forward brings its shapes along."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        raise TypeError("This cache layer belongs to DeepSeek V4.1, whose keys are their own values: see `append`.")

    def offload(self) -> None:
        """Moves what the layer holds to the CPU, until `prefetch` brings it back."""
        for tensors in (self.columns, self.rows):
            self.devices |= {name: tensor.device for name, tensor in tensors.items() if name not in self.devices}
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        for tensors in (self.columns, self.rows):
            for name, tensor in tensors.items():
                tensors[name] = tensor.to(self.devices.get(name, tensor.device), non_blocking=True)
        self.devices.clear()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map(lambda tensor: tensor[indices])

    def _map(self, change) -> None:
        for tensors in (self.columns, self.rows):
            for name in tensors:
                tensors[name] = change(tensors[name])


class Compressor(nn.Module):
    """Compresses the tokens of a group into one latent; with a ratio above 1 a softmax over them, for each channel."""

    def __init__(self, config: DeepseekV41TextConfig, ratio: int):
        super().__init__()
        self.ratio = ratio
        self.wkv = Fp32Linear(config.hidden_size, config.head_dim)
        self.norm = DeepseekV41RMSNorm(config.head_dim, config.rms_norm_eps)
        if ratio > 1:
            self.wgate = Fp32Linear(config.hidden_size, config.head_dim)

    def project(self, hidden_states: Tensor) -> Tensor:
        """`[B, S, H]` -> what is kept of a token until its group is complete, `[B, S, D]` or `[B, S, 2 D]` fp32."""
        if self.ratio == 1:
            return self.wkv(hidden_states, in_fp32=False)
        return torch.cat([self.wkv(hidden_states), self.wgate(hidden_states)], dim=-1)

    def pool(self, columns: Tensor, plan: GroupPlan, dtype: torch.dtype) -> Tensor:
        """Projections of earlier and new tokens -> latents `[B, n, D]` of the groups that are complete now."""
        if len(plan.columns) == 1:
            tokens = columns[:, plan.columns[0]]
        else:
            tokens = columns[torch.arange(len(columns), device=columns.device)[:, None, None], plan.columns]
        if self.ratio == 1:
            return self.norm(tokens.squeeze(2))
        values, gates = tokens.chunk(2, dim=-1)
        return self.norm((values * gates.softmax(dim=2)).sum(2).to(dtype))


class Indexer(nn.Module):
    """Chooses compressed keys for each query. Its parameters are frozen and it runs without gradient, as in V4.1."""

    def __init__(self, config: DeepseekV41TextConfig, layer_idx: int):
        super().__init__()
        self.config = config
        heads, width, source = config.index_n_heads, config.index_head_dim, config.candidate_source_layer_id
        self.is_candidate_source = layer_idx == source
        self.uses_candidates = 0 <= source < layer_idx and not config.is_full(layer_idx)
        self.wq_b = nn.Linear(config.q_lora_rank, heads * width, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)
        if config.is_full(layer_idx):
            self.wk = nn.Linear(config.head_dim, width, bias=False)
            self.k_norm = DeepseekV41RMSNorm(width, config.rms_norm_eps)
        self.requires_grad_(False)

    @torch.no_grad()
    def keys(self, latents: Tensor, rotations: Tensor) -> Tensor:
        """Latents `[B, n, D]` of new groups -> index keys `[B, n, d]`."""
        return round_to_mxfp4(rotate(self.k_norm(self.wk(latents)), rotations))

    @torch.no_grad()
    def select(
        self, hidden_states: Tensor, latents: Tensor, rotations: Tensor, state: CompressedState
    ) -> CompressedState:
        """`[B, S, H]` input, `[B, S, r]` compressed queries -> the state with a choice of this layer's own."""
        config, plan = self.config, state.plan
        queries = rotate(self.wq_b(latents).unflatten(-1, (config.index_n_heads, -1)), rotations.unsqueeze(-2))
        weights = self.weights_proj(hidden_states) * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5)
        scores = index_scores(round_to_mxfp4(queries), state.index_keys, weights)
        scores = scores.masked_fill(~plan.allowed, -math.inf)
        if self.is_candidate_source:
            blocks = (config.candidate_block_size, config.candidate_topk_blocks)
            state = replace(state, candidates=candidate_blocks(scores, plan.visible_groups, *blocks))
        elif self.uses_candidates:
            scores = scores.masked_fill(~state.candidates, -math.inf)
        return replace(state, selected=select_best(scores, config.index_topk))


class DeepseekV41Attention(DeepseekV41WindowAttention):
    """Window attention, and compressed keys beyond the window in layers with a compression ratio."""

    def __init__(self, config: DeepseekV41TextConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.ratio = config.compress_ratios[layer_idx]
        if config.is_full(layer_idx):
            self.compressor = Compressor(config, self.ratio)
        if config.is_index_source(layer_idx):
            self.indexer = Indexer(config, layer_idx)

    def forward(
        self,
        hidden_states: Tensor,
        plan: TokenPlan,
        state: CompressedState | None = None,
        cache_layer: DeepseekV41CacheLayer | None = None,
    ) -> tuple[Tensor, CompressedState | None]:
        """`[B, S, H]` normed input -> `[B, S, H]`, zero at padding, and the state for the layers above."""
        rotations = plan.rotations[self.ratio > 0]
        latents, queries = self.queries(hidden_states, rotations)
        keys = self.keys(hidden_states, rotations)
        if cache_layer is not None:
            keys = cache_layer.append("window", keys, self.config.sliding_window - 1)
        visible = plan.window(keys.shape[1])
        if self.ratio:
            if self.config.is_full(self.layer_idx):
                state = self._compress(hidden_states, plan, cache_layer)
            if self.config.is_index_source(self.layer_idx):
                state = self.indexer.select(hidden_states, latents, rotations, state)
            selected = state.selected.unsqueeze(1)
            visible = torch.cat([visible.expand(len(selected), -1, -1, -1), selected], dim=-1)
            keys = torch.cat([keys, state.keys.to(keys.dtype)], dim=1)  # they differ under autocast
        output = self.project_output(self.attend(queries, keys, visible), rotations)
        if plan.new_valid is not None:
            output = output.masked_fill(~plan.new_valid.unsqueeze(-1), 0.0)
        return output, state

    def _compress(
        self, hidden_states: Tensor, plan: TokenPlan, cache_layer: DeepseekV41CacheLayer | None
    ) -> CompressedState:
        columns, history = self.compressor.project(hidden_states), 0
        if cache_layer is not None:
            history = cache_layer.history("open groups")
            columns = cache_layer.append("open groups", columns, self.ratio - 1)
        groups = plan.groups(self.ratio, history)
        latents = self.compressor.pool(columns, groups, hidden_states.dtype)
        rotations = plan.group_rotations(groups, self.ratio)
        keys = round_to_nvfp4(rotate(latents, rotations))
        index_keys = self.indexer.keys(latents, rotations)
        if cache_layer is not None:
            keys = cache_layer.store("keys", keys, groups)
            index_keys = cache_layer.store("index keys", index_keys, groups)
        return CompressedState(keys, index_keys, groups)
