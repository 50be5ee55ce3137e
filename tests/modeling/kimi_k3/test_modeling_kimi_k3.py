import copy

import pytest
import torch
from kimi_k3_models import (
    KDA,
    golden_layout,
    golden_name,
    golden_parameters,
    relative_error,
    tiny_config,
    tiny_k3,
)
from kimi_k3_reference import kimi_k3
from transformers import DynamicCache

from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig
from blockdraft.modeling.kimi_k3 import mla_attention
from blockdraft.modeling.kimi_k3.modeling_kimi_k3 import (
    DocumentRows,
    KimiK3ForCausalLM,
    KimiK3Model,
    KimiK3MoE,
    mix_attention_residuals,
)

TOLERANCE = 3e-4  # whole targets, see goldens' stability
PART_TOLERANCE = 1e-5


class Recorder:
    """What every layer and its sublayers return."""

    def __init__(self, model: KimiK3ForCausalLM):
        self.outputs: dict[str, torch.Tensor] = {}
        for i, layer in enumerate(model.model.layers):
            layer.register_forward_hook(self.keep(f"layer{i}.prefix_sum", 0))
            layer.register_forward_hook(self.keep(f"layer{i}.block_residual", 1))
            layer.self_attn.register_forward_hook(self.keep(f"layer{i}.attn", None if layer.is_kda else 0))
            layer.mlp.register_forward_hook(self.keep(f"layer{i}.mlp", None))

    def keep(self, name: str, index: int | None):
        def hook(module, args, output):
            self.outputs[name] = output if index is None else output[index]

        return hook


def golden_target(golden) -> KimiK3ForCausalLM:
    model = KimiK3ForCausalLM(KimiK3TextConfig(**golden.meta["config"])).eval()
    model.load_state_dict(golden_parameters(golden.group("param")), strict=True)
    return model


