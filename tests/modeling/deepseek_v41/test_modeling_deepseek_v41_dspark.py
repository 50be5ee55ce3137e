"""The DSpark draft against the reference numbers, its own cache, and what precision and training do to it."""

import json
import logging
import re

import pytest
import torch
from deepseek_v41_dspark_models import dspark_inputs, golden_dspark, our_name, tiny_dspark
from dense_blocks import block_attention_mask
from fresh_process import code_files, run_fresh
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, DynamicCache
from transformers.cache_utils import DFlashCache

from blockdraft.modeling.deepseek_v41.deepseek_v41_layers import rope_frequencies, rope_rotations
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel
from blockdraft.trainer.objectives.dspark import DSparkAlphas, SlotPredictions, dspark_loss
from blockdraft.trainer.objectives.slot_targets import slot_targets

TOLERANCE = 5e-5


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def check(actual: dict, case, tolerance: float = TOLERANCE):
    """Compares named tensors with the reference's, integers and bools exactly."""
    errors = {}
    for name, value in actual.items():
        expected = case[name]
        assert value.shape == expected.shape and value.dtype == expected.dtype, name
        if value.is_floating_point():
            errors[name] = relative_error(value, expected)
        else:
            assert torch.equal(value, expected), name
    worst = max(errors, key=errors.get)
    assert errors[worst] <= tolerance, f"{worst}: {errors[worst]:.2e}"


def record_stages(draft) -> dict[str, torch.Tensor]:
    seen = {}
    for i, stage in enumerate(draft.layers):

        def keep(module, args, output, i=i):
            seen[f"out.stage{i}.target_hidden_in"] = args[2]
            seen[f"out.stage{i}.streams"], seen[f"out.stage{i}.pre_mix"] = output[:2]

        stage.register_forward_hook(keep)
        for part in ("attn", "ffn"):
            name = f"out.stage{i}.{part}"
            getattr(stage, part).register_forward_hook(lambda *args, name=name: seen.update({name: args[-1]}))
    return seen


def forward_tokens(draft, case):
    inputs = ("input_ids", "target_hidden_states", "loss_mask", "target_last_hidden_states")
    anchors = ("anchor_positions", "block_keep_mask")
    return draft(
        **{name: case[f"in.{name}"] for name in inputs + anchors},
        enable_confidence_head=case.meta["options"]["enable_confidence_head"],
    )


def objective(output, case):
    """The reference's scalar, with this package's objective."""
    options = case.meta["options"]["loss"]
    alphas = DSparkAlphas(*(options[f"{name}_alpha"] for name in ("ce_loss", "l1_loss", "confidence_head")))
    inputs = [output.draft_logits, output.aligned_target_logits]
    if output.confidence_pred is not None:
        inputs.append(output.confidence_pred)
    targets = slot_targets(output.target_ids, output.eval_mask.float(), 0, options["loss_decay_gamma"])
    loss = dspark_loss(SlotPredictions, inputs, targets, alphas)
    return loss.loss_sum / (loss.weight + 1e-6)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["fp32", "noconf"])
