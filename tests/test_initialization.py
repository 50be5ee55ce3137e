"""A new draft starts fitted to its target: even channels, no overconfidence, the same however rows are batched."""

import math

import pytest
import torch
from test_draft_trainer import make_trainer
from torch import nn

from blockdraft.trainer.initialization import EXCESS_LOSS, calm_output, channel_rms, even_out_channels


def test_channels_count_alike_after_scaling():
    torch.manual_seed(0)
    scales = torch.logspace(-2, 2, 8)
    features, projection = torch.randn(4096, 8) * scales, nn.Linear(8, 64, bias=False)
    size = projection.weight.norm().item()
    rms = channel_rms(features.split(1000))
    assert torch.allclose(rms, scales, rtol=0.1)
    even_out_channels(projection, rms)
    shares = (features * projection.weight[:, None]).square().sum((0, 1))
    assert shares.max() / shares.min() < 2  # 1e8 before
    assert projection.weight.norm().item() == pytest.approx(size)


def test_a_silent_channel_keeps_its_weights():
    projection = nn.Linear(2, 3, bias=False)
    before = projection.weight.detach().clone()
    even_out_channels(projection, torch.tensor([0.0, 1.0]))
    assert torch.allclose(projection.weight, before)


def test_broken_features_are_an_error_and_none_are_not():
    with pytest.raises(ValueError, match="not finite"):
        channel_rms([torch.full((2, 4), torch.inf)])
    assert torch.equal(channel_rms([torch.zeros(0, 4)]), torch.zeros(4))


def test_an_overconfident_head_is_calmed():
    torch.manual_seed(0)
    norm, head = nn.RMSNorm(16), nn.Linear(16, 512, bias=False)
    nn.init.normal_(head.weight, std=8)
    states, labels = torch.randn(64, 16), torch.randint(512, (64,))

    def loss() -> float:
        with torch.no_grad():
            return nn.functional.cross_entropy(head(norm(states)), labels).item()

    limit = math.log(512) + EXCESS_LOSS
    assert loss() > 2 * limit
    scale = calm_output(norm, loss, 512)
    assert loss() <= limit
    assert torch.allclose(norm.weight, torch.full((16,), scale)) and scale < 0.5
    assert calm_output(norm, loss, 512) == 1.0  # nothing left to do


def test_training_starts_the_same_in_any_batch_size_and_only_new_drafts(tmp_path):
    starts = []
    for size in (1, 4):
        trainer = make_trainer(tmp_path, target_name="qwen3", per_device_train_batch_size=size)
        plain = trainer.draft.fc.weight.detach().clone()
        trainer.fit_to_target()
        starts.append((trainer.draft.fc.weight.detach(), trainer.draft.norm.weight.detach()))
        assert not torch.allclose(starts[-1][0], plain)
    for a, b in zip(*starts, strict=True):
        assert torch.allclose(a, b, rtol=1e-5)

    for case in ("off", "recorded", "weights of another trainer"):
        settings = {"fit_to_target": case != "off", "max_steps": 1, "learning_rate": 0.0}
        trainer = make_trainer(tmp_path, target_name="qwen3", **settings)
        if case == "recorded":
            trainer.draft_config.training = {"global_step": 1}
        elif case == "weights of another trainer":
            torch.nn.init.normal_(trainer.draft.norm.weight, mean=1.0, std=0.1)
        before = trainer.draft.fc.weight.detach().clone()
        trainer.train()
        assert torch.equal(trainer.draft.fc.weight, before)
