"""Parts that stay fp32."""

import torch

from blockdraft.modeling.ops.fp32 import Fp32Linear


def test_gradients_of_fp32_parameters_stay_fp32():
    """One in half precision is no gradient of an fp32 parameter: the next backward, and any optimizer, fails."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), Fp32Linear(3, 2))
    model(torch.ones(1, 3)).sum().backward()
    gradient = model[1].weight.grad.clone()
    for cast in (torch.nn.Module.bfloat16, torch.nn.Module.half, lambda module: module.to(torch.bfloat16)):
        cast(model)
        assert model[0].weight.grad.dtype == model[0].weight.dtype != torch.float32
        assert model[1].weight.dtype == model[1].weight.grad.dtype == torch.float32
        assert torch.equal(model[1].weight.grad, gradient)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    torch.optim.AdamW(model.parameters()).step()
    assert model.to("meta")[1].weight.grad.device.type == "meta"
