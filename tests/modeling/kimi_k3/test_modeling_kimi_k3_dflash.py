"""The DFlash draft against the reference numbers, the maths in float64, its own cache, and real decoding."""

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.flex_attention as flex_integration
from dense_blocks import additive_mask, block_attention_mask
from draft_models import draft_inputs, tiny_draft
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DFlashCache

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.draft.block_visibility import block_visibility
from blockdraft.modeling.draft.flex_block_mask import flex_block_mask
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel

CASES = ["base", "nogate", "outputs"]
TOLERANCE = 5e-5


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def golden_draft(case, attn_implementation):
    config = KimiK3DFlashConfig(**case.meta["config"], slot_layout="1+N")
    draft = KimiK3DFlashDraftModel._from_config(config, attn_implementation=attn_implementation).eval()
    draft.load_state_dict(case.group("param"))
    return draft


def golden_noise(case, draft):
    """Blocks of the `outputs` case are embedded here, the others are stored."""
    if "in.noise_embedding" in case.tensors:
        return case["in.noise_embedding"]
    table = nn.Embedding.from_pretrained(case["in.embed_weight"])
    anchors, keep, mask_id = case["in.anchor_positions"], case["in.block_keep_mask"], draft.config.mask_token_id
    ids = torch.full((*anchors.shape, draft.config.block_size), mask_id)
    ids[..., 0] = torch.where(keep, case["in.input_ids"].gather(1, anchors), mask_id)
    noise = draft.embed_block(ids.flatten(1), table)
    assert relative_error(noise, case["out.noise_embedding"]) <= TOLERANCE
    return noise


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CASES)
def test_every_activation_and_gradient_is_the_references(golden, name, attn_implementation):
    case = golden(f"k3_dflash_forward_{name}")
    draft = golden_draft(case, attn_implementation)
    seen = {}
    draft.hidden_norm.register_forward_hook(lambda module, args, output: seen.update(context=output))
    for i, layer in enumerate(draft.layers):
        layer.self_attn.register_forward_hook(lambda module, args, output, i=i: seen.update({f"attn{i}": output}))
        layer.register_forward_hook(lambda module, args, output, i=i: seen.update({f"layer{i}": output}))
    seen["hidden"] = draft(
        noise_embedding=golden_noise(case, draft),
        target_hidden=case["in.target_hidden"],
        attention_mask=additive_mask(case["out.mask_visible"], torch.float32),
    ).last_hidden_state
    head = nn.Linear(*reversed(case["in.lm_head_weight"].shape), bias=False)
    head.weight.data = case["in.lm_head_weight"]
    seen["logits"] = draft.compute_logits(seen["hidden"], head)
    seen["scalar"] = (seen["logits"] * case["in.logits_cotangent"]).sum()
    seen["scalar"].backward()

    errors = {name: relative_error(value, case[f"out.{name}"]) for name, value in seen.items()}
    for parameter, expected in case.group("grad").items():
        errors[f"grad.{parameter}"] = relative_error(draft.get_parameter(parameter).grad, expected)
    assert len(errors) == 8 + len(case.meta["options"]["grads"])
    worst = max(errors, key=errors.get)
    assert errors[worst] <= TOLERANCE, f"{worst}: {errors[worst]:.2e}"


@torch.no_grad()
def test_flex_attention_agrees(golden):
    """Forward only, and not compiled: on a CPU FlexAttention has no backward, and its compiler needs a C++ one."""
    case = golden("k3_dflash_forward_base")
    draft = golden_draft(case, "flex_attention")
    noise, features = case["in.noise_embedding"], case["in.target_hidden"]
    anchors, keep = case["in.anchor_positions"], case["in.block_keep_mask"]
    for mask in (flex_block_mask(block_visibility(anchors, keep, features.shape[1], 5)), case["out.mask_visible"]):
        with torch.compiler.set_stance("force_eager"):
            hidden = draft(noise, features, mask).last_hidden_state
        assert relative_error(hidden, case["out.hidden"]) <= TOLERANCE
    draft.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="flex_attention"):
        draft(noise, features, flex_block_mask(block_visibility(anchors, keep, features.shape[1], 5)))


WIDE_HEADS = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


