import torch

from blockdraft.modeling.draft.dense_blocks import block_position_ids


def test_slots_stand_behind_their_anchor():
    positions = block_position_ids(torch.tensor([[5, 6, 7], [2, 9, 0]]), 12, 4)
    assert positions[:, :12].tolist() == [list(range(12))] * 2
    assert positions[0, 12:].tolist() == [5, 6, 7, 8, 6, 7, 8, 9, 7, 8, 9, 10]
    assert positions[1, 12:].tolist() == [2, 3, 4, 5, 9, 10, 11, 12, 0, 1, 2, 3]
