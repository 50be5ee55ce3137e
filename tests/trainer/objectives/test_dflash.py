import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from dense_blocks import additive_mask, block_attention_mask
from packed_rows import document_ids_from_lengths
from torch import nn

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.draft.block_targets import build_block_inputs, build_block_targets
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel
from blockdraft.trainer.objectives.dflash import BlockLoss, block_acceptance, dflash_loss
from blockdraft.trainer.objectives.slot_targets import slot_targets, supervised_slots

CASES = ["nogamma", "gamma7", "vp_nogamma", "vp_gamma7", "packed"]
TOLERANCE = 5e-5


def assert_near(actual, expected, tolerance=TOLERANCE):
    """Largest difference relative to the largest number, as the goldens are compared."""
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= tolerance, f"relative error {error:.2e}"


def case_blocks(case):
    """Inputs and targets of a golden case, by the functions under test."""
    size, mask_token = case.meta["options"]["block_size"], case.meta["options"]["mask_token_id"]
    anchors, keep = case["in.anchor_positions"], case["in.block_keep_mask"]
    prefix = case.tensors.get("in.prefix_lengths", 1)
    noise_ids = build_block_inputs(case["in.input_ids"], anchors, keep, size, mask_token, prefix)
    return noise_ids, build_block_targets(case["in.input_ids"], case["in.loss_mask"], anchors, keep, size), prefix


def case_mask(case, sliding_window=None):
    documents = case.tensors.get("in.seq_lens")
    length = case["in.input_ids"].shape[1]
    return block_attention_mask(
        case["in.anchor_positions"],
        case["in.block_keep_mask"],
        length,
        case.meta["options"]["block_size"],
        sliding_window=sliding_window,
        document_ids=None if documents is None else document_ids_from_lengths(documents, length),
    )


def case_step(case, sliding_window=None, chunk_size=None):
    """One training step of a golden's draft: (draft, hidden states, loss), gradients left on the draft."""
    draft = KimiK3DFlashDraftModel(KimiK3DFlashConfig(**case.meta["config"]))
    draft.load_state_dict(case.group("param"))
    embed_tokens = nn.Embedding.from_pretrained(case["in.embed_weight"])
    lm_head = nn.Linear(*case["in.lm_head_weight"].shape[::-1], bias=False)
    lm_head.weight = nn.Parameter(case["in.lm_head_weight"], requires_grad=False)
    noise_ids, targets, prefix = case_blocks(case)
    hidden = draft(
        noise_embeds=draft.embed_block(noise_ids, embed_tokens),
        context_hidden_states=case["in.target_hidden"],
        attention_mask=additive_mask(case_mask(case, sliding_window), torch.float32),
    ).last_hidden_state
    targets = slot_targets(targets.token_ids, targets.mask, prefix, case.meta["options"]["loss_decay_gamma"])
    loss = dflash_loss(hidden, partial(draft.compute_logits, lm_head=lm_head), targets, chunk_size)
    loss.loss.backward()
    return draft, hidden, loss


def assert_metrics(loss, case):
    assert_near(loss.loss, case["out.loss"])
    assert_near(loss.weight, case["out.loss_weight"])
    assert loss.slot_valid.sum() == case["out.valid_tokens"]
    assert loss.slot_correct.sum() == case["out.correct_tokens"]
    assert loss.valid_blocks == case["out.valid_blocks"]
    assert loss.accept_len_sum == case["out.accept_len_sum"]
    for name, value in loss.metrics().items():
        assert value == pytest.approx(case[f"out.{name}"].item(), abs=1e-6)


def test_perfect_draft_commits_the_whole_block():
    mask = torch.ones(3, 2, 4)
    for prefix, committed in ((1, 4), (0, 5)):  # 1+N and N layout, the bonus included
        accepted, blocks = block_acceptance(mask, supervised_slots(mask, prefix))
        assert 1 + accepted.sum() / blocks == committed