def test_every_stage_output_and_gradient_is_the_references(golden, name, attn_implementation):
    case = golden(f"v41_dspark_forward_{name}")
    draft = golden_dspark(case, attn_implementation)
    seen = record_stages(draft)
    output = forward_tokens(draft, case)
    seen |= {f"out.{name}": value for name, value in output.items()}
    seen["out.loss"] = objective(output, case)
    seen["out.loss"].backward()
    for parameter in case.meta["options"]["grads"]:
        seen[f"grad.{parameter}"] = draft.get_parameter(our_name(parameter)).grad
    check(seen, case)
    assert len(seen) == 5 * len(draft.layers) + len(output) + 1 + len(case.meta["options"]["grads"])
    assert draft.embed_tokens.weight.grad is None and draft.lm_head.weight.grad is None
    assert ("confidence_pred" in output) == (name == "fp32")


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
def test_the_references_call_of_the_backbone(golden, attn_implementation):
    """Its names, its methods for masks and positions, and heads on all slots at once."""
    case = golden("v41_dspark_forward_fp32")
    draft = golden_dspark(case, attn_implementation)
    anchors, keep = case["in.anchor_positions"], case["in.block_keep_mask"]
    mask = draft.build_attention_mask(anchors, keep, 19, torch.float32)
    assert mask.dtype == torch.float32 and torch.equal(mask == 0, case["out.mask_visible"])
    assert torch.equal(mask == -torch.inf, ~case["out.mask_visible"])
    seen = record_stages(draft) | {"out.position_ids": draft.build_position_ids(anchors, 19)}
    output = draft(
        noise_embeddings=case["out.noise_embeddings"],
        target_hidden_states=case["in.target_hidden_states"],
        position_ids=seen["out.position_ids"],
        attention_mask=mask,
        previous_token_ids=case["out.previous_token_ids"],
    )
    seen["out.normalized_hidden_states"] = output.normalized_hidden_states
    seen["out.transition_logits"] = output.transition_logits
    seen["out.confidence_pred"] = output.confidence_pred.view(2, 4, 4)
    logits = draft.compute_logits(output.last_hidden_state) + output.transition_logits
    seen["out.draft_logits"] = logits.view(2, 4, 4, -1)
    check(seen, case)


@torch.no_grad()
def test_bfloat16_stage_by_stage(golden):
    """Each stage is given the reference's output of the one before; end to end, one rounding apart makes percents."""
    case = golden("v41_dspark_forward_bf16")
    draft = golden_dspark(case)
    seen = record_stages(draft)
    draft(
        noise_embeds=case["out.noise_embeddings"],
        context_hidden_states=case["in.target_hidden_states"],
        anchor_positions=case["in.anchor_positions"],
        block_keep_mask=case["in.block_keep_mask"],
    )
    compared = {name: seen[name] for name in seen if name.startswith("out.stage0")}
    compared["out.stage1.target_hidden_in"] = seen["out.stage1.target_hidden_in"]
    rotations = rope_rotations(case["out.position_ids"], rope_frequencies(8, draft.config.rope_theta))
    for i, stage in enumerate(draft.layers[1:]):
        before = [case[f"out.stage{name}"] for name in (f"{i}.streams", f"{i}.pre_mix", f"{i + 1}.target_hidden_in")]
        stage(*before, rotations, case["out.mask_visible"])
        compared |= {name: seen[name] for name in seen if name.startswith(f"out.stage{i + 1}")}
    check(compared, case)
    assert len(compared) == 15

    last, hidden = draft.layers[-1], case["out.normalized_hidden_states"]
    streams = case["out.stage2.streams"].float()
    residual = (streams * case["out.stage2.pre_mix"][..., None]).sum(-2).bfloat16()
    transition, embeddings = draft.markov_head(case["out.previous_token_ids"])
    logits = draft.compute_logits(hidden) + transition.float()
    heads = {
        "out.normalized_hidden_states": last.norm(residual),
        "out.transition_logits": transition,
        "out.draft_logits": logits.view(2, 4, 4, -1),
        "out.confidence_pred": draft.confidence_head(hidden, embeddings).view(2, 4, 4),
    }
    check(heads, case)


def fp32_names(draft) -> set[str]:
    return {name for name, tensor in draft.state_dict().items() if tensor.dtype == torch.float32}


