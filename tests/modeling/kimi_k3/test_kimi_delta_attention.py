import pytest
import torch
from kimi_k3_models import relative_error, tiny_config
from kimi_k3_reference import delta_rule
from torch._subclasses import FakeTensorMode
from transformers import DynamicCache

from blockdraft.modeling.kimi_k3.kimi_delta_attention import (
    ROLLBACK_TOKENS,
    KimiDeltaAttention,
    KimiDeltaAttentionCacheLayer,
    kda_chunked,
    kda_decay,
    kda_recurrence,
    kda_rollback,
    l2_normalise,
)

HEADS, DIM = 3, 8
# Decays: bounded as released, unbounded and mild, unbounded with sums in the thousands over a chunk.
DECAYS = {
    "bounded": lambda z: -5 * torch.sigmoid(3 * z),
    "mild": lambda z: -0.1 * torch.nn.functional.softplus(z),
    "strong": lambda z: -torch.exp(2 * z),
}


def recurrence_inputs(decay: str, length: int = 50, batch: int = 2) -> tuple[torch.Tensor, ...]:
    q, k, v, z = torch.randn(4, batch, HEADS, length, DIM)
    q, k = l2_normalise(q) * DIM**-0.5, l2_normalise(k)
    state = torch.randn(batch, HEADS, DIM, DIM)
    return q, k, v, DECAYS[decay](z), torch.rand(batch, HEADS, length), state


def float64_reference(q, k, v, g, beta, state) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [
        delta_rule(*(x[row].double().transpose(0, 1) for x in (q, k, v, g, beta)), state[row].double())
        for row in range(len(q))
    ]
    return torch.stack([output.transpose(0, 1) for output, _ in rows]), torch.stack([state for _, state in rows])


