import torch
from packed_rows import document_ids_from_lengths

from blockdraft.modeling.draft.documents import document_positions, document_remaining


def test_document_remaining_equals_reference(golden):
    reference = golden("k3_dflash_loss_packed")
    remaining = reference["in.doc_remaining"]
    ids = document_ids_from_lengths(reference["in.seq_lens"], remaining.shape[1])
    lengths = torch.tensor([23, 20])  # row 1 ends in padding, which its last document holds and does not count
    assert torch.equal(document_remaining(ids, lengths), remaining)


def test_positions_restart_with_each_document():
    ids = torch.tensor([[1, 1, 2, 2, 2, 0], [4, 5, 5, 0, 0, 0]])
    assert document_positions(ids).tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 1, 0, 1, 2]]