def test_acceptance_stops_at_errors_and_passes_holes():
    supervised = torch.tensor([[[0, 1, 1, 1, 1], [0, 1, 0, 1, 1], [0, 0, 0, 0, 0]]])
    accepted = torch.tensor([[[0, 1, 0, 1, 1], [1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]], dtype=torch.bool)
    slots, blocks = block_acceptance(accepted, supervised)
    assert slots.tolist() == [0, 2, 0, 1, 0] and blocks == 2


@pytest.mark.parametrize("chunk_size", [1, 5, 1024])
@pytest.mark.parametrize("name", CASES)
def test_loss_of_reference_hidden_states(golden, name, chunk_size):
    case = golden(f"k3_dflash_loss_{name}")
    _, targets, prefix = case_blocks(case)
    assert torch.equal(targets.label_indices, case["out.label_indices"])
    assert torch.equal(targets.token_ids, case["out.target_ids"])
    assert torch.equal(targets.mask, case["out.block_mask"])
    head, sizes = case["in.lm_head_weight"], []

    def compute_logits(hidden):
        sizes.append(len(hidden))
        return F.linear(hidden, head)

    targets = slot_targets(targets.token_ids, targets.mask, prefix, case.meta["options"]["loss_decay_gamma"])
    loss = dflash_loss(case["out.hidden"], compute_logits, targets, chunk_size)
    assert_metrics(loss, case)
    assert max(sizes) <= chunk_size and sum(sizes) == case["out.valid_tokens"]


@pytest.mark.parametrize("name", CASES)
def test_training_step_equals_reference(golden, name):
    case = golden(f"k3_dflash_loss_{name}")
    assert torch.equal(case_mask(case), case["out.mask_visible"])
    draft, hidden, loss = case_step(case)
    assert_near(hidden, case["out.hidden"])
    assert_metrics(loss, case)
    parameters = dict(draft.named_parameters())
    for parameter, gradient in case.group("grad").items():
        assert_near(parameters[parameter].grad, gradient)


def test_chunks_change_nothing(golden):
    case = golden("k3_dflash_loss_vp_gamma7")
    whole, _, loss = case_step(case)
    chunked, _, chunked_loss = case_step(case, chunk_size=3)
    assert_near(chunked_loss.loss, loss.loss, 1e-6)
    for a, b in zip(chunked.parameters(), whole.parameters(), strict=True):
        assert_near(a.grad, b.grad, 1e-5)


def reference_step(case, window):
    """The same step in float64 written out slot by slot, without masks: (loss, parameters with gradients)."""
    config, options = case.meta["config"], case.meta["options"]
    w = {k: v.double().requires_grad_() for k, v in case.group("param").items()}
    embed, head = case["in.embed_weight"].double(), case["in.lm_head_weight"].double()
    heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    size, gamma, mask_id = options["block_size"], options["loss_decay_gamma"], options["mask_token_id"]
    input_ids, loss_mask = case["in.input_ids"], case["in.loss_mask"]
    length = input_ids.shape[1]

    def norm(x, name, eps=config["rms_norm_eps"]):
        return w[f"{name}.weight"] * x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()

    def linear(x, name):
        return x @ w[f"{name}.weight"].T

    def keys_values(x, name):
        latent, shared = linear(x, f"{name}.kv_a_proj_with_mqa").split([rank, rope])
        key, val = (
            linear(norm(latent, f"{name}.kv_a_layernorm", 1e-6), f"{name}.kv_b_proj")
            .view(heads, nope + value)
            .split([nope, value], -1)
        )
        return torch.cat([key, shared.expand(heads, rope)], -1), val

    def attend(x, rows, name):
        query = linear(norm(linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", 1e-6), f"{name}.q_b_proj")
        keys, values = (torch.stack(part) for part in zip(*(keys_values(row, name) for row in rows), strict=True))
        scores = torch.einsum("hd,khd->hk", query.view(heads, nope + rope), keys) * (nope + rope) ** -0.5
        out = torch.einsum("hk,khd->hd", scores.softmax(-1), values).flatten()
        return linear(out * linear(x, f"{name}.g_proj").sigmoid(), f"{name}.o_proj")

    def mlp(x, name):
        gate, up = linear(x, f"{name}.gate_proj"), linear(x, f"{name}.up_proj")
        beta, linear_beta = config["activation_situ_beta"], config["activation_situ_linear_beta"]
        gate = beta * torch.tanh(gate / beta) * gate.sigmoid()
        return linear(gate * linear_beta * torch.tanh(up / linear_beta), f"{name}.down_proj")

    loss_sum = weight_sum = 0.0
    for b in range(len(input_ids)):
        ends = case["in.seq_lens"][b].cumsum(0).tolist() if "in.seq_lens" in case.tensors else [length]
        document = [sum(end <= s for end in ends) for s in range(length)]
        context = [norm(linear(f, "fc"), "hidden_norm") for f in case["in.target_hidden"][b].double()]
        for n, anchor in enumerate(case["in.anchor_positions"][b].tolist()):
            if not case["in.block_keep_mask"][b, n]:
                continue
            known = case["in.prefix_lengths"][b, n].item() if "in.prefix_lengths" in case.tensors else 1
            x = [
                embed[input_ids[b, anchor + j] if j < known and anchor + j < length else mask_id] for j in range(size)
            ]
            for layer in range(config["num_hidden_layers"]):
                prefix = f"layers.{layer}"
                block = [norm(row, f"{prefix}.input_layernorm") for row in x]
                for j in range(size):
                    seen = [
                        context[s]
                        for s in range(anchor)
                        if document[s] == document[anchor] and (window is None or anchor + j - s < window)
                    ]
                    x[j] = x[j] + attend(block[j], seen + block, f"{prefix}.self_attn")
                x = [row + mlp(norm(row, f"{prefix}.post_attention_layernorm"), f"{prefix}.mlp") for row in x]
            for j in range(known, size):
                if anchor + j < length and loss_mask[b, anchor + j]:
                    logits = head @ norm(x[j], "norm")
                    weight = math.exp(-(j - known) / gamma) if gamma else 1.0
                    loss_sum = loss_sum - weight * logits.log_softmax(-1)[input_ids[b, anchor + j]]
                    weight_sum += weight
    loss = loss_sum / (weight_sum + 1e-6)
    loss.backward()
    return loss, w


@pytest.mark.parametrize(
    "name, window", [("gamma7", None), ("gamma7", 2), ("nogamma", 5), ("packed", 4), ("vp_gamma7", 3)]
)
def test_windowed_step_equals_the_maths_written_out(golden, name, window):
    """No reference number covers a windowed loss. Without a window the written-out step itself is held to one."""
    case = golden(f"k3_dflash_loss_{name}")
    expected, w = reference_step(case, window)
    if window is None:
        assert_near(expected, case["out.loss"])
    else:
        assert not torch.equal(case_mask(case, window), case_mask(case))
    draft, _, loss = case_step(case, sliding_window=window)
    assert_near(loss.loss, expected)
    for name, parameter in draft.named_parameters():
        assert_near(parameter.grad, w[name].grad)


def test_no_supervised_slot_is_a_zero_loss_that_reaches_the_hidden_states():
    hidden = torch.randn(1, 8, 6, requires_grad=True)
    nothing = slot_targets(torch.zeros(1, 2, 4).long(), torch.zeros(1, 2, 4), gamma=4.0)
    loss = dflash_loss(hidden, nn.Linear(6, 9), nothing)
    loss.loss.backward()
    assert loss.loss == 0 and loss.weight == 0 and loss.valid_blocks == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert loss.metrics() == {"accuracy": 0, "accept_len": 0}


def test_sums_of_micro_batches_are_the_batch(golden):
    case = golden("k3_dflash_loss_gamma7")
    _, targets, prefix = case_blocks(case)
    head = partial(F.linear, weight=case["in.lm_head_weight"])
    whole, first, second = (
        dflash_loss(
            case["out.hidden"][row], head, slot_targets(targets.token_ids[row], targets.mask[row], prefix, 7.0)
        )
        for row in (slice(None), slice(0, 1), slice(1, 2))
    )
    total = first + second
    assert_near(total.loss, whole.loss, 1e-6)
    assert total.metrics() == pytest.approx(whole.metrics())
    assert torch.equal(total.slot_accepted, whole.slot_accepted)


def test_only_the_loss_carries_a_gradient():
    hidden = torch.randn(1, 4, 6, requires_grad=True)
    targets = slot_targets(torch.zeros(1, 1, 4).long(), torch.ones(1, 1, 4))
    loss = dflash_loss(hidden, nn.Linear(6, 9), targets)
    assert {name for name, value in vars(loss).items() if value.requires_grad} == {"loss_sum"}


def test_half_precision_logits_are_summed_in_fp32():
    hidden = torch.randn(1, 4, 6, dtype=torch.bfloat16)
    targets = slot_targets(torch.zeros(1, 1, 4).long(), torch.ones(1, 1, 4))
    head = nn.Linear(6, 900, bias=False, dtype=torch.bfloat16)
    loss = dflash_loss(hidden, head, targets)
    assert loss.loss_sum.dtype == torch.float32
    expected = F.cross_entropy(head(hidden[0, 1:]).float(), targets.token_ids[0, 0, 1:], reduction="sum")
    assert_near(loss.loss_sum, expected, 1e-6)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), ("mps", torch.float32)])
def test_sums_start_in_a_dtype_that_the_device_has(monkeypatch, device, dtype):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda shape, dtype, device: zeros(shape, dtype=dtype))
    total = BlockLoss.zeros(4, torch.device(device))
    assert {tensor.dtype for tensor in vars(total).values()} == {dtype}
