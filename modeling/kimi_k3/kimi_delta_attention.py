"""Kimi Delta Attention (KDA): the gated delta rule with a decay per channel, its cache layer, its module.

Maths: Kimi Linear (arXiv 2510.26692, section 3) with Kimi K3's bounded decay and full-rank output gate.
"""

import contextlib
import math

import torch
from torch import Tensor, nn
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, LinearAttentionLayer
from transformers.utils.generic import maybe_autocast
from transformers.utils.import_utils import is_flash_linear_attention_available

from ...configuration.configuration_kimi_k3 import KIMI_DELTA_ATTENTION, KimiK3TextConfig
from ..ops.fp32 import Fp32Weight, KeepsFp32
from ..target.cache_rollback import check_crop

chunk_kda = None
if is_flash_linear_attention_available():
    with contextlib.suppress(ImportError):  # its versions before 0.4 have no KDA
        from fla.ops.kda import chunk_kda

# Within this many tokens a decay bounded by -5 a token keeps exp(-sum) inside fp32, so the chunk's products factor.
CHUNK_SIZE = 16
MAX_EXPONENT = 80.0
# So few tokens are cheaper one by one than as a short chunk.
RECURRENT_TOKENS = 2
# Tokens that a recording cache can give back: the longest verification that `crop` has to undo.
ROLLBACK_TOKENS = 64


