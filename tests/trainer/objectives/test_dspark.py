"""The DSpark objective against reference numbers: three terms, gradients, diagnostics, chunks."""

import math

import pytest
import torch
from torch import nn

from blockdraft.modeling.draft.block_targets import build_dspark_targets
from blockdraft.trainer.objectives.dspark import DSparkAlphas, SlotPredictions, dspark_loss
from blockdraft.trainer.objectives.slot_targets import slot_targets

TOLERANCE = 1e-5  # single part


def assert_near(actual, expected, tolerance=TOLERANCE):
    """Largest difference relative to the largest number; zeros have to be zeros."""
    difference = (actual.double() - expected.double()).abs().max()
    assert difference <= tolerance * expected.double().abs().max(), f"{difference:.2e}"


def variant_loss(case, index, chunk_size=None, requires_grad=False):
    """(loss, inputs) of a variant of the golden `dspark_loss`."""
    variant = case.meta["options"]["variants"][index]
    inputs = {"draft_logits": case["in.draft_logits"].clone().requires_grad_(requires_grad)}
    if variant["aligned"]:
        inputs["aligned_target_logits"] = case["in.aligned_target_logits"].clone().requires_grad_(requires_grad)
    if variant["confidence"]:
        inputs["confidence_pred"] = case["in.confidence_pred"].clone().requires_grad_(requires_grad)

    def predict(*values):
        given = dict(zip(inputs, values, strict=True))
        return SlotPredictions(given["draft_logits"], given.get("aligned_target_logits"), given.get("confidence_pred"))

    loss = dspark_loss(
        predict,
        list(inputs.values()),
        slot_targets(case["in.target_ids"], case["in.eval_mask"].float(), 0, variant["gamma"]),
        DSparkAlphas(variant["ce"], variant["l1"], variant["conf"]),
        chunk_size,
    )
    return loss, inputs


def reference_terms(loss) -> dict[str, torch.Tensor]:
    """The sums under the reference's names."""
    weight = loss.weight + 1e-6
    return {
        "loss": loss.loss.detach(),
        "ce_loss": loss.ce_sum / weight,
        "l1_loss": loss.l1_sum / weight,
        "confidence_loss": loss.confidence_sum / weight,
        "accept_rate_per_pos_num": loss.slot_accept_rate,
        "accept_rate_per_pos_den": loss.slot_compared,
        "tau_num": loss.accept_length,
        "tau_den": loss.compared_blocks,
        "confidence_abs_error_num": loss.confidence_abs_error,
        "confidence_bias_num": loss.confidence_bias,
        "confidence_cumprod_bias_num": loss.confidence_cumulative_bias,
        "confidence_diag_den": loss.confidence_weight,
    }


@pytest.mark.parametrize("chunk_size", [1, 4, 1024])
@pytest.mark.parametrize("variant", range(6))
def test_terms_gradients_and_diagnostics_equal_reference(golden, variant, chunk_size):
    case = golden("dspark_loss")
    loss, inputs = variant_loss(case, variant, chunk_size, requires_grad=True)
    terms, expected = reference_terms(loss), case.group(f"out.v{variant}.terms")
    assert terms.keys() == expected.keys()
    for name, value in expected.items():
        assert_near(terms[name], value)
    loss.loss.backward()
    gradients = case.group(f"grad.v{variant}")
    for name, value in inputs.items():
        if name in gradients:
            assert_near(value.grad, gradients[name])
        else:
            assert value.grad is None, "the teacher is not trained"