@torch.no_grad()
def test_flex_attention_compiles_for_few_shapes(monkeypatch):
    """The first of 12 lengths compiles, and at most two of the others do, whatever the number of blocks near 500 and
    whether a layer has a window or not."""
    compiled = CompileCounter()
    torch.compiler.reset()
    flex = torch.compile(flex_attention, backend=compiled)
    monkeypatch.setattr(flex_integration.WrappedFlexAttention, "__call__", lambda self: flex)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 1, "block_size": 2, "is_causal": True}
    draft = tiny_draft("flex_attention", sliding_window=16, num_full_attention_layers=1, **shape, **WIDE_HEADS)
    for i, length in enumerate(torch.linspace(1024, 4096, 12).long().tolist()):
        anchors = torch.linspace(1, length - 2, 500 + i).long()[None]
        draft(**draft_inputs(draft, length, len(anchors[0])), anchor_positions=anchors)
    assert 1 <= compiled.frame_count <= 3


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [{}, {"sliding_window": 5, "is_causal": True}, {"sliding_window": 5, "num_full_attention_layers": 1}],
    ids=str,
)
def test_flex_attention_by_anchors_agrees(settings):
    draft = tiny_draft("flex_attention", **WIDE_HEADS, **settings)
    keep = torch.tensor([[True] * 3, [True, True, False]])
    inputs = draft_inputs(draft, context_length=13, blocks=3, batch=2)
    inputs |= {"anchor_positions": torch.tensor([[3, 4, 11], [2, 9, 0]]), "block_keep_mask": keep}
    inputs["document_ids"] = torch.tensor([[0] * 5 + [1] * 8, [0] * 13])
    with torch.compiler.set_stance("force_eager"):
        hidden = draft(**inputs).last_hidden_state
    draft.set_attn_implementation("eager")
    torch.testing.assert_close(hidden, draft(**inputs).last_hidden_state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "shape, training, with_gradients, says",
    [
        (WIDE_HEADS, True, True, "cannot train on 'cpu'"),
        ({}, False, False, "at least 16 channels"),
        (WIDE_HEADS | {"attention_dropout": 0.1}, True, False, "`attention_dropout` is 0.1"),
    ],
)
def test_where_flex_attention_cannot(shape, training, with_gradients, says):
    """Who asks for it by name is told, and not given another."""
    draft = tiny_draft("flex_attention", **shape).train(training)
    inputs = {"anchor_positions": torch.tensor([[3, 6]])} | draft_inputs(draft, blocks=2)
    with torch.set_grad_enabled(with_gradients):
        with pytest.raises(ValueError, match=f'{says}.*attn_implementation="sdpa"'):
            draft(**inputs)
        draft.set_attn_implementation("sdpa")
        draft(**inputs)