def kda_decay(gate: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """
    Log-space decay of the state, per channel.

    Args:
        gate: `[B, S, P]`, P = heads * head_dim, any float dtype; A_log: `[heads]` fp32; dt_bias: `[P]` fp32.
        lower_bound: bound of the decay, `g = lower_bound * sigmoid(exp(A_log) * z)`; `None` for the unbounded
            `g = -exp(A_log) * softplus(z)`.

    Returns:
        `[B, S, heads, head_dim]` fp32, negative.
    """
    z = (gate.float() + dt_bias).unflatten(-1, (A_log.shape[0], -1))
    rate = A_log.exp()[:, None]
    if lower_bound is None:
        return -rate * nn.functional.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


def l2_normalise(x: Tensor) -> Tensor:
    """Unit vectors over the last axis in fp32, `x / sqrt(sum(x^2) + 1e-6)`."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def kda_recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """
    The delta rule token by token: `R = diag(exp(g)) S; d = beta * (v - R^T k); S = R + k d^T; o = S^T q`.

    Args:
        q, k, v, g: `[B, heads, S, D]` fp32; q and k normalised, q scaled.
        beta: `[B, heads, S]` fp32.
        state: `[B, heads, D, D]` fp32, rows = key channels.

    Returns:
        outputs `[B, heads, S, D]`, updates d `[B, heads, S, D]`, final state.
    """
    outputs, updates = [], []
    for t in range(q.shape[2]):
        state = state * g[:, :, t, :, None].exp()
        update = beta[:, :, t, None] * (v[:, :, t] - (k[:, :, t, None] @ state).squeeze(2))
        state = state + k[:, :, t, :, None] * update[:, :, None]
        outputs.append((q[:, :, t, None] @ state).squeeze(2))
        updates.append(update)
    return torch.stack(outputs, dim=2), torch.stack(updates, dim=2), state


def kda_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    chunk_size: int = CHUNK_SIZE,
    factored: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    The same as [`kda_recurrence`], a chunk of tokens at a time.

    Args:
        factored: form `exp(G_i - G_j)` as `exp(G_i) * exp(-G_j)`. Only right where the decay summed over a chunk stays
            above -80; otherwise the difference is taken before the exponential, at `chunk_size` times the memory.
    """
    batch, heads, length, dim = q.shape
    chunk_size = min(chunk_size, length)
    padding = -length % chunk_size
    if padding:  # zero keys, values, beta and decay change neither the state nor a real output
        q, k, v, g = (nn.functional.pad(x, (0, 0, 0, padding)) for x in (q, k, v, g))
        beta = nn.functional.pad(beta, (0, padding))
    q, k, v, g = (x.unflatten(2, (-1, chunk_size)) for x in (q, k, v, g))
    beta = beta.unflatten(2, (-1, chunk_size))[..., None]

    decay = g.cumsum(dim=3)  # inclusive, restarts in each chunk
    keys, queries = k * decay.exp(), q * decay.exp()
    if factored:
        keys_back = (k * (-decay).exp()).transpose(-1, -2)
        key_products, query_products = keys @ keys_back, queries @ keys_back
    else:
        later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)[..., None]
        difference = decay.unsqueeze(-2) - decay.unsqueeze(-3)
        pairwise = k.unsqueeze(-3) * difference.masked_fill(later, -math.inf).exp()
        key_products = (k.unsqueeze(-2) * pairwise).sum(-1)
        query_products = (q.unsqueeze(-2) * pairwise).sum(-1)

    system = torch.tril(beta * key_products, diagonal=-1)
    right = beta * torch.cat([v, keys], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    from_values, from_state = solved.split(dim, dim=-1)
    within = torch.tril(query_products)
    last = decay[..., -1:, :]
    keys_forward = (k * (last - decay).exp()).transpose(-1, -2)
    keep = last.exp().transpose(-1, -2)

    outputs, updates = [], []
    # Unbound once: the gradient of an index would fill a tensor of all chunks for each chunk.
    parts = (from_values, from_state, queries, within, keys_forward, keep)
    for values_i, state_i, queries_i, within_i, keys_i, keep_i in zip(
        *(part.unbind(2) for part in parts), strict=True
    ):
        update = values_i - state_i @ state
        outputs.append(queries_i @ state + within_i @ update)
        updates.append(update)
        state = keep_i * state + keys_i @ update
    outputs, updates = torch.cat(outputs, dim=2), torch.cat(updates, dim=2)
    return outputs[:, :, :length], updates[:, :, :length], state


def kda_rollback(k: Tensor, g: Tensor, updates: Tensor, state: Tensor) -> Tensor:
    """State after the m tokens whose keys, decays and updates, `[B, heads, m, D]` fp32, are given, from the `state`
    before them, `[B, heads, D, D]` fp32."""
    # Summed from the end: a difference of two long sums would be less exact.
    later = nn.functional.pad(g[:, :, 1:].flip(2).cumsum(dim=2).flip(2), (0, 0, 0, 1))
    keep = g.sum(dim=2, keepdim=True).exp().transpose(-1, -2)
    return keep * state + (k * later.exp()).transpose(-1, -2) @ updates


class KimiDeltaAttentionCacheLayer(LinearAttentionLayer):
    """
    Cache layer of one KDA layer: the state `[B, heads, D, D]` and the last projections, which the short convolution
    reads.

    The state forgets: it cannot be run backwards. A recording cache therefore keeps the state before the last tokens
    and what each of them did to it (key, decay, update), and `crop` plays the kept ones again. It remembers the tokens
    since the last `crop`, [`ROLLBACK_TOKENS`] at most.
    """

    is_compileable = False

    def __init__(self, **kwargs):
        super().__init__(number_of_states=1)
        self.base_state: Tensor | None = None
        self.records: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def is_croppable(self) -> bool:
        return self.record_past

    @property
    def recorded_tokens(self) -> int:
        return 0 if self.records is None else self.records[0].shape[2]

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, kernel_size: int = 1, **kwargs):
        """New projections `[B, channels, S]`; returns them behind the `kernel_size - 1` columns they need to see."""
        history = self.conv_states[state_idx]
        if history is None:
            self.device, self.dtype = conv_states.device, conv_states.dtype
            history = conv_states.new_zeros(*conv_states.shape[:-1], kernel_size - 1)
            self.conv_kernel_size[state_idx] = kernel_size
            self.is_conv_states_initialized[state_idx] = True
        self.has_previous_state[state_idx] = True
        columns, length = torch.cat([history, conv_states], dim=-1), conv_states.shape[-1]
        kept = kernel_size - 1
        if self.record_past:
            kept += min(self.recorded_tokens + length, ROLLBACK_TOKENS)
        # A copy, lest the projections of a whole prompt live as long as the few columns that are kept of them.
        self.conv_states[state_idx] = columns[..., columns.shape[-1] - kept :].clone()
        return columns[..., columns.shape[-1] - length - kernel_size + 1 :]

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def record(self, base_state: Tensor, k: Tensor, g: Tensor, updates: Tensor) -> None:
        """Remembers tokens that `crop` may have to take back: `base_state` before them, `[B, heads, n, D]` of each."""
        if self.records is None or k.shape[2] == ROLLBACK_TOKENS:  # so many leave no room for earlier ones
            self.base_state, self.records = base_state, (k, g, updates)
        else:
            self.records = tuple(torch.cat(pair, dim=2) for pair in zip(self.records, (k, g, updates), strict=True))
        if (surplus := self.recorded_tokens - ROLLBACK_TOKENS) > 0:
            self.base_state = kda_rollback(*(x[:, :, :surplus] for x in self.records), self.base_state)
            self.records = tuple(x[:, :, surplus:] for x in self.records)

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last `-tokens_to_remove` tokens; for the errors see [`check_crop`]."""
        check_crop(tokens_to_remove, self.record_past, self.recorded_tokens, ROLLBACK_TOKENS)
        if self.records is None:
            return
        if tokens_to_remove:
            kept = self.recorded_tokens + tokens_to_remove
            records = (x[:, :, :kept] for x in self.records)
            self.recurrent_states[0] = kda_rollback(*records, self.base_state) if kept else self.base_state
        window = self.conv_kernel_size[0] - 1
        end = self.conv_states[0].shape[-1] + tokens_to_remove
        self.conv_states[0] = self.conv_states[0][..., end - window : end]
        self.base_state = self.records = None

    def offload(self) -> None:
        super().offload()
        self._move_records("cpu")

    def prefetch(self) -> None:
        super().prefetch()
        self._move_records(self.device)

    def _move_records(self, device: torch.device | str) -> None:
        if self.records is not None:
            self.base_state = self.base_state.to(device, non_blocking=True)
            self.records = tuple(x.to(device, non_blocking=True) for x in self.records)

    def reset(self) -> None:
        super().reset()
        self.base_state = self.records = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        assert self.records is None, "beam search does not roll back"
        super().reorder_cache(beam_idx)


DYNAMIC_LAYER_TYPE_MAPPING[KIMI_DELTA_ATTENTION] = KimiDeltaAttentionCacheLayer


class ShortConvolution(Fp32Weight):
    """Of a causal depthwise convolution, `[channels, 1, taps]`."""


class KimiDeltaAttention(KeepsFp32):
    """Kimi Delta Attention of Kimi K3."""

    fp32_names = ("A_log", "dt_bias")

    def __init__(self, config: KimiK3TextConfig, layer_idx: int):
        super().__init__()
        self.layer_idx, self.num_heads, self.head_dim = layer_idx, config.linear_num_heads, config.linear_head_dim
        self.kernel_size, self.full_rank_gate = config.linear_conv_kernel_size, config.linear_use_full_rank_gate
        self.lower_bound = config.linear_gate_lower_bound
        self.factored = self.lower_bound is not None and -self.lower_bound * CHUNK_SIZE <= MAX_EXPONENT
        hidden_size, width = config.hidden_size, self.num_heads * self.head_dim
        self.q_proj = nn.Linear(hidden_size, width, bias=False)
        self.k_proj = nn.Linear(hidden_size, width, bias=False)
        self.v_proj = nn.Linear(hidden_size, width, bias=False)
        self.q_conv1d = ShortConvolution(width, 1, self.kernel_size)
        self.k_conv1d = ShortConvolution(width, 1, self.kernel_size)
        self.v_conv1d = ShortConvolution(width, 1, self.kernel_size)
        self.f_a_proj = nn.Linear(hidden_size, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.A_log = nn.Parameter(torch.empty(self.num_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.b_proj = nn.Linear(hidden_size, self.num_heads, bias=False)
        if self.full_rank_gate:
            self.g_proj = nn.Linear(hidden_size, width, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden_size, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.o_norm = KimiK3GatedRMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, cache: Cache | None = None) -> Tensor:
        """`[B, S, H]`, one document a row, padding only on the left and zero -> `[B, S, H]`. The layer `layer_idx` of
        `cache` is a [`KimiDeltaAttentionCacheLayer`]."""
        layer = None if cache is None else cache.layers[self.layer_idx]
        dtype = hidden_states.dtype
        heads = (self.num_heads, self.head_dim)
        q, k, v = self._convolve(hidden_states, layer).unflatten(-1, (3, *heads)).permute(2, 0, 3, 1, 4)
        q, k = l2_normalise(q) * self.head_dim**-0.5, l2_normalise(k)
        gate = self.f_b_proj(self.f_a_proj(hidden_states))
        g = kda_decay(gate, self.A_log, self.dt_bias, self.lower_bound).transpose(1, 2)
        beta = torch.sigmoid(self.b_proj(hidden_states).float()).transpose(1, 2)
        with maybe_autocast(q.device.type, enabled=False):  # the recurrence is fp32
            output = self._attend(q, k, v, g, beta, layer).transpose(1, 2).to(dtype)
        gate = self.g_proj(hidden_states) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(hidden_states))
        return self.o_proj(self.o_norm(output, gate.unflatten(-1, heads)).flatten(2))

    def _convolve(self, hidden_states: Tensor, layer: KimiDeltaAttentionCacheLayer | None) -> Tensor:
        """`[B, S, H]` -> queries, keys, values side by side `[B, S, 3 * P]`."""
        projected = torch.cat([proj(hidden_states) for proj in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        columns = projected.transpose(1, 2)
        if layer is None:
            columns = nn.functional.pad(columns, (self.kernel_size - 1, 0))
        else:
            columns = layer.update_conv_state(columns, kernel_size=self.kernel_size)
        weight = torch.cat([self.q_conv1d(), self.k_conv1d(), self.v_conv1d()])
        # A sum of shifted products: a depthwise `conv1d` is many times slower on a CPU.
        length = hidden_states.shape[1]
        mixed = sum(columns[..., tap : tap + length] * weight[:, :, tap] for tap in range(self.kernel_size))
        return nn.functional.silu(mixed.float()).to(hidden_states.dtype).transpose(1, 2)

    def _attend(self, q, k, v, g, beta, layer: KimiDeltaAttentionCacheLayer | None) -> Tensor:
        """`[B, heads, S, D]` each (`beta` `[B, heads, S]`), fp32 but for `v` -> outputs `[B, heads, S, D]`."""
        state = None if layer is None else layer.recurrent_states[0]
        if state is None:
            state = q.new_zeros(q.shape[0], self.num_heads, self.head_dim, self.head_dim)
        recording = layer is not None and layer.record_past
        outputs = []
        if recording and (unrecorded := q.shape[2] - ROLLBACK_TOKENS) > 0:
            head, (q, k, v, g, beta) = zip(
                *((x[:, :, :unrecorded], x[:, :, unrecorded:]) for x in (q, k, v, g, beta)), strict=True
            )
            output, _, state = self._delta_rule(*head, state)
            outputs.append(output)
            k, g = k.clone(), g.clone()  # the cache keeps them, and not the whole prompt's
        before = state
        output, updates, state = self._delta_rule(q, k, v, g, beta, state, need_updates=recording)
        outputs.append(output)
        if layer is not None:
            layer.update_recurrent_state(state)
            if recording:
                layer.record(before, k, g, updates)
        return torch.cat(outputs, dim=2) if len(outputs) > 1 else output

    def _delta_rule(self, q, k, v, g, beta, state, need_updates: bool = False):
        if q.shape[2] <= RECURRENT_TOKENS:
            return kda_recurrence(q, k, v.float(), g, beta, state)
        if chunk_kda is not None and q.is_cuda and not need_updates:
            # Its kernels are made for half precision: queries and keys go in as the model's dtype, the rest in fp32.
            inputs = (x.transpose(1, 2).contiguous() for x in (q.to(v.dtype), k.to(v.dtype), v, g, beta))
            output, state = chunk_kda(*inputs, scale=1.0, initial_state=state, output_final_state=True)
            return output.transpose(1, 2), None, state
        return kda_chunked(q, k, v.float(), g, beta, state, factored=self.factored)


class KimiK3GatedRMSNorm(KeepsFp32):
    """RMSNorm over a head, times its weight, times the sigmoid of the gate; all in fp32, cast at the end."""

    def __init__(self, head_dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim, dtype=torch.float32))
        self.eps = eps

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        normed = hidden_states.float()
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float() * torch.sigmoid(gate.float())).to(hidden_states.dtype)
