"""Features that come back from disk are those that were computed."""

import pytest
import torch

from blockdraft.trainer.feature_cache import FeatureCache


def batch(row_ids: list[int], lengths: list[int]) -> dict[str, torch.Tensor]:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"row_id": torch.tensor(row_ids), "attention_mask": mask}


def of_rows(inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states that tell row and position."""
    rows, length = inputs["attention_mask"].shape
    position = torch.arange(length)[None, :, None].expand(rows, length, 1)
    states = inputs["row_id"][:, None, None] * 10 + position
    return states.to(dtype).repeat(1, 1, 3), -states.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_in_any_batch(tmp_path, dtype):
    cache, computed = FeatureCache(tmp_path / "new"), []

    def compute(inputs):
        computed.append(inputs["row_id"].tolist())
        return of_rows(inputs, dtype)

    cache.states(batch([4, 7], [3, 5]), compute)
    cache.states(batch([9, 7], [2, 5]), compute)  # one row is new: the whole batch is computed
    assert computed == [[4, 7], [9, 7]]
    inputs = batch([7, 9, 4], [5, 2, 3])
    found = cache.states(inputs, compute)
    assert len(computed) == 2
    for tensor, expected in zip(found, of_rows(inputs, dtype), strict=True):
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected * inputs["attention_mask"][..., None])


def test_the_file_has_no_name(tmp_path):
    FeatureCache(tmp_path).states(batch([1], [2]), lambda inputs: of_rows(inputs, torch.float32))
    assert not list(tmp_path.iterdir())