def float64_forward(draft, noise, features, visible):
    """The draft's forward from its definition, in float64 and without the classes under test."""
    config, weights = draft.config, {name: p.detach().double() for name, p in draft.named_parameters()}
    heads, nope, rope, width = (
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
    )

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    def norm(x, name, eps=config.rms_norm_eps):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def split_heads(x):
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    context, x = norm(linear(features.double(), "fc"), "hidden_norm"), noise.double()
    for i in range(config.num_hidden_layers):
        attn, h = f"layers.{i}.self_attn", norm(x, f"layers.{i}.input_layernorm")
        if config.q_lora_rank is None:
            q = linear(h, f"{attn}.q_proj")
        else:
            q = linear(norm(linear(h, f"{attn}.q_a_proj"), f"{attn}.q_a_layernorm", 1e-6), f"{attn}.q_b_proj")
        rows = linear(torch.cat([context, h], dim=1), f"{attn}.kv_a_proj_with_mqa")
        latent, shared = rows.split([config.kv_lora_rank, rope], dim=-1)
        kv = split_heads(linear(norm(latent, f"{attn}.kv_a_layernorm", 1e-6), f"{attn}.kv_b_proj"))
        keys = torch.cat([kv[..., :nope], shared[:, None].expand(-1, heads, -1, -1)], dim=-1)
        scores = split_heads(q) @ keys.transpose(2, 3) / (nope + rope) ** 0.5
        o = (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ kv[..., nope:]).transpose(1, 2).flatten(2)
        assert o.shape[-1] == heads * width
        if config.mla_use_output_gate:
            o = o * linear(h, f"{attn}.g_proj").sigmoid()
        x = x + linear(o, f"{attn}.o_proj")
        h, mlp = norm(x, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp"
        gate, up = linear(h, f"{mlp}.gate_proj"), linear(h, f"{mlp}.up_proj")
        beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        gate = beta * torch.tanh(gate / beta) * gate.sigmoid()
        x = x + linear(gate * linear_beta * torch.tanh(up / linear_beta), f"{mlp}.down_proj")
    return norm(x, "norm")


def visible_by_definition(anchors, context_length, block_size, window=None):
    """[1, 1, N * bs, S + N * bs], one comparison at a time."""
    queries = len(anchors) * block_size
    visible = torch.zeros(queries, context_length + queries, dtype=torch.bool)
    for n, anchor in enumerate(anchors):
        for j in range(block_size):
            for s in range(min(anchor, context_length)):
                visible[n * block_size + j, s] = window is None or anchor + j - s < window
            start = context_length + n * block_size
            visible[n * block_size + j, start : start + block_size] = True
    return visible[None, None]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("settings", [{}, {"q_lora_rank": None}, {"mla_use_output_gate": False}], ids=str)
def test_agrees_with_the_maths_in_float64(settings, window):
    draft, anchors = tiny_draft(**settings), [3, 4, 11]
    inputs = draft_inputs(draft, context_length=13, blocks=3)
    visible = visible_by_definition(anchors, 13, 4, window)
    keep = torch.ones(1, 3, dtype=torch.bool)
    training_mask = block_attention_mask(torch.tensor([anchors]), keep, 13, 4, sliding_window=window)
    assert torch.equal(training_mask, visible)
    hidden = draft(**inputs, attention_mask=training_mask).last_hidden_state
    assert relative_error(hidden, float64_forward(draft, *inputs.values(), visible)) <= TOLERANCE


@pytest.mark.parametrize("settings", [{}, {"sliding_window": 6}, {"sliding_window": 1}, {"is_causal": True}], ids=str)
def test_one_block_needs_no_mask(settings):
    """Without a mask a block sees what the training mask of a block at the end of the context shows it."""
    draft = tiny_draft(**settings)
    inputs = draft_inputs(draft, context_length=9)
    rule = {"sliding_window": draft.config.sliding_window, "causal": draft.config.is_causal}
    mask = block_attention_mask(torch.tensor([[9]]), torch.ones(1, 1).bool(), 9, 4, **rule)
    expected = draft(**inputs, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(draft(**inputs).last_hidden_state, expected)
    cached = draft(**inputs, cache=DFlashCache(config=draft.config)).last_hidden_state
    torch.testing.assert_close(cached, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_last_layers_see_the_whole_context():
    """Each layer as if it stood in a draft that has its window everywhere; by anchors, and as one block."""
    hybrid = tiny_draft(sliding_window=3, num_hidden_layers=3, num_full_attention_layers=1)
    assert hybrid.config.context_windows == [3, 3, None]
    inputs = draft_inputs(hybrid, context_length=13, blocks=2)
    anchors, keep = torch.tensor([[6, 12]]), torch.ones(1, 2).bool()
    context = hybrid.hidden_norm(hybrid.fc(inputs["context_hidden_states"]))
    expected = inputs["noise_embeds"]
    for layer, window in zip(hybrid.layers, (3, 3, None), strict=True):
        expected = layer(expected, context, block_attention_mask(anchors, keep, 13, 4, sliding_window=window))
    expected = hybrid.norm(expected)
    found = hybrid(**inputs, anchor_positions=anchors).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    last = {"noise_embeds": inputs["noise_embeds"][:, 4:], "context_hidden_states": inputs["context_hidden_states"]}
    last["context_hidden_states"] = last["context_hidden_states"][:, :12]
    torch.testing.assert_close(hybrid(**last).last_hidden_state, expected[:, 4:], rtol=1e-4, atol=1e-5)
    windowed = tiny_draft(sliding_window=3, num_hidden_layers=3)
    windowed.load_state_dict(hybrid.state_dict())
    assert not torch.allclose(windowed(**inputs, anchor_positions=anchors).last_hidden_state, expected, atol=1e-3)
    with pytest.raises(ValueError, match="pass `anchor_positions`"):
        hybrid(**inputs, attention_mask=block_attention_mask(anchors, keep, 13, 4))


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa", "flex_attention"])
@pytest.mark.parametrize("window, full_layers", [(None, 0), (5, 0), (5, 1)])
@pytest.mark.parametrize("padding", [0, 3])
@torch.no_grad()
def test_cached_rounds_equal_the_whole_context(attn_implementation, window, full_layers, padding):
    shape = {"num_hidden_layers": 3, "sliding_window": window, "num_full_attention_layers": full_layers}
    draft = tiny_draft(attn_implementation, **shape)
    features, cache, length = torch.randn(2, 20, draft.fc.in_features), DFlashCache(config=draft.config), 0
    history = torch.ones(2, 20, dtype=torch.long)
    history[1, :padding] = 0  # the second row is shorter and padded on the left
    for new in (8, 1, 4, 2, 5):
        length += new
        noise = torch.randn(2, 4, draft.config.hidden_size)
        mask = torch.cat([history[:, :length], torch.ones(2, 4, dtype=torch.long)], dim=1) if padding else None
        cache.set_previous_accepted_tokens(new)
        cached = draft(noise, features[:, length - new : length], attention_mask=mask, cache=cache).last_hidden_state
        assert cache.get_seq_length() == length + 4
        cache.crop(-4)
        for row, start in ((0, 0), (1, padding)):
            alone = draft(noise[row : row + 1], features[row : row + 1, start:length]).last_hidden_state
            torch.testing.assert_close(cached[row : row + 1], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_cache_holds_latents_and_accepted_rows_are_not_computed_again():
    draft = tiny_draft()
    seen = []
    draft.fc.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    draft.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda *_: pytest.fail("a cached row was expanded"))
    cache = draft(**draft_inputs(draft, context_length=6), use_cache=True).cache
    keys, values = cache.layers[1].keys, cache.layers[1].values
    assert keys.shape == (1, 1, 10, draft.config.kv_lora_rank)
    assert values.shape == (1, 1, 10, draft.config.qk_rope_head_dim)
    cache.crop(-4)
    draft(**draft_inputs(draft, context_length=2), cache=cache)
    assert torch.equal(cache.layers[1].keys[..., :6, :], keys[..., :6, :])
    assert seen == [6, 2]


@torch.no_grad()
def test_an_adapted_projection_is_not_absorbed(monkeypatch):
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    draft = tiny_draft()
    for layer in draft.layers:
        layer.self_attn.kv_b_proj.__class__ = Adapted
    inputs = draft_inputs(draft)
    expected = draft(**inputs).last_hidden_state
    assert torch.equal(draft(**inputs, use_cache=True).last_hidden_state, expected)


def test_slots_see_each_other_in_both_directions():
    draft = tiny_draft()
    inputs = draft_inputs(draft)
    inputs["noise_embeds"].requires_grad_()
    draft(**inputs).last_hidden_state[0, 1].sum().backward()
    assert (inputs["noise_embeds"].grad[0].abs().sum(-1) > 0).all()


def test_what_tells_masked_slots_apart():
    """Without positions, equal tokens that see the same keys are one: a window or a causal block separates them."""
    noise = torch.randn(1, 1, 32).expand(1, 4, 32)
    for settings, same in (({}, True), ({"is_causal": True}, False), ({"sliding_window": 6}, False)):
        draft = tiny_draft(**settings)
        inputs = draft_inputs(draft) | {"noise_embeds": noise}
        hidden = draft(**inputs).last_hidden_state
        assert torch.allclose(hidden[:, 2:], hidden[:, 1:3], atol=1e-4) == same, settings


def test_names_of_the_reference_are_aliases():
    draft = tiny_draft()
    inputs = draft_inputs(draft)
    by_alias = draft(noise_embedding=inputs["noise_embeds"], target_hidden=inputs["context_hidden_states"])
    assert torch.equal(by_alias.last_hidden_state, draft(**inputs).last_hidden_state)
    with pytest.raises(ValueError, match="target_hidden"):
        draft(**inputs, target_hidden=inputs["context_hidden_states"])


def test_positions_do_not_matter():
    draft = tiny_draft()
    inputs = draft_inputs(draft)
    shifted = draft(**inputs, position_ids=torch.arange(11)[None] + 1000).last_hidden_state
    assert torch.equal(shifted, draft(**inputs).last_hidden_state)


@torch.no_grad()
def test_bfloat16():
    draft = tiny_draft()
    inputs = draft_inputs(draft)
    expected = draft(**inputs).last_hidden_state
    draft.to(torch.bfloat16)
    assert {parameter.dtype for parameter in draft.parameters()} == {torch.bfloat16}
    for cache in (None, DFlashCache(config=draft.config)):
        low = draft(**{name: value.bfloat16() for name, value in inputs.items()}, cache=cache).last_hidden_state
        assert low.dtype == torch.bfloat16 and relative_error(low, expected) < 0.03
    # A target in another dtype gets the dtype that its head takes.
    assert draft(**inputs).last_hidden_state.dtype == torch.float32


@pytest.mark.parametrize("mask", [None, torch.ones(1, 15)], ids=["no mask", "2D mask"])
def test_blocks_without_a_mask_are_refused(mask):
    draft = tiny_draft()
    with pytest.raises(ValueError, match="4D `attention_mask`"):
        draft(**draft_inputs(draft, blocks=2), attention_mask=mask)


@pytest.mark.parametrize("shape", [(1, 10), (1, 1, 4, 12), (1, 1, 3, 11)])
def test_a_mask_of_another_shape_is_refused(shape):
    draft = tiny_draft()
    with pytest.raises(ValueError, match=r"`attention_mask` has the shape \[.*\], not \[1, (1, 4, )?11\]"):
        draft(**draft_inputs(draft), attention_mask=torch.ones(shape, dtype=torch.bool))


def test_features_of_other_layers_are_refused():
    draft = tiny_draft()
    inputs = draft_inputs(draft)
    inputs["context_hidden_states"] = inputs["context_hidden_states"][..., :32]
    with pytest.raises(ValueError, match="target_layer_ids"):
        draft(**inputs)
    with pytest.raises(ValueError, match=r"`noise_embeds` has the shape \[1, 4, 31\], not \[B, Q, 32\]"):
        draft(torch.randn(1, 4, 31), draft_inputs(draft)["context_hidden_states"])


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return Qwen3ForCausalLM(config).eval().requires_grad_(False)


def overfit(draft, target, ids, steps=150):
    """Teaches the draft one answer, from every anchor at once."""
    anchors = torch.arange(1, ids.shape[1] - 4)[None]
    rule = {"sliding_window": draft.config.sliding_window, "causal": draft.config.is_causal}
    mask = block_attention_mask(anchors, torch.ones_like(anchors).bool(), ids.shape[1], 4, **rule)
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i + 1] for i in draft.config.target_layer_ids], dim=-1)
    labels = ids[0, anchors[0, :, None] + torch.arange(1, 4)]
    blocks = torch.full((anchors.shape[1], 4), draft.config.mask_token_id)
    blocks[:, 0] = ids[0, anchors[0]]
    noise = draft.embed_block(blocks.view(1, -1), target.get_input_embeddings())
    optimizer = torch.optim.Adam(draft.parameters(), lr=5e-3)
    for _ in range(steps):
        hidden = draft.train()(noise, features, mask).last_hidden_state.view(-1, 4, 32)[:, 1:]
        loss = F.cross_entropy(draft.compute_logits(hidden, target.lm_head).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval()


@pytest.mark.parametrize("settings", [{"is_causal": True}, {"sliding_window": 6}], ids=str)
def test_native_generate_equals_greedy(target, settings, monkeypatch):
    prompt = torch.tensor([[3, 14, 15, 9, 26, 5, 35]])
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = target.generate(prompt, **options)
    draft = overfit(tiny_draft(**settings), target, plain)

    rounds, contexts = [], []
    forward = KimiK3DFlashDraftModel.forward

    def checked_forward(self, noise_embeds, context_hidden_states, attention_mask=None, cache=None, **kwargs):
        output = forward(self, noise_embeds, context_hidden_states, attention_mask, cache=cache, **kwargs)
        contexts.append(context_hidden_states)
        whole = forward(self, noise_embeds, torch.cat(contexts, dim=1)).last_hidden_state
        torch.testing.assert_close(output.last_hidden_state, whole, rtol=1e-4, atol=1e-4)
        rounds.append(context_hidden_states.shape[1])
        return output

    monkeypatch.setattr(KimiK3DFlashDraftModel, "forward", checked_forward)
    native = target.generate(prompt, assistant_model=draft, speculation_type="dflash", **options)
    assert torch.equal(native, plain)
    # 40 tokens are the prefill's one and up to 4 a round: what the draft has learned is proposed and accepted.
    assert rounds[0] == prompt.shape[1] and len(rounds) < 16, rounds
