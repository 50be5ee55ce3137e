"""Counting experts' loads and moving their bias: the sign rule, what is not counted, ranks of layers, logs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from blockdraft.trainer.expert_balance import ExpertBalance

EXPERTS = 4
STEPPED, SKIPPED = SimpleNamespace(step_was_skipped=False), SimpleNamespace(step_was_skipped=True)


class Router(nn.Module):
    """Takes the chosen experts as its input."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS, dtype=dtype))

    def forward(self, experts):
        return torch.zeros(()), torch.zeros(()), experts


def routed(*layers, bias_step=0.5) -> tuple[list[Router], ExpertBalance]:
    """Routers that have chosen these experts once."""
    routers = nn.ModuleList(Router() for _ in layers)
    balance = ExpertBalance(nn.Sequential(routers), bias_step)
    for router, experts in zip(routers, layers, strict=True):
        router(torch.tensor(experts))
    return list(routers), balance


def step(balance, optimizer=STEPPED):
    balance.on_optimizer_step(None, None, None, optimizer=optimizer)


def test_busy_experts_lose_and_idle_ones_gain():
    routers, balance = routed([[0, 1], [0, 1], [0, 2]], [[3, 3], [2, 2], [1, 0]])
    step(balance)
    # Loads 3, 2, 1, 0 and 1, 1, 2, 2 with a mean of 1.5 each.
    assert routers[0].e_score_correction_bias.tolist() == [-0.5, -0.5, 0.5, 0.5]
    assert routers[1].e_score_correction_bias.tolist() == [0.5, 0.5, -0.5, -0.5]
    step(balance)  # nothing was routed since
    assert routers[0].e_score_correction_bias.tolist() == [-0.5, -0.5, 0.5, 0.5]


def test_micro_batches_make_one_load():
    (router,), balance = routed([[0, 1]])
    for _ in range(3):
        router(torch.tensor([[2, 3]]))
    step(balance)
    assert router.e_score_correction_bias.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_tokens_can_be_left_out():
    (router,), balance = routed([[0, 1]])
    step(balance, SKIPPED)
    balance.counted_tokens = torch.tensor([[True, False, True]])
    router(torch.tensor([[0, 1], [2, 3], [0, 2]]))
    step(balance)
    assert balance.metrics()["busiest_expert"] == 2  # loads 2, 1, 1, 0
    assert router.e_score_correction_bias.tolist() == [-0.5, 0, 0, 0.5]


def test_evaluation_and_skipped_steps_change_nothing():
    (router,), balance = routed([[0, 1]])
    step(balance, SKIPPED)
    router.eval()
    router(torch.tensor([[0, 1]]))
    step(balance)
    assert not router.e_score_correction_bias.any() and balance.metrics() == {}


def test_a_step_of_zero_only_counts():
    (router,), balance = routed([[0, 0]], bias_step=0.0)
    step(balance)
    assert not router.e_score_correction_bias.any()
    assert balance.metrics()["busiest_expert"] == EXPERTS


def test_metrics_are_those_since_the_last_log():
    _, balance = routed([[0, 1], [0, 1], [0, 2]], [[0, 1], [2, 3]])
    step(balance)
    metrics = balance.metrics()
    # In multiples of an even load: 2, 4/3, 2/3, 0 and four times 1.
    assert metrics == {
        "busiest_expert": 2,
        "least_used_expert": 0,
        "experts_below_0.5": pytest.approx(1 / 8),
        "experts_0.5_to_1.0": pytest.approx(5 / 8),
        "experts_1.0_to_2.0": pytest.approx(2 / 8),
        "experts_above_2.0": 0,
    }
    assert balance.metrics() == {}


def test_a_collapsed_router_recovers():
    """Scores that prefer one expert for every token: the bias spreads them."""
    torch.manual_seed(0)
    scores = torch.rand(200, EXPERTS) + torch.tensor([1.0, 0, 0, 0])

    class Scored(Router):
        def forward(self, scores):
            return scores, scores, (scores + self.e_score_correction_bias).topk(1, dim=-1).indices

    router = Scored()
    balance = ExpertBalance(router, 0.05)
    for _ in range(60):
        router(scores)
        step(balance)
    balance.metrics()
    router(scores)
    step(balance)
    metrics = balance.metrics()
    assert metrics["busiest_expert"] < 1.5 and metrics["least_used_expert"] > 0.5


def test_a_model_without_routers_is_left_alone():
    balance = ExpertBalance(nn.Linear(2, 2))
    step(balance)
    assert not balance.routers and balance.metrics() == {}


def test_a_bias_in_half_precision_is_refused():
    with pytest.raises(ValueError, match="keep it in float32"):
        ExpertBalance(Router(torch.bfloat16))