def test_fp32_islands_survive_every_cast(golden, tmp_path):
    case = golden("v41_dspark_forward_bf16")
    expected = {our_name(k) for k, tensor in case.group("param").items() if tensor.dtype == torch.float32}
    assert fp32_names(golden_dspark(case)) == expected
    draft = tiny_dspark()
    assert len(fp32_names(draft)) == len(draft.state_dict())
    draft.save_pretrained(tmp_path)
    casts = [
        draft.bfloat16(),
        tiny_dspark().to(torch.bfloat16),
        tiny_dspark().to(dtype=torch.float16),
        DeepseekV41DSparkModel.from_pretrained(tmp_path, dtype=torch.bfloat16),
        AutoModel.from_pretrained(tmp_path, dtype="bfloat16"),
        AutoModel.from_config(draft.config, dtype=torch.bfloat16),
    ]
    for cast in casts:
        assert fp32_names(cast) == expected
    cast.save_pretrained(tmp_path / "bf16")
    assert fp32_names(DeepseekV41DSparkModel.from_pretrained(tmp_path / "bf16")) == expected


@torch.no_grad()
def test_fp32_islands_survive_mixed_precision():
    draft, head = tiny_dspark(), nn.Linear(32, 64, bias=False)
    inputs = dspark_inputs(draft) | {"previous_token_ids": torch.tensor([[1, 2, 3, 4]])}
    expected = draft(**inputs)
    expected_logits = draft.compute_logits(expected.last_hidden_state, head)
    dtypes = {}
    for name, module in draft.named_modules():
        module.register_forward_hook(lambda module, args, output, name=name: dtypes.update({name: output}))
    with torch.autocast("cpu", torch.bfloat16):
        output = draft(**inputs)
        logits = draft.compute_logits(expected.last_hidden_state, head)
        confidence = draft.confidence_head(expected.confidence_states, draft.markov_head.embed.weight[1:5][None])
    assert dtypes["mtp.1.attn.wkv"].dtype == torch.bfloat16
    assert {tensor.dtype for i in range(3) for tensor in dtypes[f"mtp.{i}.attn_hc"]} == {torch.float32}
    assert {tensor.dtype for tensor in dtypes["mtp.1.ffn.gate"][:2]} == {torch.float32}
    assert torch.equal(logits, expected_logits) and torch.equal(confidence, expected.confidence_pred)
    assert output.confidence_pred.dtype == torch.float32
    assert relative_error(output.last_hidden_state, expected.last_hidden_state) < 0.1


@torch.no_grad()
def test_logits_are_fp32_whatever_the_heads_dtype():
    draft = tiny_dspark(output_multiplier=0.5, final_logit_softcapping=3.0).bfloat16()
    head, hidden = nn.Linear(32, 64).bfloat16(), torch.randn(1, 4, 32).bfloat16() * 10
    expected = nn.functional.linear(hidden.float(), head.weight.float(), head.bias.float())
    logits = draft.compute_logits(hidden, head)
    assert logits.dtype == torch.float32 and torch.equal(logits, 3 * torch.tanh(expected * 0.5 / 3))
    assert relative_error(draft.compute_logits(hidden, head.float()), logits) < 1e-6


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_blocks_by_anchors_see_what_the_mask_shows(attn_implementation):
    draft = tiny_dspark(attn_implementation)
    inputs = dspark_inputs(draft, context_length=17, blocks=4, batch=2)
    anchors = torch.tensor([[1, 3, 4, 16], [0, 7, 9, 0]])
    keep = torch.tensor([[True] * 4, [True, True, True, False]])
    documents = torch.tensor([[0] * 17, [0] * 8 + [1] * 9])
    for given in ({}, {"document_ids": documents}):
        mask = block_attention_mask(anchors, keep, 17, 4, sliding_window=6, window_per_query=False, **given)
        by_mask = draft(**inputs, attention_mask=mask, position_ids=draft.build_position_ids(anchors, 17))
        by_anchors = draft(**inputs, anchor_positions=anchors, block_keep_mask=keep, **given)
        torch.testing.assert_close(by_anchors.last_hidden_state, by_mask.last_hidden_state, rtol=1e-4, atol=1e-5)