@pytest.mark.parametrize("name", ["k3_target", "k3_target_padded"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_target_equals_the_reference(golden, name, attention):
    golden = golden(name)
    model = golden_target(golden)
    model.set_attn_implementation(attention)
    mask = golden.tensors.get("in.attention_mask")
    valid = torch.ones_like(golden["in.input_ids"]).bool() if mask is None else mask.bool()
    recorder = Recorder(model)
    with torch.no_grad():
        output = model(golden["in.input_ids"], attention_mask=mask, output_hidden_states=True)
    recorded = recorder.outputs | {"logits": output.logits, "last_hidden": output.hidden_states[-1]}
    layer_ids = golden.meta["options"]["target_layer_ids"]
    recorded["dflash_target_hidden"] = torch.cat([output.hidden_states[i + 1] for i in layer_ids], dim=-1)

    expected = golden.group("out")
    del expected["logits_train"]
    assert recorded.keys() == expected.keys()
    for key, reference in expected.items():
        actual = recorded[key]
        if key.endswith("block_residual"):
            reference = reference.unflatten(0, valid.shape)
        if key.endswith("attn") and mask is not None and model.model.layers[int(key[5])].is_kda:
            actual = DocumentRows(mask).scatter(actual)
            assert not actual[~valid].any() and not reference[~valid].any()
        assert relative_error(actual[valid], reference[valid]) < TOLERANCE, key


@pytest.mark.parametrize("name", ["k3_target", "k3_target_padded"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_equals_the_reference(golden, name, checkpointing):
    golden = golden(name)
    model = golden_target(golden).train()
    if checkpointing:
        model.activation_checkpointing_enable()
    mask = golden.tensors.get("in.attention_mask")
    valid = torch.ones_like(golden["in.input_ids"]).bool() if mask is None else mask.bool()
    logits = model(golden["in.input_ids"], attention_mask=mask).logits
    assert relative_error(logits[valid], golden["out.logits_train"][valid]) < TOLERANCE
    (logits * golden["in.cotangent"]).sum().backward()
    parameters = dict(model.named_parameters())
    for key, reference in golden.group("grad").items():
        gradient = parameters[golden_name(key)].grad
        assert relative_error(gradient, golden_layout(key, reference)) < TOLERANCE, key


def test_moe_equals_the_reference(golden):
    golden = golden("k3_moe")
    moe = KimiK3MoE(KimiK3TextConfig(**golden.meta["config"]))
    moe.load_state_dict(golden_parameters(golden.group("param")), strict=True)
    x = golden["in.x"]

    _, weights, experts = moe.gate(x.flatten(0, 1))
    order = experts.argsort(dim=-1)
    assert torch.equal(experts.gather(-1, order), golden["out.gate.indices_sorted"])
    assert relative_error(weights.gather(-1, order), golden["out.gate.weights_by_sorted_index"]) < PART_TOLERANCE

    padding = golden["in.padding_mask"]
    assert relative_error(moe.eval()(x, padding), golden["out.y_eval"]) < PART_TOLERANCE
    output = moe.train()(x)
    assert relative_error(output, golden["out.y_train"]) < PART_TOLERANCE
    assert relative_error(moe(x, padding), golden["out.y_train_padding_mask"]) < PART_TOLERANCE
    (output * golden["in.cotangent"]).sum().backward()
    parameters = dict(moe.named_parameters())
    for key, reference in golden.group("grad").items():
        gradient = parameters[golden_name(key)].grad
        assert relative_error(gradient, golden_layout(key, reference)) < PART_TOLERANCE, key


def test_attention_residuals_equal_the_reference(golden):
    golden = golden("k3_attn_res")
    names = ("in.prefix_sum", "in.block_residual", "param.norm.weight", "param.proj.weight")
    inputs = [golden[name].requires_grad_() for name in names]
    output = mix_attention_residuals(*inputs, eps=golden.meta["options"]["eps"])
    assert relative_error(output, golden["out.float32"]) < PART_TOLERANCE
    gradients = torch.autograd.grad((output * golden["in.cotangent"]).sum(), inputs)
    for name, gradient in zip(names, gradients, strict=True):
        assert relative_error(gradient, golden[f"grad.{name.partition('.')[2]}"]) < PART_TOLERANCE, name
    half = mix_attention_residuals(*(x.detach().bfloat16() for x in inputs), eps=golden.meta["options"]["eps"])
    assert torch.equal(half, golden["out.bfloat16"])


VARIANTS = {
    "released_kind": {},
    "plain_residuals": {"attn_res_block_size": None},
    "low_rank_gate_unbounded_decay": {
        "linear_attn_config": KDA | {"use_full_rank_gate": False, "gate_lower_bound": None}
    },
    "no_query_compression_no_gate": {"q_lora_rank": None, "mla_use_output_gate": False},
    "dense": {"num_experts": None},
    "all_sparse_no_norm": {"first_k_dense_replace": 0, "latent_moe_use_norm": False, "attn_res_block_size": 3},
    "unbounded_activation": {"activation_situ_beta": 0, "activation_situ_linear_beta": None},
}


def test_the_equations_equal_the_reference(golden):
    golden = golden("k3_target")
    weights = golden_parameters(golden.group("param"))
    config = KimiK3TextConfig(**golden.meta["config"])
    for input_ids, expected in zip(golden["in.input_ids"], golden["out.logits"], strict=True):
        assert relative_error(kimi_k3(config, weights, input_ids)[0], expected) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_equal_the_equations_in_float64(variant):
    model = tiny_k3(**VARIANTS[variant])
    input_ids = torch.randint(1, 97, (2, 40))
    with torch.no_grad():
        output = model(input_ids, output_hidden_states=True)
        for row in range(2):
            logits, layers = kimi_k3(model.config, model.state_dict(), input_ids[row])
            assert relative_error(output.logits[row], logits) < TOLERANCE
            for i, expected in enumerate(layers[:-1]):
                assert relative_error(output.hidden_states[i + 1][row], expected) < TOLERANCE, i


def test_hidden_states_by_index():
    model = tiny_k3()
    input_ids = torch.randint(1, 97, (1, 9))
    with torch.no_grad():
        every = model(input_ids, output_hidden_states=True).hidden_states
        some = model(input_ids, output_hidden_states=[2, -1]).hidden_states
    assert len(every) == 6 and [state is not None for state in some] == [False, False, True, False, False, True]
    assert torch.equal(some[2], every[2])
    assert torch.equal(every[0], model.get_input_embeddings()(input_ids))


def test_attentions_and_router_logits_are_recorded():
    model = tiny_k3()
    model.set_attn_implementation("eager")
    output = model(torch.randint(1, 97, (2, 9)), output_attentions=True, output_router_logits=True)
    assert [tuple(weights.shape) for weights in output.attentions] == [(2, 3, 9, 9)] * 2
    assert [tuple(logits.shape) for logits in output.router_logits] == [(18, 6)] * 4


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padded_rows_equal_each_row_alone(padding):
    model = tiny_k3()
    rows = [torch.randint(1, 97, (length,)) for length in (20, 13, 1)]
    input_ids, mask = torch.zeros(3, 20, dtype=torch.long), torch.zeros(3, 20, dtype=torch.long)
    for i, row in enumerate(rows):
        columns = slice(-len(row), None) if padding == "left" else slice(len(row))
        input_ids[i, columns], mask[i, columns] = row, 1
    logits = model(input_ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    logits[mask.bool()].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    for i, row in enumerate(rows):
        assert relative_error(logits[i][mask[i].bool()], model(row[None]).logits[0]) < TOLERANCE


def test_generate_with_left_padding_equals_alone():
    model = tiny_k3()
    long, short = torch.randint(1, 97, (1, 20)), torch.randint(1, 97, (1, 14))
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), short], dim=1)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    options = {"max_new_tokens": 20, "do_sample": False}
    both = model.generate(torch.cat([long, padded]), attention_mask=mask, **options)
    assert torch.equal(both[0, 20:], model.generate(long, **options)[0, 20:])
    assert torch.equal(both[1, 20:], model.generate(short, **options)[0, 14:])
    uncached = model.generate(long, use_cache=False, **options)
    assert torch.equal(both[0, 20:], uncached[0, 20:])


def test_right_padded_prefill_continues_as_without_padding():
    model = tiny_k3()
    prompt, following = torch.randint(1, 97, (1, 9)), torch.randint(1, 97, (1, 3))
    padded = torch.cat([prompt, torch.zeros(1, 4, dtype=torch.long)], dim=1)
    mask = torch.tensor([[1] * 9 + [0] * 4])
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(padded, attention_mask=mask, cache=cache)
        output = model(following, attention_mask=torch.cat([mask, torch.ones(1, 3)], dim=1), cache=cache).logits
        expected = model(torch.cat([prompt, following], dim=1)).logits[:, -3:]
    assert relative_error(output, expected) < TOLERANCE


def test_verification_and_crop_equal_the_full_forward():
    model = tiny_k3()
    input_ids = torch.randint(1, 97, (2, 60))
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        expected = model(input_ids).logits
        model(input_ids[:, :30], cache=cache)
        position = 30
        for drafted, kept in [(8, 3), (8, 8), (8, 1), (1, 1), (5, 2)]:
            block = input_ids[:, position : position + drafted].clone()
            block[:, kept:] = 5
            logits = model(block, cache=cache).logits[:, :kept]
            assert relative_error(logits, expected[:, position : position + kept]) < TOLERANCE
            cache.crop(kept - drafted)
            position += kept
            assert cache.get_seq_length() == position


def test_few_tokens_after_many_are_attended_in_the_latent_space(monkeypatch):
    """Cached rows are not expanded to keys and values again in every forward, and the logits are the same."""
    target = tiny_k3()
    input_ids = torch.randint(1, 97, (2, 40))
    attention = next(layer.self_attn for layer in target.model.layers if not layer.is_kda)
    expanded, expand = [], attention.keys_and_values
    monkeypatch.setattr(attention, "keys_and_values", lambda *args: expanded.append(args[0].shape[2]) or expand(*args))
    logits = {}
    for worth in (0, 1_000_000):  # a tiny model saves little
        monkeypatch.setattr(mla_attention, "WORTH_ABSORBING", worth)
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            parts = [target(part, cache=cache).logits for part in input_ids.split([34, 1, 4, 1], dim=1)]
        logits[worth] = torch.cat(parts, dim=1)
    assert expanded == [34, 34, 35, 39, 40]
    torch.testing.assert_close(logits[0], logits[1_000_000], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_documents_equal_each_alone(attention):
    model = tiny_k3()
    model.set_attn_implementation(attention)
    lengths = [[20, 13, 12], [3, 40]]
    document_ids = torch.zeros(2, 50, dtype=torch.long)
    for row, row_lengths in enumerate(lengths):
        starts = [sum(row_lengths[:i]) for i in range(len(row_lengths))]
        for i, (start, length) in enumerate(zip(starts, row_lengths, strict=True)):
            document_ids[row, start : start + length] = i + 1
    input_ids = torch.randint(1, 97, (2, 50))
    with torch.no_grad():
        logits = model(input_ids, document_ids=document_ids).logits
        assert logits.isfinite().all()
        for row, row_lengths in enumerate(lengths):
            for document in range(1, len(row_lengths) + 1):
                own = document_ids[row] == document
                assert relative_error(logits[row, own], model(input_ids[row, own][None]).logits[0]) < TOLERANCE


def test_contradicting_inputs_are_named():
    model = tiny_k3()
    input_ids = torch.randint(1, 97, (1, 6))
    ones = torch.ones(1, 6, dtype=torch.long)
    with pytest.raises(ValueError, match="exactly one of `input_ids` and `inputs_embeds`"):
        model()
    with pytest.raises(ValueError, match="`document_ids` cannot be combined"):
        model(input_ids, document_ids=ones, attention_mask=ones)
    with pytest.raises(ValueError, match="has 4 dimensions"):
        model(input_ids, attention_mask=torch.ones(1, 1, 6, 6, dtype=torch.bool))
    cache = model(input_ids, use_cache=True).cache
    with pytest.raises(ValueError, match="padding behind tokens"):
        model(input_ids, attention_mask=torch.tensor([[1] * 11 + [0]]), cache=cache)


def test_position_ids_do_not_matter_and_embeddings_may_be_given():
    model = tiny_k3()
    input_ids = torch.randint(1, 97, (1, 6))
    with torch.no_grad():
        expected = model(input_ids).logits
        assert torch.equal(model(input_ids, position_ids=torch.arange(6)[None] + 100).logits, expected)
        assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(input_ids)).logits, expected)
        assert relative_error(model(input_ids, logits_to_keep=2).logits, expected[:, -2:]) < PART_TOLERANCE


def test_loss_is_the_shifted_cross_entropy():
    model = tiny_k3()
    input_ids = torch.randint(1, 97, (2, 8))
    output = model(input_ids, labels=input_ids)
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
    assert relative_error(output.loss, expected) < PART_TOLERANCE


def test_expert_implementations_agree():
    model = tiny_k3()
    input_ids = torch.randint(1, 97, (2, 12))
    results = {}
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        logits = model(input_ids).logits
        logits.square().sum().backward()
        results[implementation] = logits.detach(), model.model.layers[1].mlp.experts.gate_up_proj.grad.clone()
    for implementation in ("batched_mm", "grouped_mm"):
        for actual, expected in zip(results[implementation], results["eager"], strict=True):
            assert relative_error(actual, expected) < TOLERANCE


def test_grouped_kernel_refuses_widths_it_cannot_run():
    assert tiny_k3(moe_intermediate_size=22).config._experts_implementation == "eager"
    with pytest.raises(ValueError, match='experts_implementation="eager"'):
        KimiK3ForCausalLM._from_config(tiny_config(moe_intermediate_size=22), experts_implementation="grouped_mm")


def test_router_variants():
    config = tiny_config(moe_router_activation_func="softmax", moe_renormalize=False, num_expert_group=3, topk_group=2)
    gate = KimiK3MoE(config).gate
    torch.nn.init.normal_(gate.weight)
    gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0, 0.0]))
    logits, weights, experts = gate(torch.randn(50, 48))
    scores = logits.softmax(-1)
    assert (experts == 2).any(-1).all()  # the bias chooses,
    assert torch.allclose(weights, 1.6 * scores.gather(-1, experts))  # but does not weigh
    for row in range(50):
        biased = (scores[row] + gate.e_score_correction_bias).view(3, 2)
        best_groups = biased.sum(-1).topk(2).indices
        allowed = torch.cat([2 * best_groups, 2 * best_groups + 1]).tolist()
        assert set(experts[row].tolist()) <= set(allowed)


