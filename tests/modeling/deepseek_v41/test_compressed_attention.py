import math

import pytest
import torch
from deepseek_v41_models import join_selections, relative_error, started, tiny_config
from torch._subclasses import FakeTensorMode
from transformers import DynamicCache

from blockdraft.modeling.deepseek_v41.compressed_attention import (
    DeepseekV41Attention,
    DeepseekV41CacheLayer,
    candidate_blocks,
    index_scores,
    select_best,
)
from blockdraft.modeling.deepseek_v41.token_plan import TokenPlan

TOLERANCE = 1e-5
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def layers(ratio: int, attention: str = "eager", **settings) -> list[DeepseekV41Attention]:
    """A Full, a Reindex and a Reuse layer, the first of them the candidate source; without a ratio a window layer."""
    schedule = {"kv_source_layer_ids": [0], "index_source_layer_ids": [0, 1], "candidate_source_layer_id": 0}
    if not ratio:
        schedule = {"kv_source_layer_ids": [], "index_source_layer_ids": [], "candidate_source_layer_id": -1}
    depth = 3 if ratio else 1
    shape = {"num_hidden_layers": depth, "compress_ratios": [ratio] * depth, "engram_layer_ids": []}
    config = tiny_config(**(shape | schedule | {"engram_num_embeddings": []} | settings))
    config._attn_implementation = attention
    made = [DeepseekV41Attention(config, layer_idx) for layer_idx in range(depth)]
    return [started(layer) for layer in made]


def run(attentions, hidden_states, attention_mask=None, past=0, cache_layers=None):
    """Outputs and states of the layers, each with the same input: an error in one does not reach the next."""
    config, length = attentions[0].config, hidden_states.shape[1]
    plan = TokenPlan(config, length, past, attention_mask, hidden_states.device, cache_layers is not None)
    outputs, states, state = [], [], None
    for i, layer in enumerate(attentions):
        cache_layer = None if cache_layers is None else cache_layers[i]
        output, state = layer(hidden_states, plan, state, cache_layer)
        if cache_layer is not None:
            cache_layer.advance(length)
        outputs.append(output)
        states.append(state)
    return outputs, states


# The choice of groups


def test_the_earlier_of_equal_scores_is_chosen():
    scores = torch.tensor([[3.0, 1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    chosen = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]]).bool()
    assert torch.equal(select_best(scores, 3), chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4, 9, 12, 20])
def test_choice_is_a_stable_sort(count, dtype):
    scores = torch.randint(-2, 3, (200, 12)).to(dtype)  # full of ties
    scores[torch.rand(200, 12) < 0.3] = -math.inf
    scores[0] = -math.inf
    chosen = select_best(scores, count)
    for row, marks in zip(scores.tolist(), chosen.tolist(), strict=True):
        best = sorted(range(12), key=lambda group: -row[group])[:count]  # Python's sort is stable
        assert marks == [group in best and row[group] > -math.inf for group in range(12)]


def test_choice_does_not_depend_on_the_width():
    scores = torch.randint(0, 4, (50, 30)).float()
    hidden = scores.masked_fill(torch.arange(30) >= 17, -math.inf)
    for count in (1, 5, 16, 17, 25):
        assert torch.equal(select_best(hidden, count)[:, :17], select_best(scores[:, :17], count))
        assert not select_best(hidden, count)[:, 17:].any()


