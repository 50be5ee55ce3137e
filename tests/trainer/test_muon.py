"""Muon and another optimizer as one: who gets what, the same steps as each alone, and what uses them: schedulers,
accelerate, checkpoints."""

import copy
import pickle

import pytest
import torch
from accelerate import Accelerator
from decoding_models import build_draft, build_dspark_draft, build_target
from draft_trainers import make_trainer
from torch import nn
from transformers import SchedulerType, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from blockdraft.trainer.muon import MuonAndOther, hidden_matrices


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3, bias=False))


def backward(net: nn.Module, seed: int) -> None:
    net.zero_grad()
    net(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))).square().sum().backward()


def both(net: nn.Sequential) -> MuonAndOther:
    return MuonAndOther(torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1), [net[0].weight, net[2].weight])


def test_each_parameter_takes_its_optimizers_step():
    net = model()
    alone = copy.deepcopy(net)
    matrices = [alone[0].weight, alone[2].weight]
    rest = [alone[0].bias, alone[1].weight, alone[1].bias]
    parts = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1),
    ]
    optimizer = both(net)
    schedules = [torch.optim.lr_scheduler.LambdaLR(part, lambda step: 0.5**step) for part in (optimizer, *parts)]
    for step in range(3):
        backward(net, step)
        backward(alone, step)
        for part in (optimizer, *parts):
            part.step()
        for schedule in schedules:
            schedule.step()
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_going_on_from_a_saved_state_is_exact(tmp_path):
    whole, half = model(), model()
    optimizer, first = both(whole), both(half)
    for step in range(4):
        backward(whole, step)
        optimizer.step()
    for step in range(2):
        backward(half, step)
        first.step()
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second = both(half)
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    for step in range(2, 4):
        backward(half, step)
        second.step()
    for ours, theirs in zip(whole.parameters(), half.parameters(), strict=True):
        assert torch.equal(ours, theirs)


SCHEDULER_SETTINGS = {
    SchedulerType.COSINE_WITH_MIN_LR: {"min_lr": 1e-3},
    SchedulerType.COSINE_WARMUP_WITH_MIN_LR: {"min_lr": 1e-3},
    SchedulerType.WARMUP_STABLE_DECAY: {"num_decay_steps": 3},
    SchedulerType.REDUCE_ON_PLATEAU: {"patience": 1},
    SchedulerType.GREEDY: {"patience": 1},
}
WITH_METRICS = (SchedulerType.REDUCE_ON_PLATEAU, SchedulerType.GREEDY)


@pytest.mark.parametrize("name", TYPE_TO_SCHEDULER_FUNCTION)
def test_every_scheduler_of_transformers_sets_both_learning_rates(name):
    """As it sets AdamW's."""
    net, alone = model(), model()
    optimizers = [both(net), torch.optim.AdamW(alone.parameters(), lr=0.01)]
    settings = (2, 8, SCHEDULER_SETTINGS.get(name))
    schedulers = [get_scheduler(name, optimizer, *settings) for optimizer in optimizers]
    seen = []
    for step in range(8):
        for network, optimizer, scheduler in zip((net, alone), optimizers, schedulers, strict=True):
            backward(network, step)
            optimizer.step()
            scheduler.step(*([1.0] if name in WITH_METRICS else []))
        ours, theirs = ([group["lr"] for group in optimizer.param_groups] for optimizer in optimizers)
        assert ours == theirs * 2
        seen += theirs
    assert len(set(seen)) > 1 or name == SchedulerType.CONSTANT


@pytest.mark.parametrize("name", [SchedulerType.POLYNOMIAL, *WITH_METRICS])
def test_training_with_a_scheduler_that_asks_for_more(name, tmp_path):
    """For the optimizer's defaults, or for the loss of an evaluation."""
    evaluated = {"eval_strategy": "steps", "eval_steps": 1} if name in WITH_METRICS else {}
    trainer = make_trainer(tmp_path, optim="adamw_torch", lr_scheduler_type=name, **evaluated)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, MuonAndOther) and trainer.state.global_step == 2


def test_a_copy_takes_the_same_steps():
    """Made by `copy`, or pickled, after steps under accelerate."""
    net = model()
    accelerator, optimizer = Accelerator(cpu=True, gradient_accumulation_steps=2), both(net)
    before = net[0].weight.clone()
    for step in range(2):
        with accelerator.accumulate(net):
            backward(net, step)
            accelerator.prepare(optimizer).step()
        assert torch.equal(before, net[0].weight) == (step == 0)
    copies = [copy.deepcopy((net, optimizer)), pickle.loads(pickle.dumps((net, optimizer)))]
    for network, copied in ((net, optimizer), *copies):
        backward(network, 2)
        copied.step()
    for network, _ in copies:
        for ours, theirs in zip(net.parameters(), network.parameters(), strict=True):
            assert torch.equal(ours, theirs)


def test_a_closure_is_called_once_and_its_loss_returned():
    net, other, calls = model(), model(), []

    def closure() -> float:
        backward(other, 0)
        calls.append(torch.is_grad_enabled())
        return 3.0

    backward(net, 0)
    assert both(net).step() is None
    assert both(other).step(closure) == 3.0 and calls == [True]
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_added_group_is_the_others():
    net = model()
    optimizer, added = both(net), nn.Parameter(torch.ones(4, 3))
    optimizer.add_param_group({"params": [added], "lr": 0.5})
    backward(net, 0)
    added.grad = torch.ones_like(added)
    optimizer.step()
    assert torch.allclose(
        added, torch.full_like(added, 1 - 0.5 * 0.1 - 0.5), atol=1e-6
    )  # AdamW's decay and first step
    assert set(optimizer.state[added]) == {"step", "exp_avg", "exp_avg_sq"}


def test_without_a_matrix_to_train_there_is_no_muon(tmp_path):
    trainer = make_trainer(tmp_path, optim="adamw_torch")
    for matrix in hidden_matrices(trainer.draft):
        matrix.requires_grad_(False)
    assert type(trainer.create_optimizer()) is torch.optim.AdamW


@pytest.mark.parametrize("build", [build_draft, build_dspark_draft])
def test_matrices_of_a_draft(build):
    draft = build(build_target("k3"), block_size=4)
    names = {id(parameter): name for name, parameter in draft.named_parameters()}
    matrices = hidden_matrices(draft)
    assert {matrix.dim() for matrix in matrices} == {2}
    found = {names[id(matrix)] for matrix in matrices}
    projection = draft.fc if build is build_draft else draft.mtp[0].main_proj
    assert projection.weight in set(matrices)
    assert not [name for name in found if "markov_head" in name or "confidence_head" in name or "gate.weight" in name]


def test_training_takes_muon_unless_told_otherwise(tmp_path):
    trainer = make_trainer(tmp_path, optim="adamw_torch", learning_rate=1e-3)
    trainer.train()
    parts = trainer.optimizer.optimizer
    assert isinstance(parts, MuonAndOther)
    counted = sum(len(group["params"]) for group in parts.param_groups)
    assert counted == len(list(trainer.draft.parameters()))
    trainer = make_trainer(tmp_path, optim="adamw_torch", muon=False)
    trainer.train()
    assert type(trainer.optimizer.optimizer) is torch.optim.AdamW
