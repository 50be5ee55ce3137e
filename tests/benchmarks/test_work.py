"""Counted work of the training step: what it may cost, and that the count can be trusted."""

import pytest
import torch
from dense_blocks import block_attention_mask
from step_cases import CONFIGS, relative_difference, rounding_spread, tiny_case
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.training_step import TrainingStep
from benchmarks.work import (
    ATTENTION,
    HEAD,
    LINEAR,
    Sizes,
    WorkCounter,
    necessary_products,
    register_missing_formulas,
    slope,
    visible_keys,
    work_by_kind,
)

DRAFTS = list(CONFIGS)
TOKENS, ANCHORS = (1024, 2048, 4096, 8192), (64, 128, 256, 512)
CHUNK_BYTES = 64 * 2**20  # of fp32 logits, at most, on a CPU


def counted(step: TrainingStep) -> WorkCounter:
    with WorkCounter(step.draft) as counter:
        step.run()
    return counter


def necessary(step: TrainingStep) -> dict[str, float]:
    return work_by_kind(necessary_products(step.draft.config, step.sizes()))


# ---- the reference ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "settings"),
    [
        ("dflash", {}),
        ("dflash", {"is_causal": False}),
        ("dflash", {"sliding_window": 8}),
        ("dspark", {}),
        ("dspark", {"confidence_input": "pre_norm"}),
    ],
)
def test_the_trainer_computes_what_the_dense_reference_does(draft, settings):
    case = tiny_case(draft, **settings)
    fast, dense = TrainingStep(case), TrainingStep(case, "dense")
    assert fast.run() == pytest.approx(dense.run(), rel=1e-6)
    gradients, expected = fast.gradients(), dense.gradients()
    assert gradients.keys() == expected.keys() == dict(fast.draft.named_parameters()).keys()
    limits = rounding_spread(TrainingStep(case, "dense"))
    for name, gradient in gradients.items():
        assert relative_difference(gradient, expected[name]) < 3 * limits[name], name


# ---- the count itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "settings"),
    [
        ("dflash", {"is_causal": False}),
        ("dflash", {"is_causal": True}),
        ("dflash", {"is_causal": True, "sliding_window": 3}),
        ("dflash", {"is_causal": False, "sliding_window": 20}),
        ("dspark", {}),
    ],
)
def test_visible_keys_are_those_of_the_mask(draft, settings):
    config = tiny_case(draft, **settings).config
    anchors = torch.tensor([[0, 1, 2, 17, 30], [5, 16, 39, 0, 0]])
    keep = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    mask = block_attention_mask(
        anchors,
        keep,
        40,
        config.block_size,
        sliding_window=config.sliding_window,
        window_per_query=draft == "dflash",
        causal=config.is_causal,
    )
    assert visible_keys(config, anchors, keep) == mask.sum().item()


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_closed_form_is_what_a_dense_step_does(draft):
    step = TrainingStep(tiny_case(draft), "dense")
    work = counted(step).work
    sizes = step.sizes()
    closed_form = work_by_kind(necessary_products(step.draft.config, Sizes.dense(sizes.context, sizes.rows)))
    for kind in (LINEAR, HEAD, ATTENTION):
        assert work[kind] == closed_form[kind], kind


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_count_is_that_of_pytorch(draft):
    register_missing_formulas()
    step = TrainingStep(tiny_case(draft), "dense")
    with FlopCounterMode(display=False) as counter:
        step.run()
    assert sum(counted(step).work.values()) == counter.get_total_flops()


def test_the_largest_tensor_is_found():
    step = TrainingStep(tiny_case("dflash"), "dense")
    rows = 12 * step.draft.config.block_size
    assert counted(step).largest >= rows * step.draft.config.vocab_size


def test_slope_of_a_power_law():
    assert slope([1, 2, 4], [3, 3 * 2**0.5, 6]) == pytest.approx(0.5)


# ---- what a step may cost -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_necessary_product_runs_once(draft):
    step = TrainingStep(tiny_case(draft, tokens=256, anchors=64))
    work, expected = counted(step).work, necessary(step)
    assert work[LINEAR] == pytest.approx(expected[LINEAR], rel=1e-3)
    # Logits once and one gradient of the states: no recomputation, no gradient of the frozen head.
    assert expected[HEAD] <= work[HEAD] <= 1.02 * expected[HEAD]


@pytest.mark.parametrize("draft", DRAFTS)
def test_growth_over_tokens(draft):
    steps = [TrainingStep(tiny_case(draft, size, 64)) for size in TOKENS]
    assert slope(TOKENS, [sum(counted(step).work.values()) for step in steps]) <= 1.05


def test_a_windows_attention_does_not_grow_over_tokens():
    for anchors in (64, 512):
        cases = [tiny_case("dspark", size, anchors, sliding_window=128, num_hidden_layers=1) for size in TOKENS]
        assert abs(slope(TOKENS, [counted(TrainingStep(case)).work[ATTENTION] for case in cases])) < 0.01


@pytest.mark.parametrize("draft", DRAFTS)
def test_growth_over_anchors(draft):
    works = [sum(counted(TrainingStep(tiny_case(draft, 2048, size))).work.values()) for size in ANCHORS]
    assert slope(ANCHORS, works) <= 1.05


@pytest.mark.parametrize(
    ("draft", "settings", "tokens"),
    [
        ("dflash", {"block_size": 16}, 2048),
        ("dspark", {"sliding_window": 128}, 4096),
    ],
)
def test_attention_costs_little_more_than_visible_keys(draft, settings, tokens):
    step = TrainingStep(tiny_case(draft, tokens, 512, num_hidden_layers=1, **settings))
    assert counted(step).work[ATTENTION] <= 1.5 * necessary(step)[ATTENTION]


@pytest.mark.parametrize(("draft", "anchors"), [("dflash", 256), ("dspark", 160)])
def test_logits_never_exist_for_all_slots(draft, anchors):
    step = TrainingStep(tiny_case(draft, 512, anchors, vocab_size=32768, num_hidden_layers=1))
    assert step.sizes().slots * step.draft.config.vocab_size * 4 > 90e6
    assert counted(step).largest * 4 <= CHUNK_BYTES