@pytest.mark.parametrize("block_size, num_blocks", [(3, 2), (4, 1), (1, 5), (5, 9)])
def test_candidates_are_the_best_blocks_and_the_newest(block_size, num_blocks):
    visible_groups = torch.arange(15).expand(2, -1)  # the first query sees none
    scores = torch.randint(-3, 3, (2, 15, 14)).float()
    scores[torch.rand(2, 15, 14) < 0.2] = -math.inf
    scores = scores.masked_fill(torch.arange(14) >= visible_groups.unsqueeze(-1), -math.inf)
    actual = candidate_blocks(scores, visible_groups, block_size, num_blocks)
    for b, t in torch.cartesian_prod(torch.arange(2), torch.arange(15)).tolist():
        row = scores[b, t].tolist()
        best = [max(row[start : start + block_size]) for start in range(0, 14, block_size)]
        if t:
            best[(t - 1) // block_size] = math.inf
        kept = sorted(range(len(best)), key=lambda block: -best[block])[:num_blocks]
        expected = [c // block_size in kept and row[c] > -math.inf for c in range(14)]
        assert actual[b, t].tolist() == expected


def test_scores_round_after_every_step():
    queries, keys, weights = torch.randn(2, 3, 5, 36), torch.randn(2, 7, 36), torch.randn(2, 3, 5)
    exact = torch.einsum("bthd,bcd->bthc", queries, keys).relu().mul(weights.unsqueeze(-1)).sum(2)
    assert relative_error(index_scores(queries, keys, weights), exact) < TOLERANCE
    half = [x.bfloat16() for x in (queries, keys, weights)]
    products = torch.einsum("bthd,bcd->bthc", half[0].float(), half[1].float()).bfloat16()
    weighted = (products.relu() * half[2].unsqueeze(-1)).float()
    expected = weighted.sum(2).bfloat16()
    actual = index_scores(*half)
    assert actual.dtype == torch.bfloat16
    # The order of a sum in fp32 may decide which of two neighbours is the nearer one.
    assert (actual != expected).float().mean() < 0.05 and relative_error(actual, expected) < 2**-7


# A layer against its equations


class Equations:
    """One layer and one row `[S, H]`, written from the equations, in float64 and with loops."""

    def __init__(self, layer: DeepseekV41Attention):
        self.config, self.ratio, self.index = layer.config, layer.ratio, layer.layer_idx
        self.weights = {name: tensor.double() for name, tensor in layer.state_dict().items()}

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, x, name):
        return (
            x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]
        )

    def rope(self, x, positions, sign=1):
        """`x`: `[T, ..., D]`."""
        config, size = self.config, self.config.qk_rope_head_dim
        theta = config.compress_rope_theta if self.ratio else config.rope_theta
        output = x.clone()
        for i in range(size // 2):
            frequency = theta ** (-2 * i / size)
            if self.ratio:
                yarn = config.rope_scaling
                low, high = (
                    size
                    * math.log(yarn["original_max_position_embeddings"] / (2 * math.pi * yarn[beta]))
                    / (2 * math.log(theta))
                    for beta in ("beta_fast", "beta_slow")
                )
                low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
                ramp = min(max((i - low) / max(high - low, 1e-3), 0), 1)
                frequency = frequency / yarn["factor"] * ramp + frequency * (1 - ramp)
            angle = (sign * positions.double() * frequency).view(-1, *[1] * (x.ndim - 2))
            a, b = x.shape[-1] - size + 2 * i, x.shape[-1] - size + 2 * i + 1
            output[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
            output[..., b] = x[..., a] * angle.sin() + x[..., b] * angle.cos()
        return output

    @staticmethod
    def rounded(x, cache_format):
        parts = []
        for part in x.split(16 if cache_format == "nvfp4" else 32, dim=-1):
            largest = part.abs().amax(-1, keepdim=True)
            if cache_format == "nvfp4":
                scale = (largest / 6).float().to(torch.float8_e4m3fn).double()
            else:
                scale = 2 ** torch.log2(largest / (448 if cache_format == "fp8" else 6)).ceil()
            part = part / scale
            if cache_format == "fp8":
                part = part.float().to(torch.float8_e4m3fn).double()
            else:
                part = FP4[(part.abs().unsqueeze(-1) - FP4).abs().argmin(-1)] * part.sign()
            parts.append(part * scale)
        return torch.cat(parts, dim=-1)

    def compress(self, x):
        """Keys and index keys of the row's complete groups."""
        latents = []
        values = self.linear(x, "compressor.wkv")
        for group in range(len(x) // self.ratio):
            tokens = slice(group * self.ratio, (group + 1) * self.ratio)
            pooled = values[tokens]
            if self.ratio > 1:
                pooled = pooled * self.linear(x[tokens], "compressor.wgate").softmax(0)
            latents.append(self.norm(pooled.sum(0), "compressor.norm"))
        latents, positions = torch.stack(latents), torch.arange(len(latents)) * self.ratio
        index_keys = self.rope(self.norm(self.linear(latents, "indexer.wk"), "indexer.k_norm"), positions)
        return self.rounded(self.rope(latents, positions), "nvfp4"), self.rounded(index_keys, "mxfp4")

    def choose(self, x, latents, state):
        """Sets of chosen groups and of candidates for each query."""
        config, heads, width = self.config, self.config.index_n_heads, self.config.index_head_dim
        queries = self.linear(latents, "indexer.wq_b").view(len(x), heads, width)
        queries = self.rounded(self.rope(queries, torch.arange(len(x))), "mxfp4")
        weights = self.linear(x, "indexer.weights_proj") / math.sqrt(heads * width)
        selected, candidates = [], []
        for t in range(len(x)):
            visible = range((t + 1) // self.ratio)
            scores = {c: float(((queries[t] @ state["index keys"][c]).relu() * weights[t]).sum()) for c in visible}
            if self.index == config.candidate_source_layer_id:
                size, best = config.candidate_block_size, {}
                for c, score in scores.items():
                    newest = c // size == (len(visible) - 1) // size
                    best[c // size] = math.inf if newest else max(best.get(c // size, -math.inf), score)
                kept = sorted(best, key=lambda block: -best[block])[: config.candidate_topk_blocks]
                candidates.append({c for c in visible if c // size in kept})
            elif config.candidate_source_layer_id >= 0:
                scores = {c: score for c, score in scores.items() if c in state["candidates"][t]}
            selected.append(set(sorted(scores, key=lambda c: -scores[c])[: config.index_topk]))
        return selected, candidates or state.get("candidates")

    def __call__(self, x, state):
        config, x = self.config, x.double()
        positions, heads, width = torch.arange(len(x)), config.num_attention_heads, config.head_dim
        latents = self.norm(self.linear(x, "wq_a"), "q_norm")
        queries = self.rope(self.linear(latents, "wq_b").view(len(x), heads, width), positions)
        keys = self.rounded(self.rope(self.norm(self.linear(x, "wkv"), "kv_norm"), positions), "fp8")
        if config.is_full(self.index):
            state = dict(zip(("keys", "index keys"), self.compress(x), strict=True))
        if config.is_index_source(self.index):
            selected, candidates = self.choose(x, latents, state)
            state = state | {"selected": selected, "candidates": candidates}
        attended = []
        for t in range(len(x)):
            seen = keys[max(0, t - config.sliding_window + 1) : t + 1]
            if self.ratio:
                seen = torch.cat([seen, state["keys"][sorted(state["selected"][t])]])
            weights = (queries[t] @ seen.T / math.sqrt(width)).exp()
            weights = weights / (weights.sum(-1, keepdim=True) + self.weights["sinks_param.weight"].exp()[:, None])
            attended.append(weights @ seen)
        attended = self.rope(torch.stack(attended), positions, sign=-1).reshape(len(x), config.o_groups, -1)
        projections = self.weights["wo_a.weight"].view(config.o_groups, config.o_lora_rank, -1)
        groups = [attended[:, i] @ projections[i].T for i in range(config.o_groups)]
        return self.linear(torch.cat(groups, dim=-1), "wo_b"), state


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "ratio, settings",
    [(0, {}), (1, {}), (2, {"candidate_source_layer_id": -1}), (3, {"sliding_window": 2, "index_topk": 2})],
    ids=["window", "ratio_1_candidates", "ratio_2", "ratio_3_candidates"],
)
def test_layers_equal_the_equations_in_float64(ratio, settings, attention):
    attentions = layers(ratio, attention, **settings)
    x, lengths = torch.randn(2, 23, 40), (23, 16)
    mask = (torch.arange(23) < torch.tensor(lengths)[:, None]).long()
    with torch.no_grad():
        outputs, states = run(attentions, x, mask)
    for row, length in enumerate(lengths):
        expected_state = {}
        for layer, output, state in zip(attentions, outputs, states, strict=True):
            expected, expected_state = Equations(layer)(x[row, :length], expected_state)
            assert relative_error(output[row, :length], expected) < TOLERANCE
            assert not output[row, length:].any()
            if not ratio:
                assert state is None
                continue
            groups = length // ratio
            assert relative_error(state.keys[row, :groups], expected_state["keys"]) < TOLERANCE
            assert relative_error(state.index_keys[row, :groups], expected_state["index keys"]) < TOLERANCE
            for t in range(length):
                assert set(state.selected[row, t].nonzero().flatten().tolist()) == expected_state["selected"][t]
                if state.candidates is not None:
                    assert (
                        set(state.candidates[row, t].nonzero().flatten().tolist()) == expected_state["candidates"][t]
                    )
        assert (states[0] is None) or (states[0].candidates is None) == (
            settings.get("candidate_source_layer_id") == -1
        )


# What a query can see


def test_what_is_neither_near_nor_chosen_changes_nothing():
    attentions = layers(1)
    x, changed = torch.randn(1, 24, 40), 6
    other = x.clone()
    other[0, changed] = torch.randn(40)
    with torch.no_grad():
        (outputs, states), (other_outputs, other_states) = run(attentions, x), run(attentions, other)
    unaffected = 0
    for output, state, other_output, other_state in zip(outputs, states, other_outputs, other_states, strict=True):
        for t in range(changed + 5, 24):
            same_choice = torch.equal(state.selected[0, t], other_state.selected[0, t])
            if same_choice and not state.selected[0, t, changed]:
                unaffected += 1
                assert relative_error(other_output[0, t], output[0, t]) < TOLERANCE
            else:
                assert relative_error(other_output[0, t], output[0, t]) > 1e-4
        assert relative_error(other_output[0, :changed], output[0, :changed]) < TOLERANCE
        assert (
            not torch.isclose(output[0, changed : changed + 5], other_output[0, changed : changed + 5]).all(-1).any()
        )
    assert 5 < unaffected < 39


def test_chosen_keys_pass_gradient_and_the_indexer_none():
    attentions = layers(2)
    x = torch.randn(1, 12, 40, requires_grad=True)
    outputs, states = run(attentions, x)
    (gradient,) = torch.autograd.grad(outputs[2][0, -1].sum(), x)
    chosen = states[2].selected[0, -1].repeat_interleave(2)
    near = torch.arange(12) >= 7
    assert torch.equal(gradient[0].abs().sum(-1) > 0, chosen | near)
    assert all(
        parameter.requires_grad != (".indexer." in f".{name}") for name, parameter in attentions[0].named_parameters()
    )


@pytest.mark.parametrize(
    "mask, is_cached, named",
    [
        ([[1, 1, 0, 1, 1]], False, "holes"),
        ([[0, 1, 0, 1, 1]], False, "holes"),
        ([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]], False, "left and on the right"),
        ([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]], False, "left and on the right"),
        ([[1, 1, 1, 1, 0]], True, "pad prompts on the left"),
    ],
)
def test_masks_that_cannot_be_followed(mask, is_cached, named):
    with pytest.raises(ValueError, match=named):
        TokenPlan(tiny_config(), 5, 0, torch.tensor(mask), torch.device("cpu"), is_cached)


# The cache


@pytest.mark.parametrize("padding", [0, 3], ids=["even", "padded_left"])
@pytest.mark.parametrize("ratio", [0, 1, 2, 3])
def test_decoding_with_rollback_equals_the_full_forward(ratio, padding):
    attentions = layers(ratio)
    x, mask = torch.randn(2, 30, 40), torch.ones(2, 30, dtype=torch.long)
    mask[0, :padding] = 0
    cache_layers = [DeepseekV41CacheLayer() for _ in attentions]
    for cache_layer in cache_layers:
        cache_layer.activate_past_recording()
    parts, selections, position = [], [], 0
    with torch.no_grad():
        expected, expected_states = run(attentions, x, mask)
        # Tokens that are kept and tokens that are taken back, in one forward.
        for kept, rejected in [(4, 0), (1, 0), (1, 7), (6, 1), (0, 4), (2, 5), (5, 3), (1, 1), (7, 0), (3, 2)]:
            block = torch.cat([x[:, position : position + kept], torch.randn(2, rejected, 40)], dim=1)
            block_mask = torch.cat([mask[:, : position + kept], torch.ones(2, rejected, dtype=torch.long)], dim=1)
            outputs, states = run(attentions, block, block_mask, position, cache_layers)
            parts.append([output[:, :kept] for output in outputs])
            selections.append([state and state.selected[:, :kept] for state in states])
            position += kept
            for cache_layer in cache_layers:
                cache_layer.crop(-rejected)
                assert cache_layer.get_seq_length() == position
    assert position == 30
    for i, reference in enumerate(expected):
        assert relative_error(torch.cat([part[i] for part in parts], dim=1), reference) < TOLERANCE
        if ratio:
            selected = join_selections([selection[i] for selection in selections])
            width = expected_states[i].selected.shape[-1]
            assert torch.equal(
                (selected & mask[..., None].bool())[..., :width], expected_states[i].selected & mask[..., None].bool()
            )
            assert not selected[..., width:].any()


@pytest.mark.parametrize("ratio", [0, 1, 2])
def test_bfloat16_is_finite_and_decoding_chooses_the_same(ratio):
    attentions = [layer.to(torch.bfloat16) for layer in layers(ratio, "sdpa")]
    x = torch.randn(2, 24, 40, dtype=torch.bfloat16)
    cache_layers = [DeepseekV41CacheLayer() for _ in attentions]
    with torch.no_grad():
        expected, expected_states = run(attentions, x)
        steps = [
            run(attentions, part, None, past, cache_layers)
            for part, past in zip(x.split([7, 1, 1, 4, 1, 1, 9], dim=1), (0, 7, 8, 9, 13, 14, 15), strict=True)
        ]
    for i, reference in enumerate(expected):
        assert reference.dtype == torch.bfloat16 and reference.isfinite().all()
        assert relative_error(torch.cat([outputs[i] for outputs, _ in steps], dim=1), reference) < 2e-2
        if ratio:
            assert torch.equal(
                join_selections([states[i].selected for _, states in steps]), expected_states[i].selected
            )


def filled_cache_layer(record: bool) -> DeepseekV41CacheLayer:
    cache_layer = DeepseekV41CacheLayer()
    if record:
        cache_layer.activate_past_recording()
    with torch.no_grad():
        run(layers(2)[:1], torch.randn(2, 9, 40), None, 0, [cache_layer])
    return cache_layer


def test_what_crop_refuses():
    with pytest.raises(ValueError, match="negative number"):
        filled_cache_layer(record=True).crop(1)
    silent = filled_cache_layer(record=False)
    assert not silent.is_croppable
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        silent.crop(-1)
    cache_layer = filled_cache_layer(record=True)
    assert cache_layer.is_croppable
    with pytest.raises(RuntimeError, match="9 tokens recorded since the last `crop`"):
        cache_layer.crop(-10)
    cache_layer.crop(-4)
    with pytest.raises(RuntimeError, match="0 tokens recorded since"):
        cache_layer.crop(-1)


def test_what_stays_in_the_cache():
    recorded, silent = filled_cache_layer(record=True), filled_cache_layer(record=False)
    assert {name: tuple(tensor.shape) for name, tensor in silent.columns.items()} == {
        "window": (2, 4, 44),  # all but the token itself
        "open groups": (2, 1, 88),
    }
    assert {name: tuple(tensor.shape) for name, tensor in silent.rows.items()} == {
        "keys": (2, 4, 44),
        "index keys": (2, 4, 36),
    }
    assert recorded.columns["window"].shape[1] == 9
    recorded.crop(0)
    assert recorded.columns["window"].shape[1] == 4 and recorded.columns["open groups"].shape[1] == 1
    assert silent.get_seq_length() == 9 and silent.get_mask_sizes(3) == (12, 0) and silent.get_max_length() == -1
    silent.reset()
    assert silent.get_seq_length() == 0 and not silent.columns and not silent.rows


def test_batch_operations_move_whole_rows():
    for change, order in [
        (lambda layer: layer.reorder_cache(torch.tensor([1, 1])), [1, 1]),
        (lambda layer: layer.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda layer: layer.batch_select_indices(torch.tensor([1])), [1]),
    ]:
        cache_layer = filled_cache_layer(record=False)
        before = cache_layer.columns | cache_layer.rows
        change(cache_layer)
        after = cache_layer.columns | cache_layer.rows
        assert len(after) == 4 and all(torch.equal(after[name], before[name][order]) for name in before)


def test_cache_layer_is_no_ordinary_one():
    with pytest.raises(TypeError, match="their own values"):
        DeepseekV41CacheLayer().update(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))


def test_what_is_offloaded_comes_back_to_its_device():
    """On devices that are only named."""
    with FakeTensorMode():
        cache_layer = DeepseekV41CacheLayer()
        cache_layer.offload()
        cache_layer.prefetch()  # nothing to move yet
        cache_layer.columns |= {"window": torch.ones(1, 2, 4, device="cuda"), "token ids": torch.ones(1, 2)}
        cache_layer.rows |= {"keys": torch.ones(1, 2, 4, device="cuda")}
        for _ in range(2):
            cache_layer.offload()
            cache_layer.offload()
            assert {tensor.device.type for tensor in (cache_layer.columns | cache_layer.rows).values()} == {"cpu"}
            cache_layer.prefetch()
            devices = {name: x.device.type for name, x in (cache_layer.columns | cache_layer.rows).items()}
            assert devices == {"window": "cuda", "token ids": "cpu", "keys": "cuda"}


def test_the_cache_layer_is_not_that_of_deepseek_v4_in_transformers():
    """Both may be loaded: transformers finds a cache layer's class by its type's name."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4  # noqa: F401 - registers its layers

    config = tiny_config()
    cache = DynamicCache(config=config)
    assert [type(layer) for layer in cache.layers] == [DeepseekV41CacheLayer] * config.num_hidden_layers
