"""Confidence schedules: how many of a round's drafted tokens are worth verifying."""

import math

import pytest
import torch

from blockdraft.modeling.decoding.confidence_schedule import (
    ConfidenceThreshold,
    admit,
    asynchronous_lengths,
    first_peak,
    rank_candidates,
    survivals,
    synchronous_lengths,
    throughputs,
)
from blockdraft.modeling.decoding.cost_table import CostTable

LINEAR = {"tokens": [1, 2, 3, 4, 5, 6], "seconds": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]}


def test_survival_is_the_running_product():
    assert survivals([0.5, 0.5, 1.0, 0.0]) == [0.5, 0.25, 0.25, 0.0]
    assert survivals([]) == []


def test_candidates_are_ranked_across_requests():
    rows = [[0.9, 0.5, 0.5], [0.95, 0.9, 1e-7], []]
    # Equal survivals: the smaller slot first, then the smaller request. The hopeless one is left out.
    assert rank_candidates(rows) == [(1, 0), (0, 0), (1, 1), (0, 1), (0, 2)]
    assert admit(rows, 0) == [0, 0, 0]
    assert admit(rows, 3) == [1, 2, 0]
    assert admit(rows, 99) == [3, 2, 0]


def test_throughput_by_hand():
    values = throughputs([[0.5, 0.25], [0.75]], lambda tokens: float(tokens))
    assert values == [2 / 2, 2.75 / 3, 3.25 / 4, 3.5 / 5]
    assert throughputs([[]], lambda tokens: 0.5) == [2.0]


def test_first_peak_stops_at_the_first_rise_that_fails():
    assert first_peak([1, 2, 2, 9]) == 1
    assert first_peak([2, 1, 9]) == 0
    assert first_peak([1, 2, 3]) == 2
    assert first_peak([1]) == 0


def test_synchronous_walk_and_asynchronous_search_differ_at_a_step_of_the_cost():
    def stairs(tokens: int) -> float:
        return 1.0 if tokens == 1 else 2.0

    rows = [[0.9, 0.8, 0.7]]
    assert synchronous_lengths(rows, stairs) == [0]  # 1.9 tokens in 2 s are fewer a second than 1 in 1 s
    assert asynchronous_lengths(rows, rows, stairs) == [3]  # 3.4 in 2 s are more
    # This round's survivals share a number that earlier ones set.
    assert asynchronous_lengths([[0.1, 0.1], [0.9, 0.8]], [[1.0, 0.5], [0.01, 0.0]], lambda n: n**0.5) == [0, 2]


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