def test_one_expert_per_token_is_not_renormalised():
    gate = KimiK3MoE(tiny_config(num_experts_per_token=1)).gate
    torch.nn.init.normal_(gate.weight, std=0.1)
    logits, weights, experts = gate(torch.randn(5, 48))
    assert torch.allclose(weights, 1.6 * logits.sigmoid().gather(-1, experts))


def test_initialisation_follows_the_architecture():
    model = KimiK3ForCausalLM(tiny_config(initializer_range=0.02, hidden_size=96, vocab_size=500, pad_token_id=3))
    kda, moe = model.model.layers[0].self_attn, model.model.layers[1].mlp
    assert 0 <= kda.A_log.min() and kda.A_log.max() <= torch.log(torch.tensor(16.0))
    assert not kda.dt_bias.any() and (kda.o_norm.weight == 1).all()
    assert kda.q_conv1d.weight.abs().max() <= 4**-0.5 and kda.q_conv1d.weight.std() > 0.2
    assert not moe.gate.e_score_correction_bias.any()
    for weight in (moe.gate.weight, moe.experts.gate_up_proj, moe.experts.down_proj, kda.q_proj.weight):
        assert abs(weight.std() - 0.02) < 2e-3
    assert not model.get_input_embeddings().weight[3].any()
    assert abs(model.lm_head.weight.std() - 96**-0.5) < 5e-3 and model.lm_head.weight.abs().max() <= 3 * 96**-0.5


