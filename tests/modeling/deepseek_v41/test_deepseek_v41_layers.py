import copy

import pytest
import torch
from deepseek_v41_models import golden_name, golden_parameters, relative_error, started, tiny_config

from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.modeling.deepseek_v41.deepseek_v41_layers import (
    AttentionSinks,
    DeepseekV41Experts,
    DeepseekV41HyperConnection,
    DeepseekV41MoE,
    DeepseekV41RMSNorm,
    DeepseekV41Router,
    DeepseekV41WindowAttention,
    clamped_swiglu,
    eager_sink_attention,
    rope_frequencies,
    rope_rotations,
    rotate,
    sdpa_sink_attention,
)
from blockdraft.modeling.deepseek_v41.hyper_connections import collapse_streams, expand_streams
from blockdraft.modeling.ops.fp32 import Fp32Linear

TOLERANCE = 1e-5


def check_gradients(module, golden, objective, **inputs):
    objective.backward()
    tensors = dict(module.named_parameters()) | inputs
    for name, expected in golden.group("grad").items():
        assert relative_error(tensors[golden_name(name)].grad, expected) < TOLERANCE, name


# Norm and rotary embedding


def test_rmsnorm(golden):
    golden = golden("v41_rmsnorm")
    norm = DeepseekV41RMSNorm(golden.meta["options"]["dim"], golden.meta["options"]["eps"])
    norm.load_state_dict(golden.group("param"))
    x = golden["in.x"].requires_grad_()
    output = norm(x)
    assert relative_error(output, golden["out.float32"]) < TOLERANCE
    check_gradients(norm, golden, (output * golden["in.cotangent"]).sum(), x=x)
    # The product with the weight comes before the cast: in bf16 every bit shows it.
    assert torch.equal(norm.bfloat16()(x.detach().bfloat16()), golden["out.bfloat16"])


@pytest.mark.parametrize("kind", ["plain", "compressed"])
def test_rotary_embedding(golden, kind):
    golden = golden("v41_rope")
    config = DeepseekV41TextConfig(**golden.meta["config"])
    theta, yarn = config.rope_theta, None
    if kind == "compressed":
        names = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
        theta, yarn = config.compress_rope_theta, tuple(config.rope_scaling[name] for name in names)
    frequencies = rope_frequencies(config.qk_rope_head_dim, theta, yarn)
    rotations = rope_rotations(golden["in.position_ids"], frequencies)
    angles = golden[f"out.{kind}.angles"]
    assert relative_error(golden["in.position_ids"][..., None] * frequencies, angles) < TOLERANCE
    for direction in ("forward", "inverse"):
        inverse = direction == "inverse"
        for name, turns in (("x3", rotations), ("x4", rotations.unsqueeze(-2))):
            output = rotate(golden[f"in.{name}"], turns, inverse)
            assert relative_error(output, golden[f"out.{kind}.{name}.{direction}"]) < TOLERANCE


def test_released_yarn_ramp():
    plain, scaled = rope_frequencies(64, 1.6e5), rope_frequencies(64, 1.6e5, (16, 32, 1, 65536))
    assert torch.equal(scaled[:16], plain[:16])  # as they are up to channel 15,
    assert torch.equal(scaled[25:], plain[25:] / 16)  # stretched from channel 25 on
    assert (scaled[16:25] < plain[16:25]).all() and (scaled[16:25] > plain[16:25] / 16).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_goes_both_ways(dtype):
    x = torch.randn(2, 7, 3, 20, dtype=dtype)
    rotations = rope_rotations(torch.arange(7), rope_frequencies(8, 50.0)).unsqueeze(-2)
    turned = rotate(x, rotations)
    assert turned.dtype == dtype and torch.equal(turned[..., :12], x[..., :12]) and torch.equal(turned[:, 0], x[:, 0])
    assert not torch.isclose(turned[:, 1:, :, 12:], x[:, 1:, :, 12:]).all(-1).any()
    assert relative_error(rotate(turned, rotations, inverse=True), x) < {torch.float32: 1e-6}.get(dtype, 1e-2)


# Hyper-connections


