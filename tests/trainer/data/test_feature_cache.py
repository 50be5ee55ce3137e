"""Features that come back from disk are those that were computed."""

import os

import pytest
import torch
from datasets import concatenate_datasets
from draft_trainers import make_rows, make_trainer
from dspark_trainers import dspark_trainer

from blockdraft.trainer.data.feature_cache import FeatureCache


def batch(rows: list[list[int]], documents: list[list[int]] | None = None) -> dict[str, torch.Tensor]:
    """Rows of token ids, all under one row id."""

    def pad(values: list[list[int]]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in values], batch_first=True)

    inputs = {
        "input_ids": pad(rows),
        "attention_mask": pad([[1] * len(row) for row in rows]),
        "row_id": torch.zeros(len(rows), dtype=torch.long),
    }
    return inputs if documents is None else inputs | {"document_ids": pad(documents)}


def of_rows(inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states that tell tokens and position."""
    states = inputs["input_ids"].cumsum(-1)[..., None].to(dtype)
    return states.repeat(1, 1, 3), -states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_back_in_any_batch(tmp_path, dtype):
    cache, computed = FeatureCache(tmp_path / "new"), []

    def compute(inputs):
        computed.append(inputs["input_ids"].tolist())
        return of_rows(inputs, dtype)

    four, seven, nine = [4] * 3, [7, 8, 9, 8, 7], [9, 1]
    cache.states(batch([four, seven]), compute)
    cache.states(batch([nine, seven]), compute)  # one row is new: the whole batch is computed
    assert len(computed) == 2
    inputs = batch([seven, nine, four])
    found = cache.states(inputs, compute)
    assert len(computed) == 2
    for tensor, expected in zip(found, of_rows(inputs, dtype), strict=True):
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected * inputs["attention_mask"][..., None])


@pytest.mark.parametrize(
    "other",
    [batch([[5, 6, 8]], [[1, 1, 2]]), batch([[5, 6]], [[1, 1]]), batch([[5, 6, 7]], [[1, 2, 2]]), batch([[5, 6, 7]])],
    ids=["tokens", "length", "documents", "no documents"],
)
def test_rows_under_one_id_do_not_meet(tmp_path, other):
    """Data sets that were joined number their rows from 0 each."""
    cache, computed = FeatureCache(tmp_path), []

    def compute(inputs):
        computed.append(inputs)
        return of_rows(inputs, torch.float32)

    for inputs in (batch([[5, 6, 7]], [[1, 1, 2]]), other):
        assert torch.equal(cache.states(inputs, compute)[0], of_rows(inputs, torch.float32)[0])
    assert computed[1] is other


@pytest.mark.parametrize("make", [make_trainer, dspark_trainer])
def test_later_epochs_train_as_without_it(tmp_path, make):
    """Two joined data sets with the same row ids, twice through: only the first epoch runs the target."""
    rows = concatenate_datasets([make_rows(4), make_rows(4, seed=1)])
    losses, forwards = [], []
    for cache_features in (False, True):
        trainer = make(tmp_path, rows, max_steps=8, learning_rate=1e-3, cache_features=cache_features)
        ran = []
        trainer.target.get_input_embeddings().register_forward_hook(lambda *_, ran=ran: ran.append(1))
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        forwards.append(len(ran))
    assert len(losses[0]) == 8 and losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert forwards[0] - forwards[1] == 4


def test_any_system_has_what_it_calls(tmp_path, monkeypatch):
    for name in ("pread", "preadv", "pwrite", "pwritev"):  # not on Windows
        monkeypatch.delattr(os, name, raising=False)
    cache, inputs = FeatureCache(tmp_path), batch([[1, 2], [3, 4, 5]])
    cache.states(inputs, lambda inputs: of_rows(inputs, torch.float32))
    found = cache.states(inputs, lambda inputs: pytest.fail("computed again"))
    assert torch.equal(found[0], of_rows(inputs, torch.float32)[0] * inputs["attention_mask"][..., None])


def test_the_file_has_no_name(tmp_path):
    FeatureCache(tmp_path).states(batch([[1, 2]]), lambda inputs: of_rows(inputs, torch.float32))
    assert not list(tmp_path.iterdir())
