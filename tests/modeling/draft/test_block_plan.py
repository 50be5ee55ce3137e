"""Blocks that are planned before the forward are computed as those whose anchors it is given."""

import pytest
import torch
from deepseek_v41_dspark_models import dspark_inputs, tiny_dspark
from draft_models import draft_inputs, tiny_draft

HYBRID = {"sliding_window": 5, "num_hidden_layers": 3, "num_full_attention_layers": 1, "is_causal": True}
ANCHORS = torch.tensor([[1, 3, 9, 16, 22], [0, 7, 20, 0, 0]])
KEEP = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
DOCUMENTS = torch.tensor([[1] * 6 + [2] * 15 + [0] * 6, [1] * 27])
DRAFTS = {"k3": (tiny_draft, draft_inputs, HYBRID), "dspark": (tiny_dspark, dspark_inputs, {})}


def make(name: str, implementation: str = "sdpa"):
    model, inputs, settings = DRAFTS[name]
    draft = model(implementation, **settings)
    return draft, inputs(draft, context_length=27, blocks=5, batch=2)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_plan_takes_the_place_of_anchors(name, implementation):
    draft, inputs = make(name, implementation)
    given = {"anchor_positions": ANCHORS, "block_keep_mask": KEEP, "document_ids": DOCUMENTS}
    expected = draft(**inputs, **given).last_hidden_state
    plan = draft.plan_blocks(ANCHORS, KEEP, 27, DOCUMENTS)
    assert plan.visible.keys() == set(draft.config.context_windows)
    assert torch.equal(draft(**inputs, block_plan=plan).last_hidden_state, expected)


@pytest.mark.parametrize("name", DRAFTS)
def test_the_forward_reads_nothing_back_from_the_device(name):
    """Of tensors without numbers nothing can be read: so a plan that was moved there says all in itself."""
    draft, inputs = make(name)
    plan = draft.plan_blocks(ANCHORS, KEEP, 27, DOCUMENTS).to(torch.device("meta"))
    draft.to("meta").set_experts_implementation("batched_mm") if name == "dspark" else draft.to("meta")
    hidden = draft(**{key: value.to("meta") for key, value in inputs.items()}, block_plan=plan).last_hidden_state
    assert hidden.shape == inputs["noise_embeds"].shape


def test_faults_are_named():
    draft, inputs = make("k3")
    wrong = {
        "`block_keep_mask` has the shape": (ANCHORS, KEEP[:, 1:], 27),
        "`document_ids` has the shape": (ANCHORS, KEEP, 27, DOCUMENTS[:, 1:]),
        "come back to a document": (ANCHORS, KEEP, 27, DOCUMENTS.flip(0) + torch.eye(2, 27).long()[[0, 0]]),
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            draft.plan_blocks(*given)
    plan = draft.plan_blocks(ANCHORS, KEEP, 27)
    mask = torch.ones(2, 1, 20, 47, dtype=torch.bool)
    for message, given in {
        "`block_plan` and `anchor_positions` say the same": {"block_plan": plan, "anchor_positions": ANCHORS},
        "`attention_mask` and": {"block_plan": plan, "attention_mask": mask},
        "`cache` is for one block": {"block_plan": plan, "use_cache": True},
        "is for 26 context rows": {"block_plan": draft.plan_blocks(ANCHORS, KEEP, 26)},
        "make 16": {"block_plan": draft.plan_blocks(ANCHORS[:, 1:], None, 27)},
        "are of 1 rows": {"block_plan": draft.plan_blocks(ANCHORS[:1], None, 27)},
    }.items():
        with pytest.raises(ValueError, match=message):
            draft(**inputs, **given)
    draft.set_attn_implementation("eager")
    plan = draft.plan_blocks(ANCHORS, KEEP, 27)
    draft.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="make it anew"):
        draft(**inputs, block_plan=plan)
