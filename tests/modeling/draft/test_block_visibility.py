import pytest
import torch
from dense_blocks import additive_mask, block_attention_mask
from packed_rows import document_ids_from_lengths

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.modeling.draft.block_visibility import block_visibility
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel

# Overlapping blocks in row 0 (anchors 5, 6, 7), a padded block in row 1.
ANCHORS = torch.tensor([[5, 6, 7], [2, 9, 0]])
KEEP = torch.tensor([[True, True, True], [True, True, False]])
CONTEXT, BLOCK = 12, 4


@pytest.fixture
def draft(golden):
    return KimiK3DFlashDraftModel(KimiK3DFlashConfig(**golden("k3_dflash_loss_gamma7").meta["config"])).eval()


@pytest.mark.parametrize("case", ["plain", "window", "causal", "docs", "docs_window_causal"])
def test_masks_equal_reference(golden, case):
    reference = golden("dflash_masks")
    options = reference.meta["options"]
    rule = {}
    if "window" in case:
        rule["sliding_window"] = options["sliding_window"]
    if "causal" in case:
        rule["causal"] = True
    if "docs" in case:
        rule["document_ids"] = document_ids_from_lengths(reference["in.seq_lens"], options["ctx_len"])
    visible = block_attention_mask(
        reference["in.anchor_positions"],
        reference["in.block_keep_mask"],
        options["ctx_len"],
        options["block_size"],
        **rule,
    )
    assert visible.dtype == torch.bool
    assert torch.equal(visible, reference[f"out.{case}"])


def test_document_ids_equal_reference(golden):
    reference = golden("dflash_masks")
    ids = document_ids_from_lengths(reference["in.seq_lens"], reference.meta["options"]["ctx_len"])
    assert torch.equal(ids, reference["out.ctx_doc_id"])
    assert torch.equal(ids.gather(1, reference["in.anchor_positions"]), reference["out.anchor_doc_id"])


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("per_query", [True, False])
def test_rule_written_out(window, per_query):
    visible = block_attention_mask(ANCHORS, KEEP, CONTEXT, BLOCK, sliding_window=window, window_per_query=per_query)
    for row in range(2):
        for query in range(3 * BLOCK):
            block, slot = divmod(query, BLOCK)
            anchor = ANCHORS[row, block].item()
            seen = set(range(CONTEXT + block * BLOCK, CONTEXT + (block + 1) * BLOCK))
            if KEEP[row, block]:
                if window is None:
                    seen |= set(range(anchor))
                elif per_query:
                    seen |= {s for s in range(anchor) if anchor + slot - s < window}
                else:
                    seen |= set(range(max(anchor - window, 0), anchor))
            assert set(visible[row, 0, query].nonzero().flatten().tolist()) == seen


def test_additive_mask_is_finite_after_softmax():
    visible = block_attention_mask(ANCHORS, KEEP, CONTEXT, BLOCK, sliding_window=1)
    for dtype in (torch.float32, torch.bfloat16):
        mask = additive_mask(visible, dtype)
        assert mask.dtype == dtype
        assert torch.equal(mask == 0, visible)
        weights = mask.softmax(-1)
        assert weights.isfinite().all() and (weights[~visible] == 0).all()


def test_no_anchors_give_an_empty_mask():
    empty = torch.zeros(2, 0, dtype=torch.long)
    assert block_attention_mask(empty, empty.bool(), CONTEXT, BLOCK).shape == (2, 1, 0, CONTEXT)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("additive", [True, False])
def test_blocks_never_see_features_from_their_anchor_on(draft, implementation, additive):
    draft.set_attn_implementation(implementation)
    noise = torch.randn(2, 3 * BLOCK, draft.config.hidden_size)
    features = torch.randn(2, CONTEXT, draft.fc.in_features)
    mask = block_attention_mask(ANCHORS, KEEP, CONTEXT, BLOCK)
    mask = additive_mask(mask, torch.float32) if additive else mask

    def blocks(features):
        return draft(noise, features, attention_mask=mask).last_hidden_state.unflatten(1, (3, BLOCK))

    with torch.no_grad():
        before = blocks(features)
        for row, anchors in enumerate(ANCHORS.tolist()):
            for block, anchor in enumerate(anchors):
                changed = features.clone()
                changed[row, anchor:] = 100 * torch.randn(CONTEXT - anchor, features.shape[-1])
                after = blocks(changed)
                assert torch.equal(after[row, block], before[row, block])  # bit for bit
                if anchor and KEEP[row, block]:
                    changed[row, anchor - 1] += 1
                    assert not torch.equal(blocks(changed)[row, block], before[row, block])


def test_slots_of_a_block_see_each_other_and_no_other_block(draft):
    noise = torch.randn(2, 3 * BLOCK, draft.config.hidden_size, requires_grad=True)
    features = torch.randn(2, CONTEXT, draft.fc.in_features)
    mask = block_attention_mask(ANCHORS, KEEP, CONTEXT, BLOCK)
    draft(noise, features, attention_mask=mask).last_hidden_state[0, BLOCK + 1].sum().backward()
    touched = noise.grad.abs().sum(-1) > 0
    expected = torch.zeros(2, 3 * BLOCK, dtype=torch.bool)
    expected[0, BLOCK : 2 * BLOCK] = True
    assert torch.equal(touched, expected)


@pytest.mark.parametrize("window", [None, 1, 3, 6, 40])
@pytest.mark.parametrize("per_query", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_intervals_name_the_rows_that_the_mask_shows(window, per_query, packed):
    rule = {"document_ids": torch.tensor([[0] * 4 + [1] * 8, [0] * 12])} if packed else {}
    rule |= {"sliding_window": window, "window_per_query": per_query}
    mask = block_attention_mask(ANCHORS, KEEP, CONTEXT, BLOCK, **rule)
    visible = block_visibility(ANCHORS, KEEP, CONTEXT, BLOCK, **rule)
    first, last = visible.first, visible.last
    assert first.shape == (2, 3, BLOCK if window and per_query else 1) and last.shape == (2, 3)
    first = first.expand(-1, -1, BLOCK)
    for row in range(2):
        for query in range(3 * BLOCK):
            block, slot = divmod(query, BLOCK)
            seen = list(range(first[row, block, slot], last[row, block]))
            assert seen == mask[row, 0, query, :CONTEXT].nonzero().flatten().tolist()