def test_save_and_load_is_bit_equal(tmp_path):
    model = tiny_k3()
    model.save_pretrained(tmp_path)
    for device_map in (None, "cpu"):
        loaded, info = KimiK3ForCausalLM.from_pretrained(tmp_path, device_map=device_map, output_loading_info=True)
        assert not any(info.values())
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    base, info = KimiK3Model.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and torch.equal(base.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize("way", ["load", "new", "to", "bfloat16"])
def test_half_precision_keeps_the_fp32_parts(way, tmp_path):
    model = tiny_k3()
    if way == "load":
        model.save_pretrained(tmp_path)
        half = KimiK3ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    elif way == "new":
        half = KimiK3ForCausalLM._from_config(model.config, dtype=torch.bfloat16)
    else:
        half = copy.deepcopy(model)
        half = half.to(torch.bfloat16) if way == "to" else half.bfloat16()
    fp32 = {name for name, tensor in half.state_dict().items() if tensor.dtype == torch.float32}
    parts = ("A_log", "dt_bias", "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "o_norm.weight")
    expected = {f"model.layers.{i}.self_attn.{part}" for i in (0, 1, 3) for part in parts}
    expected |= {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3, 4)}
    assert fp32 == expected
    if way != "new":
        assert all(torch.equal(half.state_dict()[name], model.state_dict()[name]) for name in fp32)
    assert half(torch.arange(9)[None]).logits.isfinite().all()


def test_fp32_computations_survive_autocast():
    model = tiny_k3()
    router, layer = model.model.layers[1].mlp.gate, model.model.layers[1]
    x, blocks = torch.randn(4, 48), torch.randn(4, 2, 48)
    mixer = layer.mlp_res_norm.weight, layer.mlp_res_proj.weight, 1e-5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, mixed = router(x)[0], mix_attention_residuals(x, blocks, *mixer)
    assert torch.equal(logits, router(x)[0]) and logits.dtype == torch.float32
    assert torch.equal(mixed, mix_attention_residuals(x, blocks, *mixer))