def test_slots_stand_behind_their_anchor():
    positions = tiny_dspark(block_size=4).build_position_ids(torch.tensor([[5, 6, 7], [2, 9, 0]]), 12)
    assert positions[:, :12].tolist() == [list(range(12))] * 2
    assert positions[0, 12:].tolist() == [5, 6, 7, 8, 6, 7, 8, 9, 7, 8, 9, 10]
    assert positions[1, 12:].tolist() == [2, 3, 4, 5, 9, 10, 11, 12, 0, 1, 2, 3]


def test_the_window_ends_before_the_anchor():
    """A block at anchor a sees the context rows a - W .. a - 1, all of its slots the same ones, and its own rows."""
    draft = tiny_dspark()
    inputs = dspark_inputs(draft, context_length=12, blocks=2)
    for value in inputs.values():
        value.requires_grad_()
    hidden = draft(**inputs, anchor_positions=torch.tensor([[8, 10]])).last_hidden_state
    for slot in (4, 7):
        noise, context = torch.autograd.grad(hidden[0, slot].sum(), inputs.values(), retain_graph=True)
        assert context[0].abs().sum(-1).nonzero().flatten().tolist() == list(range(4, 10))
        assert noise[0].abs().sum(-1).nonzero().flatten().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_cached_rounds_equal_the_whole_context(attn_implementation):
    draft = tiny_dspark(attn_implementation)
    features = torch.randn(2, 40, 64)
    cache, length = DFlashCache(config=draft.config), 0
    cache.activate_past_recording()
    for new in (3, 1, 4, 5, 2, 9, 1, 3):
        length += new
        noise, anchor = torch.randn(2, 4, 32), torch.full((2, 1), length)
        cache.set_previous_accepted_tokens(new)
        positions = torch.arange(length - new, length + 4)[None]
        cached = draft(noise, features[:, length - new : length], position_ids=positions, cache=cache)
        assert cache.get_seq_length() == length + 4 and cached.cache is cache
        cache.crop(-4)
        for layer in cache.layers:
            assert layer.keys.shape == (2, 1, min(length, 6), 20) and layer.values.shape[-1] == 0
        whole = draft(noise, features[:, :length]).last_hidden_state
        as_trained = draft(noise, features, anchor_positions=anchor).last_hidden_state
        for expected in (whole, as_trained):
            torch.testing.assert_close(cached.last_hidden_state, expected, rtol=1e-4, atol=1e-5)
    assert length == 28 and cache.get_seq_length() == 28


@torch.no_grad()
def test_context_rows_are_computed_once_and_only_if_a_block_can_see_them():
    draft, rows = tiny_dspark(), []
    for module in (draft.layers[0].main_proj, *(stage.attn.wkv for stage in draft.layers)):
        module.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    inputs = dspark_inputs(draft, context_length=100)
    cache = draft(**inputs, use_cache=True).cache
    assert rows == [6, 10, 10, 10] and cache.get_seq_length() == 104
    cache.crop(-4)
    kept = cache.layers[1].keys.clone()
    draft(**dspark_inputs(draft, context_length=2), cache=cache)
    assert rows[4:] == [2, 6, 6, 6] and torch.equal(cache.layers[1].keys[:, :, :6], kept)
    cache.crop(-4)
    assert cache.layers[1].keys.shape[-2] == 6 and torch.equal(cache.layers[1].keys[:, :, :4], kept[:, :, 2:])


@torch.no_grad()
def test_positions_matter():
    """Unlike K3's draft, slots that hold the same token differ by their place."""
    draft = tiny_dspark()
    inputs = dspark_inputs(draft) | {"noise_embeds": torch.randn(1, 1, 32).expand(1, 4, 32)}
    hidden = draft(**inputs).last_hidden_state
    assert not torch.allclose(hidden[:, 1:], hidden[:, :-1], atol=1e-2)
    moved = draft(**inputs, position_ids=torch.arange(13)[None] * 2).last_hidden_state
    assert not torch.allclose(moved, hidden, atol=1e-2)


