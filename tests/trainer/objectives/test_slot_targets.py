"""Which slots count, and how much."""

import math

import pytest
import torch

from blockdraft.trainer.objectives.slot_targets import slot_targets, slot_weights, supervised_slots


def test_weights_decay_from_the_first_predicted_slot():
    mask = torch.ones(1, 1, 5)
    decay = [math.exp(-k / 4) for k in range(5)]
    assert slot_weights(mask, 1, 4.0).flatten().tolist() == pytest.approx([0, *decay[:4]])
    assert slot_weights(mask, torch.tensor([[3]]), 4.0).flatten().tolist() == pytest.approx([0, 0, 0, *decay[:2]])
    assert slot_weights(mask, 0, 4.0).flatten().tolist() == pytest.approx(decay)
    assert torch.equal(slot_weights(mask), supervised_slots(mask))
    with pytest.raises(ValueError, match="loss_decay_gamma"):
        slot_weights(mask, 1, 0.0)


def test_the_supervised_slots_are_listed_once_for_all():
    mask = torch.tensor([[[1.0, 1, 0, 1], [0, 0, 0, 0]], [[1, 1, 1, 1], [1, 1, 0, 0]]])
    ids = torch.arange(16).view(2, 2, 4)
    targets = slot_targets(ids, mask, torch.tensor([[1, 1], [3, 1]]), 4.0)
    assert targets.token_ids.flatten()[targets.index].tolist() == [1, 3, 11, 13]
    assert torch.equal(targets.supervised.flatten().nonzero().flatten(), targets.index)
    assert torch.equal(targets.weights, slot_weights(mask, torch.tensor([[1, 1], [3, 1]]), 4.0))
    assert all(torch.equal(a, b) for a, b in zip(targets.to(torch.device("cpu")), targets, strict=True))