def test_hyper_connection(golden):
    golden = golden("v41_hyper_connection")
    hyper = DeepseekV41HyperConnection(DeepseekV41TextConfig(**golden.meta["config"]))
    hyper.load_state_dict(golden.group("param"))
    streams = golden["in.streams"].requires_grad_()
    mix = hyper(streams)
    outputs = mix._asdict() | {
        "expand": expand_streams(golden["in.sublayer_output"], streams, mix.post, mix.comb),
        "collapse": collapse_streams(streams, golden["in.pre_mix"]),
    }
    for name, actual in outputs.items():
        assert relative_error(actual, golden[f"out.{name}"]) < TOLERANCE, name
    objective = (outputs["expand"] * golden["in.cotangent"]).sum() + outputs["collapse"].sum()
    objective = objective + (mix.pre * golden["in.cotangent_pre"]).sum()
    check_gradients(hyper, golden, objective, streams=streams)


def test_hyper_connection_in_bfloat16(golden):
    golden = golden("v41_hyper_connection")
    hyper = DeepseekV41HyperConnection(DeepseekV41TextConfig(**golden.meta["config"]))
    hyper.load_state_dict(golden.group("param"))
    streams = golden["in.streams"].bfloat16()
    mix = hyper.to(torch.bfloat16)(streams)
    assert relative_error(mix.pre, golden["out.bf16.pre"]) < TOLERANCE
    assert relative_error(mix.comb, golden["out.bf16.comb"]) < TOLERANCE
    output = golden["in.sublayer_output"].bfloat16()
    assert torch.equal(expand_streams(output, streams, mix.post, mix.comb), golden["out.bf16.expand"])
    assert torch.equal(collapse_streams(streams, golden["in.pre_mix"]), golden["out.bf16.collapse"])


def test_mixing_is_doubly_stochastic():
    hyper = started(DeepseekV41HyperConnection(tiny_config(hc_sinkhorn_iters=40, hc_eps=1e-6)))
    comb = hyper(torch.randn(2, 5, 3, 40)).comb
    assert comb.shape == (2, 5, 3, 3) and (comb > 0).all()
    for axis in (-1, -2):
        assert torch.allclose(comb.sum(axis), torch.ones(2, 5, 3), atol=1e-2)


# Experts


def test_moe(golden):
    golden = golden("v41_moe")
    dspark = {name: golden.meta["config"][f"dspark_{name}"] for name in ("n_routed_experts", "num_experts_per_tok")}
    config = DeepseekV41TextConfig(**(golden.meta["config"] | dspark))
    config._experts_implementation = "eager"
    moe = DeepseekV41MoE(config)
    moe.load_state_dict(golden_parameters(golden), strict=True)
    x = golden["in.x"]

    _, weights, experts = moe.gate(x.flatten(0, 1))
    order = experts.argsort(dim=-1)
    assert torch.equal(experts.gather(-1, order), golden["out.gate.indices_sorted"])
    assert relative_error(weights.gather(-1, order), golden["out.gate.weights_by_sorted_index"]) < TOLERANCE
    assert relative_error(moe.shared_experts(x.flatten(0, 1)), golden["out.shared"]) < TOLERANCE
    padded = moe(x, padding_mask=golden["in.padding_mask"])
    assert relative_error(padded, golden["out.y_padding_mask"]) < TOLERANCE
    with_images = moe(x, vision_token_types=golden["in.vision_token_types"])
    assert relative_error(with_images, golden["out.y_with_vision_tokens"]) < TOLERANCE
    output = moe(x)
    assert relative_error(output, golden["out.y"]) < TOLERANCE
    check_gradients(moe, golden, (output * golden["in.cotangent"]).sum())


def test_router_biases_choose_and_do_not_weigh():
    gate = started(DeepseekV41Router(tiny_config()))
    gate.e_score_correction_bias[2], gate.bias_vl[4] = 9.0, 9.0
    is_image = torch.arange(50) % 2 == 0
    logits, weights, experts = gate(torch.randn(50, 40), is_image)
    assert (experts[~is_image] == 2).any(-1).all() and (experts[is_image] == 4).any(-1).all()
    scores = torch.log1p(logits.double().exp()).sqrt().gather(-1, experts)
    assert torch.allclose(weights.double(), 1.7 * scores / scores.sum(-1, keepdim=True), atol=1e-6)


