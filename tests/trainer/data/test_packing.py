"""Packed rows: whole, tight, and with their documents told apart."""

import pytest
import torch
from packed_documents import document_rows

from blockdraft.trainer.data.packing import best_fit, pack_rows


def test_rows_are_packed_whole_and_tightly():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 100, (500,), generator=generator).tolist()
    bins = best_fit(lengths, 128)
    assert sorted(index for bin in bins for index in bin) == list(range(500))
    assert all(sum(lengths[i] for i in bin) <= 128 for bin in bins)
    assert len(bins) <= 1.03 * sum(lengths) / 128 + 1
    assert best_fit([3, 8, 5, 2], 8) == [[0, 2], [1], [3]]
    with pytest.raises(ValueError, match="a row of 9 tokens does not fit a packed row of max_length=8"):
        best_fit([9], 8)


def test_packed_rows_hold_their_documents():
    rows = document_rows()
    packed = pack_rows(rows, 30)
    assert packed.column_names == ["input_ids", "loss_mask", "row_id", "document_ids", "document_row_ids"]
    found = {}
    for row in packed:
        assert len(row["input_ids"]) == len(row["loss_mask"]) == len(row["document_ids"]) <= 30
        for number, name in enumerate(row["document_row_ids"], start=1):
            own = [i for i, document in enumerate(row["document_ids"]) if document == number]
            assert own == list(range(own[0], own[-1] + 1))
            found[name] = [[row[column][i] for i in own] for column in ("input_ids", "loss_mask")]
    assert found == {row["row_id"]: [row["input_ids"], row["loss_mask"]] for row in rows}
    assert len(set(packed["row_id"])) == len(packed) == 3  # 80 tokens
    assert pack_rows(rows, 30)["row_id"][:] == packed["row_id"][:]
    assert list(pack_rows(rows.to_iterable_dataset(), 30)) == list(packed)