@torch.no_grad()
def test_logits_over_the_vocabulary_are_made_on_demand():
    draft = tiny_dspark()
    draft.markov_head.register_forward_hook(lambda *_: pytest.fail("transitions that nobody asked for"))
    output = draft(**dspark_inputs(draft))
    assert output.transition_logits is None and output.confidence_pred is None
    assert output.confidence_states is output.last_hidden_state


@pytest.mark.parametrize("confidence_input", ["post_norm", "pre_norm"])
@torch.no_grad()
def test_what_the_confidence_head_reads(confidence_input):
    draft, tokens = tiny_dspark(confidence_input=confidence_input), torch.tensor([[5, 6, 7, 8]])
    output = draft(**dspark_inputs(draft), previous_token_ids=tokens)
    states = output.confidence_states
    normed = draft.layers[-1].norm(states)
    assert torch.equal(states if confidence_input == "post_norm" else normed, output.last_hidden_state)
    embeddings = draft.markov_head.embed.weight[tokens]
    weight = draft.confidence_head.proj.weight[0]
    torch.testing.assert_close(output.confidence_pred, torch.cat([states, embeddings], -1) @ weight)
    torch.testing.assert_close(output.transition_logits, embeddings @ draft.markov_head.head.weight.T)
    # One slot at a time, as decoding calls the heads.
    transition, _ = draft.markov_head(tokens[0, 2:3])
    torch.testing.assert_close(transition[0], output.transition_logits[0, 2])
    confidence = draft.confidence_logits(states[0, 2:3], tokens[0, 2:3])
    torch.testing.assert_close(confidence[0], output.confidence_pred[0, 2])
    states, base = output.last_hidden_state[0, 2:3], torch.zeros_like(transition)
    assert torch.equal(draft.slot_logits(base, tokens[0, 2:3], states), transition)


def test_drafts_without_heads():
    draft = tiny_dspark(confidence_head=False)
    assert draft.confidence_head is None and draft.markov_head is not None
    output = draft(**dspark_inputs(draft), previous_token_ids=torch.zeros(1, 4, dtype=torch.long))
    assert output.confidence_pred is None and output.transition_logits is not None
    draft = tiny_dspark(markov_rank=None)
    assert draft.confidence_head is None and draft.markov_head is None
    assert not [name for name in draft.state_dict() if "head" in name]
    assert draft(**dspark_inputs(draft)).last_hidden_state.shape == (1, 4, 32)


def test_a_head_that_is_switched_off_stays_in_the_checkpoint(tmp_path):
    draft = tiny_dspark()
    draft.confidence_head.requires_grad_(False)
    draft.confidence_head.register_forward_hook(lambda *_: pytest.fail("it is off"))
    tokens = torch.zeros(1, 4, dtype=torch.long)
    output = draft(**dspark_inputs(draft), previous_token_ids=tokens, enable_confidence_head=False)
    output.transition_logits.sum().backward()
    assert output.confidence_pred is None and draft.confidence_head.proj.weight.grad is None
    draft.save_pretrained(tmp_path)
    again = DeepseekV41DSparkModel.from_pretrained(tmp_path)
    assert torch.equal(again.confidence_head.proj.weight, draft.confidence_head.proj.weight)


def test_stopping_the_confidences_gradient():
    for stop in (False, True):
        draft, tokens = tiny_dspark(), torch.ones(1, 4, dtype=torch.long)
        inputs = dspark_inputs(draft)
        draft(**inputs, previous_token_ids=tokens, confidence_head_stop_gradient=stop).confidence_pred.sum().backward()
        assert draft.confidence_head.proj.weight.grad.abs().sum() > 0
        for parameter in (draft.layers[0].main_proj.weight, draft.markov_head.embed.weight):
            assert (parameter.grad is None) == stop