@pytest.mark.parametrize("settings", [{"num_experts_per_tok": 1}, {"norm_topk_prob": False}])
def test_weights_that_are_not_renormalised(settings):
    gate = started(DeepseekV41Router(tiny_config(**settings)))
    logits, weights, experts = gate(torch.randn(5, 40))
    assert torch.allclose(weights, 1.7 * torch.nn.functional.softplus(logits).sqrt().gather(-1, experts))


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_expert_implementations_agree(implementation):
    x, results = torch.randn(2, 9, 40), {}
    moe = started(DeepseekV41MoE(tiny_config()))
    for name in ("eager", implementation):
        moe.experts.config._experts_implementation = name
        moe.zero_grad()
        output = moe(x, padding_mask=torch.arange(9).expand(2, -1) > 6)
        output.square().sum().backward()
        gradients = [parameter.grad.clone() for parameter in moe.parameters()]
        results[name] = [output.detach(), *gradients]
    for actual, expected in zip(results[implementation], results["eager"], strict=True):
        assert relative_error(actual, expected) < TOLERANCE


def test_routing_weight_is_applied_before_the_down_projection():
    config = tiny_config(n_routed_experts=1, num_experts_per_tok=1)
    config._experts_implementation = "eager"
    experts = started(DeepseekV41Experts(config)).bfloat16()
    x, weight = torch.randn(4, 40, dtype=torch.bfloat16), torch.rand(4, 1)
    activated = clamped_swiglu(*(x @ experts.gate_up_proj[0]).chunk(2, dim=-1), 0.9) * weight
    expected = activated.bfloat16() @ experts.down_proj[0]
    assert torch.equal(experts(x, torch.zeros(4, 1, dtype=torch.long), weight), expected)


# Attention


def test_grouped_output(golden):
    golden = golden("v41_grouped_output")
    config = DeepseekV41TextConfig(**golden.meta["config"])
    attention = DeepseekV41WindowAttention(config, golden.meta["options"]["layer_idx"])
    attention.load_state_dict(golden.group("param"))
    attended = golden["in.attended"]
    groups = attention.wo_a(attended.flatten(-2).unflatten(-1, (config.o_groups, -1)))
    assert relative_error(groups, golden["out.wo_a_only"]) < TOLERANCE
    frequencies = rope_frequencies(config.qk_rope_head_dim, config.rope_theta)
    output = attention.project_output(attended, rope_rotations(golden["in.position_ids"], frequencies))
    output = output * golden["in.valid_tokens"].unsqueeze(-1)
    assert relative_error(output, golden["out.output"]) < TOLERANCE
    check_gradients(attention, golden, (output * golden["in.cotangent"]).sum())


