"""Tensors of shapes that do not belong together are refused, with both shapes, wherever masks and rows are made."""

import pytest
import torch
from deepseek_v41_dspark_models import tiny_dspark
from deepseek_v41_models import NO_ENGRAM, tiny_v41
from kimi_k3_models import tiny_k3

from blockdraft.modeling.draft.anchors import legal_anchors, legal_dspark_anchors
from blockdraft.modeling.draft.block_targets import build_block_inputs, build_block_targets, build_dspark_targets
from blockdraft.modeling.draft.block_visibility import block_visibility
from blockdraft.modeling.ops.shapes import check_shape

IDS, ANCHORS = torch.arange(18).view(2, 9), torch.tensor([[1, 4, 6], [0, 3, 0]])
KEEP, LOSS_MASK = torch.ones(2, 3, dtype=torch.bool), torch.ones(2, 9)
BLOCKS = {"anchor_positions": ANCHORS, "block_keep_mask": KEEP}
# What makes masks, positions and rows, and the tensors it takes.
BUILDERS = {
    "visibility": (block_visibility, BLOCKS | {"document_ids": IDS // 5}, {"context_length": 9, "block_size": 4}),
    "block inputs": (build_block_inputs, BLOCKS | {"input_ids": IDS}, {"block_size": 4, "mask_token_id": 0}),
    "block targets": (build_block_targets, BLOCKS | {"input_ids": IDS, "loss_mask": LOSS_MASK}, {"block_size": 4}),
    "dspark targets": (build_dspark_targets, BLOCKS | {"input_ids": IDS, "loss_mask": LOSS_MASK}, {"block_size": 4}),
    "attention mask": (
        lambda **inputs: tiny_dspark().build_attention_mask(**inputs, dtype=torch.float32),
        BLOCKS,
        {"context_sequence": 9},
    ),
    "k3 target": (lambda **inputs: tiny_k3()(**inputs), {"input_ids": IDS, "attention_mask": LOSS_MASK}, {}),
    "k3 documents": (lambda **inputs: tiny_k3()(**inputs), {"input_ids": IDS, "document_ids": 1 + IDS // 20}, {}),
    "v41 target": (
        lambda **inputs: tiny_v41(**NO_ENGRAM)(**inputs),
        {"input_ids": IDS, "attention_mask": LOSS_MASK},
        {},
    ),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_shapes_that_do_not_belong_together_are_refused(name):
    build, tensors, others = BUILDERS[name]
    build(**tensors, **others)
    for key, value in tensors.items():
        columns = (value[:, :-1], torch.cat([value, value], dim=1))
        # Rows of any length have blocks.
        is_free = (name, key) == ("block inputs", "input_ids")
        for wrong in (torch.cat([value, value[:1]]), value[0], *(() if is_free else columns)):
            with pytest.raises(ValueError, match=r"`\w+` has the shape \[.*\], not \[|`attention_mask` has 1 dim"):
                build(**tensors | {key: wrong}, **others)


def test_one_tensor_alone_has_to_have_its_rank():
    for build in (lambda mask: legal_anchors(mask, 4), legal_dspark_anchors):
        with pytest.raises(ValueError, match=r"`loss_mask` has the shape \[9\], not \[B, S\]"):
            build(LOSS_MASK[0])
    with pytest.raises(ValueError, match=r"`anchor_positions` has the shape \[3\], not \[B, N\]"):
        tiny_dspark().build_position_ids(ANCHORS[0], 9)


def test_each_bias_has_its_slot():
    """One token for all slots, or tokens of other rows, would broadcast."""
    draft, tokens = tiny_dspark(), torch.zeros(2, 3, dtype=torch.long)
    logits, states = torch.randn(2, 3, 64), torch.randn(2, 3, 32)
    assert draft.slot_logits(logits, tokens, states).shape == logits.shape
    for wrong in (tokens[:1], tokens[0], tokens[:, :1]):
        with pytest.raises(ValueError, match=r"`previous_token_ids` has the shape .*, not \[2, 3\]"):
            draft.slot_logits(logits, wrong, states)


def test_a_shape_names_what_may_be_any():
    assert check_shape("rows", torch.zeros(2, 5, 3), "B", "S", 3) == (2, 5, 3)
    with pytest.raises(ValueError, match=r"^`rows` has the shape \[2, 5\], not \[B, 4\]: as many as columns\.$"):
        check_shape("rows", torch.zeros(2, 5), "B", 4, reason="as many as columns")
    with pytest.raises(ValueError, match=r"^`rows` is missing\.$"):
        check_shape("rows", None, "B", 4)