def test_initialisation():
    draft = tiny_dspark(hidden_size=64, initializer_range=0.05)
    for name, tensor in draft.state_dict().items():
        last = name.split(".")[-1]
        if "norm" in name or last == "scale":
            assert (tensor == 1).all(), name
        elif "sinks" in name or last in ("base", "e_score_correction_bias", "bias_vl"):
            assert (tensor == 0).all(), name
        else:
            assert 0.03 < tensor.std() < 0.07 and tensor.abs().max() < 0.3, name
    assert draft.layers is draft.mtp and len(draft.layers) == 3


def test_a_model_on_the_meta_device_is_initialised_where_asked():
    with torch.device("meta"):
        draft = DeepseekV41DSparkModel(tiny_dspark().config)
    draft.initialize_weights(torch.device("cpu"))
    assert (draft.layers[0].attn_norm.weight == 1).all() and (draft.layers[1].attn.sinks_param.weight == 0).all()
    assert 0.2 < draft.layers[2].ffn.experts.down_proj.std() < 0.4
    assert draft(**dspark_inputs(draft)).last_hidden_state.isfinite().all()


def test_copies_of_the_targets_embedding_and_head(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    draft, table, head = tiny_dspark(), nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    assert draft.get_input_embeddings() is None and draft.get_output_embeddings() is None
    draft.initialize_embeddings_and_head(table, head)
    assert draft.embed_tokens is not table and torch.equal(draft.embed_tokens.weight, table.weight)
    assert not draft.embed_tokens.weight.requires_grad and not draft.lm_head.weight.requires_grad
    draft.set_embedding_head_trainable(True)
    assert draft.embed_tokens.weight.requires_grad and draft.lm_head.weight.requires_grad
    draft.initialize_embeddings_and_head(table, head, freeze=False)
    assert draft.lm_head.weight.requires_grad
    hidden = torch.randn(1, 4, 32)
    torch.testing.assert_close(draft.compute_logits(hidden), head(hidden))
    draft.save_pretrained(tmp_path)
    assert "trainable, are not saved" in caplog.text
    caplog.clear()
    draft.set_embedding_head_trainable(False)
    draft.save_pretrained(tmp_path)
    assert "not saved" not in caplog.text
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert names == set(draft.state_dict()) - {"embed_tokens.weight", "lm_head.weight"}
    again = DeepseekV41DSparkModel.from_pretrained(tmp_path)
    assert again.embed_tokens is None and again.lm_head is None


def test_anchors_are_drawn_where_none_are_given():
    draft = tiny_dspark()
    draft.initialize_embeddings_and_head(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False))
    ids, mask = torch.randint(60, (2, 10)), torch.zeros(2, 10)
    mask[0, 4:8] = 1
    output = draft(input_ids=ids, target_hidden_states=torch.randn(2, 10, 64), loss_mask=mask, num_anchors=5)
    assert output.draft_logits.shape == (2, 5, 4, 64) and output.aligned_target_logits is None
    assert output.block_keep_mask.tolist() == [[True] * 3 + [False] * 2, [False] * 5]
    assert output.eval_mask[0].sum(-1).tolist() == [3, 2, 1, 0, 0] and not output.eval_mask[1].any()
    assert output.target_ids[0, 0].tolist() == ids[0, 5:9].tolist() and output.draft_logits.isfinite().all()


