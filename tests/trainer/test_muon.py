"""Muon and another optimizer as one: who gets what, the same steps as each alone, schedulers, resuming."""

import copy

import pytest
import torch
from decoding_models import build_draft, build_dspark_draft, build_target
from draft_trainers import make_trainer
from torch import nn

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