def sink_inputs(dtype=torch.float32) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Queries, keys, sinks, and which keys are seen: none by the first query of row 0."""
    inputs = [torch.randn(2, 5, 6, 44), torch.randn(2, 9, 44), torch.randn(6)]
    visible = torch.rand(2, 1, 5, 9) > 0.5
    visible[0, 0, 0] = False
    return [x.to(dtype).requires_grad_() for x in inputs], visible


def sink_attention_by_definition(queries, keys, visible, sinks, scaling):
    """A loop over queries and heads in float64."""
    queries, keys, sinks = queries.double(), keys.double(), sinks.double()
    output = torch.zeros_like(queries)
    for b, t, h in torch.cartesian_prod(*map(torch.arange, queries.shape[:3])).tolist():
        seen = keys[b] if visible is None else keys[b, visible[b, 0, t]]
        exponentials = (seen @ queries[b, t, h] * scaling).exp()
        output[b, t, h] = exponentials @ seen / (exponentials.sum() + sinks[h].exp())
    return output


@pytest.mark.parametrize("attention", [eager_sink_attention, sdpa_sink_attention])
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_attention_with_sinks(attention, mask):
    (queries, keys, sinks), visible = sink_inputs()
    visible = None if mask == "none" else visible
    given = torch.zeros(visible.shape).masked_fill(~visible, -torch.inf) if mask == "additive" else visible
    output = attention(queries, keys, given, sinks, 0.2)
    expected = sink_attention_by_definition(queries, keys, visible, sinks, 0.2)
    assert relative_error(output, expected) < TOLERANCE
    cotangent = torch.randn(output.shape)
    gradients = torch.autograd.grad((output * cotangent).sum(), (queries, keys, sinks))
    references = torch.autograd.grad((expected * cotangent).sum(), (queries, keys, sinks))
    for gradient, reference in zip(gradients, references, strict=True):
        assert relative_error(gradient, reference) < TOLERANCE
    if mask != "none":
        assert not output[0, 0].any() and not gradients[0][0, 0].any()


@pytest.mark.parametrize("attention", [eager_sink_attention, sdpa_sink_attention])
def test_half_precision_keeps_the_sink(attention):
    """A sink of 12.1 is 80.26 before the scaling, in bf16 alone 80.5: 3.6 % in the softmax."""
    sinks = torch.tensor([12.1, -4.1, 0.37])
    queries, keys = torch.zeros(1, 4, 3, 44, dtype=torch.bfloat16), torch.randn(1, 60, 44, dtype=torch.bfloat16)
    output = attention(queries, keys, None, sinks, 44**-0.5)
    assert output.dtype == torch.bfloat16
    expected = keys.double().sum(1) / (60 + sinks.double().exp()[:, None])
    for head in range(3):  # each by its own size
        assert relative_error(output[0, 0, head], expected[head]) < 2**-7


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_dropout_while_training_only(implementation):
    config = tiny_config(attention_dropout=0.2)
    config._attn_implementation = implementation
    attention = started(DeepseekV41WindowAttention(config, 0))
    (queries, keys, _), _ = sink_inputs()
    expected = attention.eval().attend(queries, keys, None)
    dropped = torch.stack([attention.train().attend(queries, keys, None) for _ in range(60)]).mean(0)
    assert not torch.allclose(attention.attend(queries, keys, None), expected)
    assert relative_error(attention.eval().attend(queries, keys, None), expected) < TOLERANCE
    assert relative_error(dropped, expected) < 0.2


# fp32 inside of other precisions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp32_parts_survive_casts(dtype):
    config = tiny_config()
    sinks, linear = AttentionSinks(6), Fp32Linear(40, 8)
    for module in (started(DeepseekV41HyperConnection(config)), sinks, linear, started(DeepseekV41Router(config))):
        before = copy.deepcopy(module.state_dict())
        wrapped = torch.nn.Sequential(module).to(dtype)
        assert wrapped[0] is module
        for name in module.fp32_names:
            after = module.get_parameter(name) if name in dict(module.named_parameters()) else module.get_buffer(name)
            assert after.dtype == torch.float32 and torch.equal(after, before[name]), name
    assert module.weight.dtype == dtype  # the router's own


def test_fp32_computations_survive_autocast():
    config = tiny_config()
    hyper, router = started(DeepseekV41HyperConnection(config)), started(DeepseekV41Router(config))
    linear, attention = started(Fp32Linear(40, 8)), started(DeepseekV41WindowAttention(config, 0))
    norm = started(DeepseekV41RMSNorm(40, 1e-3))
    streams, x, (inputs, visible) = torch.randn(2, 5, 3, 40), torch.randn(10, 40), sink_inputs()
    rotations = rope_rotations(torch.arange(5), rope_frequencies(8, 50.0))

    def computations():
        mix = hyper(streams)
        yield from mix
        yield collapse_streams(streams, mix.pre)
        yield expand_streams(x.view(2, 5, 40), streams, mix.post, mix.comb)
        yield from router(x)[:2]
        yield linear(x)
        yield norm(x)
        yield attention.attend(*inputs[:2], visible)
        yield rotate(streams[:, :, 0], rotations)

    with torch.no_grad():
        expected = list(computations())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for actual, reference in zip(computations(), expected, strict=True):
                assert actual.dtype == torch.float32 and relative_error(actual, reference) < TOLERANCE