def test_the_references_attributes_are_the_defaults_of_its_forward(tmp_path):
    settings = {"num_anchors": 3, "enable_confidence_head": False, "confidence_head_stop_gradient": True}
    draft = DeepseekV41DSparkModel(tiny_dspark().config, **settings)
    assert {name: getattr(draft, name) for name in settings} == settings
    assert draft.layers is draft.mtp and draft.mtp[0].mlp is draft.mtp[0].ffn
    assert draft.moe_config.n_routed_experts == draft.config.n_routed_experts
    assert draft.target_layer_ids == draft.config.target_layer_ids
    draft.initialize_embeddings_and_head(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False))
    inputs = {"input_ids": torch.randint(60, (2, 10)), "loss_mask": torch.ones(2, 10)}
    inputs["target_hidden_states"] = torch.randn(2, 10, 64)
    output = draft(**inputs)
    assert output.draft_logits.shape == (2, 3, 4, 64) and output.confidence_pred is None
    draft.enable_confidence_head = True
    output = draft(**inputs)
    output.confidence_pred.sum().backward()
    trained = {name for name, parameter in draft.named_parameters() if parameter.grad is not None}
    assert len(trained) == 1 and trained.pop().endswith("confidence_head.proj.weight")
    draft.save_pretrained(tmp_path)
    assert DeepseekV41DSparkModel.from_pretrained(tmp_path, num_anchors=7).num_anchors == 7


def test_token_rows_and_what_belongs_to_them_have_one_length():
    """Features, states and loss mask of another length would give other logits in silence."""
    draft = tiny_dspark()
    draft.initialize_embeddings_and_head(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False))
    inputs = {
        "input_ids": torch.randint(60, (2, 10)),
        "context_hidden_states": torch.randn(2, 10, 64),
        "loss_mask": torch.ones(2, 10),
        "target_last_hidden_states": torch.randn(2, 10, 32),
    }
    draft(**inputs, num_anchors=2)
    for name, value in inputs.items():
        for wrong in (value[:, :9], value[:1], torch.cat([value, value], dim=1), value[0]):
            with pytest.raises(ValueError, match=r"has the shape \[.*\], not \["):
                draft(**inputs | {name: wrong}, num_anchors=2)
    for name in ("context_hidden_states", "loss_mask"):
        with pytest.raises((ValueError, TypeError), match=name):
            draft(**{key: value for key, value in inputs.items() if key != name})
    with pytest.raises(ValueError, match="pass one of them"):
        draft(torch.randn(1, 4, 32), **inputs)
    with pytest.raises(ValueError, match="`input_ids=` and `loss_mask="):  # the reference's order
        draft(inputs["input_ids"], inputs["context_hidden_states"], inputs["loss_mask"])
    with pytest.raises(ValueError, match="`context_hidden_states` is missing"):
        draft(noise_embeddings=torch.randn(1, 4, 32))


def test_loads_and_saves_again_without_the_package(tmp_path):
    draft = tiny_dspark(confidence_input="pre_norm", confidence_temperatures=[1.0, 1.5, 0.5, 2.0])
    save_file(dspark_inputs(draft), tmp_path / "inputs.safetensors")
    with torch.no_grad():
        expected = draft(**load_file(tmp_path / "inputs.safetensors")).last_hidden_state
    draft.save_pretrained(tmp_path / "made_here")
    hidden = run_fresh(tmp_path / "made_here", tmp_path / "inputs.safetensors", tmp_path / "again", tmp_path)
    assert torch.equal(hidden, expected)
    assert code_files(tmp_path / "again") == code_files(tmp_path / "made_here")
    assert not [name for name in code_files(tmp_path / "again") if name in ("modeling_deepseek_v41.py", "engram.py")]
    stored = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("made_here", "again")]
    assert stored[0]["auto_map"]["AutoModel"] == "modeling_deepseek_v41_dspark.DeepseekV41DSparkModel"
    assert stored[0] == stored[1] and stored[0]["confidence_temperatures"] == [1.0, 1.5, 0.5, 2.0]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_gradient_checkpointing_keeps_gradients(targets, use_reentrant):
    def gradients(checkpointing):
        torch.manual_seed(0)
        draft = tiny_dspark().train()
        inputs = dspark_inputs(draft, context_length=12, blocks=2, batch=2)
        if checkpointing:
            draft.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        if targets is not None:
            config = LoraConfig(r=2, target_modules=targets, task_type="FEATURE_EXTRACTION", init_lora_weights=False)
            draft = get_peft_model(draft, config)
        tokens, anchors = torch.ones(2, 8, dtype=torch.long), torch.tensor([[3, 8], [5, 11]])
        output = draft(**inputs, anchor_positions=anchors, previous_token_ids=tokens)
        loss = output.last_hidden_state.square().sum() + output.transition_logits.sum() + output.confidence_pred.sum()
        loss.backward()
        return {name: p.grad for name, p in draft.named_parameters() if p.requires_grad}

    expected = gradients(checkpointing=False)
    actual = gradients(checkpointing=True)
    # Experts that no token was sent to have no gradient of their own, but the tensor that holds all of them has.
    assert len(expected) > 0 and [name for name, grad in expected.items() if grad is None] == []
    torch.testing.assert_close(actual, expected)


