"""What blocks hold and what their slots predict, against reference numbers and by hand."""

import pytest
import torch

from blockdraft.modeling.draft.anchors import legal_dspark_anchors, sample_anchors
from blockdraft.modeling.draft.block_targets import build_block_inputs, build_block_targets, build_dspark_targets


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("documents", ["doc", "nodoc"])
def test_dflash_targets_equal_reference(golden, start, documents):
    case = golden("dflash_block_targets")
    targets = build_block_targets(
        case["in.input_ids"],
        case["in.loss_mask"],
        case["in.anchor_positions"],
        case["in.block_keep_mask"],
        case.meta["options"]["block_size"],
        label_start=start,
        document_remaining=case["in.doc_remaining"] if documents == "doc" else None,
    )
    prefix = f"out.start{start}.{documents}"
    assert torch.equal(targets.label_indices, case[f"{prefix}.label_indices"])
    assert torch.equal(targets.token_ids, case[f"{prefix}.target_ids"])
    assert torch.equal(targets.mask, case[f"{prefix}.block_mask"])


def test_slot_k_predicts_token_a_plus_k():
    ids = torch.arange(16)[None]
    anchors, keep = torch.tensor([[5, 9]]), torch.ones(1, 2, dtype=torch.bool)
    slots = torch.arange(4)
    for start in (0, 1):
        targets = build_block_targets(ids, torch.ones(1, 16), anchors, keep, 4, label_start=start)
        assert torch.equal(targets.token_ids, anchors[..., None] + slots + start)
    assert build_block_inputs(ids, anchors, keep, 4, 63).tolist() == [[5, 63, 63, 63, 9, 63, 63, 63]]


def test_variable_prefix_inputs():
    ids = torch.arange(10)[None]
    anchors = torch.tensor([[3, 8, 0]])
    keep = torch.tensor([[True, True, False]])
    noise = build_block_inputs(ids, anchors, keep, 4, 63, torch.tensor([[2, 3, 2]]))
    # The second block runs past the row's end, the third is padding.
    assert noise.view(3, 4).tolist() == [[3, 4, 63, 63], [8, 9, 63, 63], [63] * 4]


@pytest.mark.parametrize("scenario", range(8))
def test_dspark_anchors_and_label_mask_equal_reference(golden, scenario):
    reference = golden("dspark_anchor_sampling")
    options = reference.meta["options"]["scenarios"][scenario]
    loss_mask = reference[f"in.s{scenario}.loss_mask"]
    remaining = reference.tensors.get(f"in.s{scenario}.doc_remaining")
    legal = legal_dspark_anchors(loss_mask, document_remaining=remaining)
    assert torch.equal(legal[:, :-1], reference[f"out.s{scenario}.candidate_mask"]) and not legal[:, -1].any()

    everything = reference[f"out.s{scenario}.all_anchors"]
    width = everything.shape[1]
    anchors = sample_anchors(legal, width, seed=1, step=2, row_ids=[3, "four"], width=width)
    assert torch.equal(anchors.positions, everything)
    assert torch.equal(anchors.keep, reference[f"out.s{scenario}.all_keep"])
    targets = build_dspark_targets(
        torch.zeros_like(loss_mask).long(), loss_mask, *anchors, options["block_size"], remaining
    )
    assert torch.equal(targets.mask.bool(), reference[f"out.s{scenario}.eval_mask"])

    number = options["num_anchors"]
    sampled = sample_anchors(legal, number, seed=1, step=2, row_ids=[3, "four"], width=number)
    assert list(sampled.positions.shape) == reference[f"out.s{scenario}.sampled_shape"].tolist()
    assert torch.equal(sampled.keep, reference[f"out.s{scenario}.sampled_keep"])
    assert all(legal[row, kept[keep]].all() for row, (kept, keep) in enumerate(zip(*sampled, strict=True)))


def test_slot_k_predicts_the_token_after_the_one_it_is_told():
    ids = torch.arange(16)[None]
    anchors, keep = torch.tensor([[5, 13, 0]]), torch.tensor([[True, True, False]])
    targets = build_dspark_targets(ids, torch.ones(1, 16), anchors, keep, 4)
    assert targets.token_ids.tolist() == [[[6, 7, 8, 9], [14, 15, 15, 15], [0, 0, 0, 0]]]
    assert targets.previous_token_ids.tolist() == [[[5, 6, 7, 8], [13, 14, 15, 15], [0, 0, 0, 0]]]
    assert targets.mask.tolist() == [[[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]]


def test_a_hole_in_the_loss_mask_ends_the_block():
    loss_mask = torch.ones(1, 8)
    loss_mask[0, 4] = 0
    targets = build_dspark_targets(
        torch.arange(8)[None], loss_mask, torch.tensor([[2]]), torch.ones(1, 1, dtype=torch.bool), 4
    )
    assert targets.mask.tolist() == [[[1, 0, 0, 0]]]
