"""Confidence schedules: how many of a round's drafted tokens are worth verifying."""

import math

import pytest
import torch

from blockdraft.modeling.decoding.confidence_schedule import ConfidenceThreshold, survivals
from blockdraft.modeling.decoding.cost_table import CostTable

LINEAR = {"tokens": [1, 2, 3, 4, 5, 6], "seconds": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]}


def test_survival_is_the_running_product():
    assert survivals([0.5, 0.5, 1.0, 0.0]) == [0.5, 0.25, 0.25, 0.0]
    assert survivals([]) == []


def test_a_later_candidate_never_changes_what_is_decided_before_it():
    torch.manual_seed(0)
    schedules = [ConfidenceThreshold(0.3), CostTable(**LINEAR), CostTable([1, 2, 4], [1.0, 1.2, 1.9])]
    for confidences in torch.rand(200, 5).sqrt().tolist():
        for schedule in schedules:
            length = schedule(confidences)
            for changed in (0.0, 0.5, 1.0):
                # The one that stopped the walk is the last that it saw.
                assert schedule(confidences[: length + 1] + [changed] * (4 - length)) == length


@pytest.mark.parametrize("threshold, length", [(0.0, 4), (0.2, 3), (0.4, 2), (0.41, 1), (0.81, 0), (1.0, 0)])
def test_threshold(threshold, length):
    assert ConfidenceThreshold(threshold)([0.8, 0.5, 0.5, 0.1]) == length


@pytest.mark.parametrize("threshold", [-0.1, 1.1, math.nan])
def test_impossible_thresholds_are_refused(threshold):
    with pytest.raises(ValueError, match="`threshold`"):
        ConfidenceThreshold(threshold)
