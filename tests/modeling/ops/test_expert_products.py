"""Float64, which grouped products do not take, goes expert by expert."""

import pytest
import torch
from deepseek_v41_dspark_models import dspark_inputs, tiny_dspark
from deepseek_v41_models import NO_ENGRAM, tiny_config
from kimi_k3_models import tiny_k3

from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM

IDS = torch.arange(3, 11)[None]
MODELS = {
    "dspark draft": (tiny_dspark, lambda draft: dspark_inputs(draft) | {"previous_token_ids": IDS[:, :4]}),
    "v41 target": (lambda: DeepseekV41ForCausalLM(tiny_config(**NO_ENGRAM)), lambda target: {"input_ids": IDS}),
    "k3 target": (tiny_k3, lambda target: {"input_ids": IDS}),
}


@pytest.mark.parametrize("name", MODELS)
def test_float64_with_the_default_experts(name):
    make, make_inputs = MODELS[name]
    model = make().double()
    assert model.config._experts_implementation == "grouped_mm"
    inputs = make_inputs(model)
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    results = []
    for implementation in ("grouped_mm", "eager"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        output = model(**inputs)
        output = output["last_hidden_state"] if "last_hidden_state" in output else output.logits
        output.sum().backward()
        results.append([output, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) > 10 and all(map(torch.equal, *results))
