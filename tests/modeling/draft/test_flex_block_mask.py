import pytest
import torch
import torch.nn.functional as F
from dense_blocks import block_attention_mask
from packed_rows import document_ids_from_lengths
from torch.nn.attention.flex_attention import create_mask, flex_attention

from blockdraft.modeling.draft.block_visibility import block_visibility
from blockdraft.modeling.draft.flex_block_mask import flex_block_mask, padded_block_mask

# Overlapping blocks in row 0 (anchors 5, 6, 7), a padded block in row 1.
ANCHORS = torch.tensor([[5, 6, 7], [2, 9, 0]])
KEEP = torch.tensor([[True, True, True], [True, True, False]])
CONTEXT, BLOCK = 12, 4


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rule", [{}, {"sliding_window": 3}, {"causal": True}, {"document_ids": True}])
def test_flex_equals_dense(rule):
    if "document_ids" in rule:
        rule = {"document_ids": document_ids_from_lengths(torch.tensor([[6, 6], [3, 9]]), CONTEXT)}
    dense = block_attention_mask(ANCHORS, KEEP, CONTEXT, BLOCK, **rule)
    queries, keys = dense.shape[-2:]
    mask = flex_block_mask(block_visibility(ANCHORS, KEEP, CONTEXT, BLOCK, **rule))
    assert torch.equal(create_mask(mask.mask_mod, 2, 1, queries, keys, device="cpu"), dense)
    # Lengths rounded up to a tile of 128 must not run past the tables (here they would raise an IndexError).
    assert torch.equal(create_mask(mask.mask_mod, 2, 1, 128, 128, device="cpu")[..., :queries, :keys], dense)

    q, k, v = torch.randn(2, 2, queries, 16), torch.randn(2, 2, keys, 16), torch.randn(2, 2, keys, 16)
    flex = flex_attention(q, k, v, block_mask=mask)
    torch.testing.assert_close(flex, F.scaled_dot_product_attention(q, k, v, attn_mask=dense), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [{}, {"sliding_window": 500}, {"causal": True}, {"document_ids": True}], ids=str)
def test_tiles_of_the_block_mask(rule):
    """Those that FlexAttention skips show nothing, and those that it does not look into hide nothing."""
    anchors = torch.arange(5, 900, 27)[None].repeat(2, 1)
    keep, context, block = torch.ones_like(anchors).bool(), 913, 16
    anchors[1, 20:], keep[1, 20:] = 0, False
    if "document_ids" in rule:
        rule = {"document_ids": document_ids_from_lengths(torch.tensor([[300, 613], [913, 0]]), context)}
    mask = flex_block_mask(block_visibility(anchors, keep, context, block, **rule))
    dense = block_attention_mask(anchors, keep, context, block, **rule)
    padded = F.pad(dense, (0, -dense.shape[3] % 128, 0, -dense.shape[2] % 128))
    tiles = padded.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).transpose(3, 4)
    some, fully = tiles.any(-1).any(-1), tiles.all(-1).all(-1)

    def listed(counts, indices):
        tiles = torch.arange(indices.shape[-1]) < counts[..., None]
        return torch.zeros_like(tiles).scatter_(-1, indices.long(), tiles)

    full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    partial = listed(mask.kv_num_blocks, mask.kv_indices)
    assert mask.seq_lengths == dense.shape[2:] and not (full & partial).any()
    assert not (full & ~fully)[:, :, :-1].any() and not (some & ~full & ~partial).any()
    assert (full | partial).sum() <= some.sum() * 1.05  # documents may leave gaps between the intervals of a tile
    assert full.sum() > 0 or "document_ids" in rule


def test_padding_for_flex_attention_is_seen_by_nobody():
    documents = torch.tensor([[0] * 6 + [1] * 6, [0] * 12])
    for rule in ({}, {"sliding_window": 3, "causal": True, "document_ids": documents}):
        padded = padded_block_mask(block_visibility(ANCHORS, KEEP, CONTEXT, BLOCK, **rule))
        assert (padded.context_length, padded.query_length) == (16, 16)
        dense = block_attention_mask(ANCHORS, KEEP, CONTEXT, BLOCK, **rule)
        whole = create_mask(padded.mask.mask_mod, 2, 1, 16, 32, device="cpu")
        assert torch.equal(torch.cat([whole[:, :, :12, :12], whole[:, :, :12, 16:28]], dim=-1), dense)
        assert not whole[:, :, :12, 12:16].any() and not whole[:, :, :12, 28:].any()
        keys = torch.arange(24.0).view(1, 1, 24, 1)
        assert padded.pad_keys(keys, 12).flatten().tolist() == [*range(12), *[0] * 4, *range(12, 24), *[0] * 4]