def test_wrong_inputs_are_refused():
    draft = tiny_dspark()
    one, two = dspark_inputs(draft), dspark_inputs(draft, blocks=2)
    anchors, mask = torch.tensor([[3, 7]]), torch.ones(1, 1, 8, 17, dtype=torch.bool)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    cache = DFlashCache(config=draft.config)
    wrong = {
        "`noise_embeds` holds 8": two,
        r"`noise_embeds` has the shape \[1, 4, 31\], not \[B, Q, 32\]": one | {"noise_embeds": torch.randn(1, 4, 31)},
        r"`context_hidden_states` has the shape \[1, 9, 32\], not \[1, A, 64\]: `target_layer_ids`": one
        | {"context_hidden_states": torch.randn(1, 9, 32)},
        r"`position_ids` has the shape \[1, 12\], not \[1, 13\]": one | {"position_ids": torch.arange(12)[None]},
        "`position_ids` is missing": two | {"attention_mask": mask},
        "`attention_mask` has the shape": two | {"attention_mask": mask[..., :-1]},
        "padding has no mask": one | {"attention_mask": torch.ones(1, 13)},
        "say the same twice": two | {"attention_mask": mask, "anchor_positions": anchors},
        "2 `anchor_positions` with `block_size` 4": one | {"anchor_positions": anchors},
        "`cache` is for one block": two | {"anchor_positions": anchors, "cache": cache},
        "DFlashCache": one | {"cache": DynamicCache(config=None)},
        "`previous_token_ids` has the shape": one | {"previous_token_ids": tokens[:, :3]},
        "`target_hidden_states` is another name": one | {"target_hidden_states": one["context_hidden_states"]},
        "`initialize_embeddings_and_head`": {
            "input_ids": tokens,
            "target_hidden_states": torch.randn(1, 4, 64),
            "loss_mask": torch.ones(1, 4),
        },
    }
    for message, inputs in wrong.items():
        try:
            draft(**inputs)
        except ValueError as error:
            assert re.search(message, str(error)), f"{message!r} in {error!r}"
        else:
            pytest.fail(f"nothing said {message!r}")
    with pytest.raises(ValueError, match="`position_ids=`, by keyword"):  # the reference's order
        draft(*two.values(), torch.zeros(1, 17, dtype=torch.long), mask)
    with pytest.raises(TypeError, match="anchors"):
        draft(**one, anchors=anchors)
    with pytest.raises(ValueError, match="`markov_rank` is null"):
        tiny_dspark(markov_rank=None)(**one, previous_token_ids=tokens)
    with pytest.raises(ValueError, match="`lm_head` has a weight of"):
        draft.initialize_embeddings_and_head(nn.Embedding(64, 32), nn.Linear(32, 60))
    for call in (lambda: draft.set_embedding_head_trainable(True), lambda: draft.compute_logits(torch.randn(1, 32))):
        with pytest.raises(ValueError, match="`initialize_embeddings_and_head`"):
            call()
    with pytest.raises(ValueError, match="flex_attention"):
        tiny_dspark("flex_attention")
