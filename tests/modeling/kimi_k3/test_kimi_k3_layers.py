import pytest
import torch
from kimi_k3_models import check_gradients, relative_error

from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig
from blockdraft.modeling.kimi_k3.kimi_k3_layers import KimiK3MLP, KimiK3RMSNorm

TOLERANCE = 1e-5


def test_rmsnorm(golden):
    golden = golden("k3_rmsnorm")
    norm = KimiK3RMSNorm(golden.meta["options"]["dim"], golden.meta["options"]["eps"])
    norm.load_state_dict(golden.group("param"))
    x = golden["in.x"].requires_grad_()
    output = norm(x)
    assert relative_error(output, golden["out.float32"]) < TOLERANCE
    (output * golden["in.cotangent"]).sum().backward()
    assert relative_error(x.grad, golden["grad.x"]) < TOLERANCE
    assert relative_error(norm.weight.grad, golden["grad.weight"]) < TOLERANCE
    # The product with the weight comes after the cast: in bf16 every bit shows it.
    assert torch.equal(norm.bfloat16()(x.detach().bfloat16()), golden["out.bfloat16"])


@pytest.mark.parametrize(
    "variant, settings",
    [
        ("both", {}),
        ("no_linear_beta", {"activation_situ_linear_beta": None}),
        ("no_beta", {"activation_situ_beta": None, "activation_situ_linear_beta": None}),
    ],
)
def test_situ_mlp(golden, variant, settings):
    golden = golden("k3_situ_mlp")
    mlp = KimiK3MLP(KimiK3TextConfig(**(golden.meta["config"] | settings)))
    mlp.load_state_dict(golden.group("param"))
    output = mlp(golden["in.x"])
    assert relative_error(output, golden[f"out.{variant}"]) < TOLERANCE
    if variant == "both":
        check_gradients(mlp, golden, output, TOLERANCE)