@pytest.mark.parametrize("name", ["fp32", "noconf"])
def test_loss_of_the_reference_draft(golden, name):
    """The draft's own case: labels and previous tokens from the rows, the loss from its logits."""
    case = golden(f"v41_dspark_forward_{name}")
    options = case.meta["options"]["loss"]
    targets = build_dspark_targets(
        *(case[f"in.{part}"] for part in ("input_ids", "loss_mask", "anchor_positions", "block_keep_mask")),
        case.meta["config"]["dspark_block_size"],
    )
    assert torch.equal(targets.token_ids, case["out.target_ids"])
    assert torch.equal(targets.previous_token_ids.flatten(1), case["out.previous_token_ids"])
    assert torch.equal(targets.mask.bool(), case["out.eval_mask"])
    has_confidence = "out.confidence_pred" in case.tensors
    parts = ["draft_logits", "aligned_target_logits"] + ["confidence_pred"] * has_confidence
    loss = dspark_loss(
        SlotPredictions,
        [case[f"out.{part}"] for part in parts],
        slot_targets(targets.token_ids, targets.mask, 0, options["loss_decay_gamma"]),
        DSparkAlphas(
            options["ce_loss_alpha"], options["l1_loss_alpha"], has_confidence * options["confidence_head_alpha"]
        ),
    )
    assert_near(loss.loss, case["out.loss"])
    terms = reference_terms(loss)
    for term, value in case.group("out.terms").items():
        assert_near(terms[term], value)


def test_a_perfect_draft_commits_the_whole_block_and_the_bonus():
    logits, mask = torch.randn(2, 3, 4, 11), torch.ones(2, 3, 4)
    labels = logits.argmax(-1)
    loss = dspark_loss(SlotPredictions, [logits, logits], slot_targets(labels, mask, 0), DSparkAlphas(confidence=0.0))
    metrics = loss.metrics()
    assert metrics["estimated_tau_sampled"] == pytest.approx(5) and metrics["accept_len"] == 5
    assert metrics["accept_rate"] == pytest.approx(1) and metrics["l1_loss"] == pytest.approx(0, abs=1e-6)


def test_weights_decay_from_slot_0_and_the_mean_divides_by_their_sum():
    logits = torch.zeros(1, 1, 3, 7)
    targets = slot_targets(torch.zeros(1, 1, 3).long(), torch.ones(1, 1, 3), 0, 4.0)
    loss = dspark_loss(SlotPredictions, [logits], targets, DSparkAlphas(1.0, 0.0, 0.0))
    assert loss.weight.item() == pytest.approx(sum(math.exp(-k / 4) for k in range(3)))
    assert loss.loss.item() == pytest.approx(math.log(7), rel=1e-5)  # each slot's loss is that


def test_no_supervised_slot_is_a_zero_loss_that_reaches_the_states():
    hidden = torch.randn(1, 2, 4, 6, requires_grad=True)
    head, nothing = nn.Linear(6, 9), torch.zeros(1, 2, 4)
    loss = dspark_loss(
        lambda h: SlotPredictions(head(h), head(h), h.sum(-1)),
        [hidden],
        slot_targets(nothing.long(), nothing, 0, 4.0),
        DSparkAlphas(),
    )
    loss.loss.backward()
    assert loss.loss == 0 and loss.weight == 0 and loss.compared_blocks == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden)) and not head.weight.grad.any()
    assert all(math.isfinite(value) for value in loss.metrics().values())


def test_sums_of_micro_batches_are_the_batch(golden):
    case = golden("dspark_loss")
    whole, _ = variant_loss(case, 1)
    parts = []
    for row in range(2):
        one = {name: tensor[row : row + 1] for name, tensor in case.tensors.items() if name.startswith("in.")}
        parts.append(variant_loss(type(case)(case.meta, one), 1)[0])
    total = type(whole).zeros(4, torch.device("cpu")) + parts[0] + parts[1]
    assert total.metrics() == pytest.approx(whole.metrics(), rel=1e-5)
    assert total.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)


def test_only_the_loss_carries_a_gradient(golden):
    loss, _ = variant_loss(golden("dspark_loss"), 1, requires_grad=True)
    assert {name for name, value in vars(loss).items() if value.requires_grad} == {"loss_sum"}


def test_half_precision_logits_are_compared_in_fp32():
    logits = torch.randn(2, 1, 1, 2, 300, dtype=torch.bfloat16)
    labels = torch.zeros(1, 1, 2).long()
    targets = slot_targets(labels, torch.ones(1, 1, 2), 0)
    loss = dspark_loss(SlotPredictions, list(logits), targets, DSparkAlphas(confidence=0.0))
    expected = (logits[0].float().softmax(-1) - logits[1].float().softmax(-1)).abs().sum()
    assert loss.loss_sum.dtype == torch.float32
    assert_near(loss.l1_sum, expected, 1e-6)