@pytest.fixture
def layer() -> KimiDeltaAttention:
    module = KimiDeltaAttention(tiny_config(), layer_idx=0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.requires_grad_(False)


def recording_cache(config=None) -> DynamicCache:
    cache = DynamicCache(config=config or tiny_config())
    cache.activate_past_recording()
    return cache


def test_decay(golden):
    golden = golden("k3_kda_gate")
    arguments = golden["in.g"], golden["param.A_log"], golden["param.dt_bias"]
    bound = golden.meta["options"]["lower_bound"]
    assert relative_error(kda_decay(*arguments, bound), golden["out.lower_bound"]) < 1e-5
    assert relative_error(kda_decay(*arguments, None), golden["out.softplus"]) < 1e-5
    assert kda_decay(arguments[0].bfloat16(), *arguments[1:], bound).dtype == torch.float32


@pytest.mark.parametrize("decay", DECAYS)
def test_recurrence_equals_float64(decay):
    inputs = recurrence_inputs(decay)
    output, _, state = kda_recurrence(*inputs)
    expected, expected_state = float64_reference(*inputs)
    assert relative_error(output, expected) < 1e-5
    assert relative_error(state, expected_state) < 1e-5


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
@pytest.mark.parametrize(
    "decay, factored", [("bounded", True), ("bounded", False), ("mild", False), ("strong", False)]
)
def test_chunked_equals_float64(decay, factored, chunk_size):
    if factored and chunk_size == 64:
        chunk_size = 7  # products over 64 tokens do not factor: exp(5 * 64) is no fp32
    inputs = recurrence_inputs(decay, length=150)
    output, updates, state = kda_chunked(*inputs, chunk_size=chunk_size, factored=factored)
    expected, expected_state = float64_reference(*inputs)
    # Sums of decay in the thousands cost digits in the differences of a chunk.
    tolerance = 5e-5 if decay == "strong" else 1e-5
    assert relative_error(output, expected) < tolerance
    assert relative_error(state, expected_state) < tolerance
    assert relative_error(updates, kda_recurrence(*inputs)[1]) < tolerance


@pytest.mark.parametrize("factored", [True, False])
def test_decay_at_the_bound_neither_overflows_nor_vanishes(factored):
    q, k, v, g, beta, state = recurrence_inputs("bounded", length=64)
    inputs = q, k, v, torch.full_like(g, -5), beta, state
    output, _, _ = kda_chunked(*inputs, factored=factored)
    assert relative_error(output, float64_reference(*inputs)[0]) < 1e-5


def test_chunked_gradients_equal_the_recurrence():
    inputs = [x.requires_grad_() for x in recurrence_inputs("bounded", length=20)]
    cotangent = torch.randn(2, HEADS, 20, DIM)
    expected = torch.autograd.grad((kda_recurrence(*inputs)[0] * cotangent).sum(), inputs)
    for factored in (True, False):
        actual = torch.autograd.grad((kda_chunked(*inputs, factored=factored)[0] * cotangent).sum(), inputs)
        for gradient, reference in zip(actual, expected, strict=True):
            assert relative_error(gradient, reference) < 1e-5


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("kept", [1, 5, 8])
def test_rollback_equals_the_recurrence(decay, kept):
    q, k, v, g, beta, state = recurrence_inputs(decay, length=8)
    _, updates, _ = kda_recurrence(q, k, v, g, beta, state)
    rolled_back = kda_rollback(k[:, :, :kept], g[:, :, :kept], updates[:, :, :kept], state)
    expected = kda_recurrence(*(x[:, :, :kept] for x in (q, k, v, g, beta)), state)[2]
    assert relative_error(rolled_back, expected) < 1e-5


@pytest.mark.parametrize("settings", [{}, {"use_full_rank_gate": False, "gate_lower_bound": None}])
def test_cache_continues_the_sequence(layer, settings):
    config = tiny_config(linear_attn_config=tiny_config().linear_attn_config | settings)
    layer = KimiDeltaAttention(config, layer_idx=0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden_states = torch.randn(2, 40, config.hidden_size)
    expected = layer(hidden_states)
    cache = DynamicCache(config=config)
    parts = [layer(part, cache) for part in hidden_states.split([2, 1, 20, 1, 1, 15], dim=1)]
    assert relative_error(torch.cat(parts, dim=1), expected) < 1e-5
    assert cache.layers[0].conv_states[0].shape == (2, 3 * 64, config.linear_conv_kernel_size - 1)


@pytest.mark.parametrize("prompt", [2, 5, ROLLBACK_TOKENS + 40])
def test_crop_after_verification_equals_never_having_seen_the_tokens(layer, prompt):
    kept_per_round = [(8, 3), (8, 8), (8, 1), (1, 1), (8, 0), (5, 2)]
    hidden_states = torch.randn(2, prompt + sum(kept for _, kept in kept_per_round), 48)
    expected = layer(hidden_states)
    cache = recording_cache()
    layer(hidden_states[:, :prompt], cache)
    cache.layers[0].crop(0)
    position = prompt
    for drafted, kept in kept_per_round:
        rejected = torch.randn(2, drafted - kept, 48)
        block = torch.cat([hidden_states[:, position : position + kept], rejected], dim=1)
        output = layer(block, cache)[:, :kept]
        if kept:
            assert relative_error(output, expected[:, position : position + kept]) < 1e-5
        cache.layers[0].crop(kept - drafted)
        position += kept


@pytest.mark.parametrize("removed", [0, 3, 7, 12, ROLLBACK_TOKENS])
@pytest.mark.parametrize(
    "lengths", [[20, 5, 1, 1, 30, 1, 4, 1, 1, 36], [100, 100], [30, 64], [70, 8, 65], [100, 8]], ids=str
)
def test_crop_takes_back_several_forwards(layer, lengths, removed):
    """As drafting with the model itself does, or a prompt in pieces: some forwards, then one crop over all of them."""
    hidden_states = torch.randn(2, sum(lengths), 48)
    cache = recording_cache()
    for part in hidden_states.split(lengths, dim=1):
        layer(part, cache)
    cache.layers[0].crop(-removed)
    reference = DynamicCache(config=tiny_config())
    layer(hidden_states[:, : sum(lengths) - removed], reference)
    assert relative_error(cache.layers[0].recurrent_states[0], reference.layers[0].recurrent_states[0]) < 1e-5
    assert relative_error(cache.layers[0].conv_states[0], reference.layers[0].conv_states[0]) < 1e-5
    following = torch.randn(2, 3, 48)
    assert relative_error(layer(following, cache), layer(following, reference)) < 1e-5


def test_a_recording_cache_stays_bounded(layer):
    cache = recording_cache()
    for _ in range(3):
        layer(torch.randn(1, 50, 48), cache)
    assert cache.layers[0].recorded_tokens == ROLLBACK_TOKENS
    assert cache.layers[0].conv_states[0].shape[-1] == ROLLBACK_TOKENS + 3


def test_a_cache_holds_no_storage_of_a_prompt(layer):
    """A view of what a long prompt left would keep all of it."""
    for cache in (DynamicCache(config=tiny_config()), recording_cache()):
        layer(torch.randn(1, 500, 48), cache)
        kept = cache.layers[0].conv_states[0], *(cache.layers[0].records or ())
        assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept)


def test_what_is_offloaded_comes_back_with_its_records():
    """On devices that are only named."""
    with FakeTensorMode():
        cache_layer = KimiDeltaAttentionCacheLayer()
        state, records = torch.ones(1, 2, 4, 4, device="cuda"), torch.ones(1, 2, 5, 4, device="cuda")
        cache_layer.device, cache_layer.conv_states = state.device, [torch.ones(1, 6, 8, device="cuda")]
        cache_layer.is_conv_states_initialized[0] = True
        cache_layer.update_recurrent_state(state)
        cache_layer.record(state, records, records, records)
        for move, device in ((cache_layer.offload, "cpu"), (cache_layer.prefetch, "cuda")):
            move()
            held = (cache_layer.conv_states[0], cache_layer.recurrent_states[0], cache_layer.base_state)
            assert {tensor.device.type for tensor in (*held, *cache_layer.records)} == {device}


def test_crop_errors(layer):
    hidden_states = torch.randn(1, 100, 48)
    plain = DynamicCache(config=tiny_config())
    layer(hidden_states, plain)
    assert not plain.layers[0].is_croppable
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        plain.layers[0].crop(-1)

    cache = recording_cache()
    cache.layers[0].crop(0)  # nothing seen, nothing to do
    assert cache.layers[0].is_croppable
    layer(hidden_states, cache)
    with pytest.raises(ValueError, match="negative"):
        cache.layers[0].crop(3)
    with pytest.raises(RuntimeError, match=f"more than the {ROLLBACK_TOKENS} tokens"):
        cache.layers[0].crop(-ROLLBACK_TOKENS - 1)
    cache.layers[0].crop(-2)
    with pytest.raises(RuntimeError, match="more than the 0 tokens"):
        cache.layers[0].crop(-1)


def test_reset_and_reorder(layer):
    hidden_states = torch.randn(2, 10, 48)
    cache = DynamicCache(config=tiny_config())
    layer(hidden_states, cache)
    cache.layers[0].reorder_cache(torch.tensor([1, 1]))
    following = torch.randn(1, 1, 48).expand(2, -1, -1)
    output = layer(following, cache)
    assert relative_error(output[:1], layer(torch.cat([hidden_states[1:], following[:1]], dim=1))[:, -1:]) < 1e-5
    cache.layers[0].reset()
    assert relative_error(layer(hidden_states, cache), layer(hidden_states)) < 1e-5


def test_transformers_builds_the_cache_from_the_configuration():
    config = tiny_config()
    kinds = [type(layer) is KimiDeltaAttentionCacheLayer for layer in DynamicCache(config=config).layers]
    assert kinds == [kind == "kimi_delta_attention" for kind in config.layer_types]


def test_left_padding_is_neutral(layer):
    hidden_states = torch.randn(2, 9, 48)
    padded = torch.cat([torch.zeros(2, 5, 48), hidden_states], dim=1)
    cache, padded_cache = DynamicCache(config=tiny_config()), DynamicCache(config=tiny_config())
    assert relative_error(layer(padded, padded_cache)[:, 5:], layer(hidden_states, cache)) < 1e-5
    states = [c.layers[0].recurrent_states[0] for c in (padded_cache, cache)]
    assert relative_error(*states) < 1e-5


def test_recurrence_is_fp32_under_autocast(layer):
    hidden_states = torch.randn(1, 20, 48)
    layer = layer.bfloat16()
    expected = layer(hidden_states.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(hidden_states.bfloat16()), expected)
