import copy

import pytest
import torch
from kimi_k3_models import check_gradients, golden_parameters, relative_error

from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig
from blockdraft.modeling.kimi_k3.mla_attention import KimiK3MLAttention

TOLERANCE = 1e-5


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_mla(golden, implementation):
    golden = golden("k3_mla")
    config = KimiK3TextConfig(**golden.meta["config"])
    config._attn_implementation = implementation
    attention = KimiK3MLAttention(config, layer_idx=0)
    attention.load_state_dict(golden_parameters(golden.group("param")))
    hidden_states = golden["in.hidden_states"]
    length = hidden_states.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()[None, None]

    output, weights = attention(hidden_states, causal)
    assert relative_error(output, golden["out.y"]) < TOLERANCE
    assert (weights is None) == (implementation == "sdpa")
    check_gradients(attention, golden, output, TOLERANCE)

    valid = golden["in.attention_mask"].bool()
    visible = causal & valid[:, None, None]
    padded, _ = attention(hidden_states, visible)
    assert relative_error(padded[valid], golden["out.y_padded"][valid]) < TOLERANCE
    assert torch.equal(visible[valid[:, None]], golden["out.padded_mask_visible"].bool()[valid[:, None]])


def test_mla_takes_additive_masks_in_eager_too(golden):
    golden = golden("k3_mla")
    config = KimiK3TextConfig(**golden.meta["config"])
    config._attn_implementation = "eager"
    attention = KimiK3MLAttention(config, layer_idx=0)
    length = golden["in.hidden_states"].shape[1]
    visible = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
    additive = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    expected, _ = attention(golden["in.hidden_states"], visible)
    assert torch.equal(attention(golden["in.hidden_states"], additive)[0], expected)


def test_inner_norms_ignore_rms_norm_eps(golden):
    config = KimiK3TextConfig(**golden("k3_mla").meta["config"])
    other = copy.deepcopy(config)
    other.rms_norm_eps = 0.5
    for norm in ("q_a_layernorm", "kv_a_layernorm"):
        assert getattr(KimiK3MLAttention(other, 0), norm).eps == 1e-6 != config.rms_norm_eps


def test_mla_without_query_compression_and_gate(golden):
    config = KimiK3TextConfig(
        **(golden("k3_mla").meta["config"] | {"q_lora_rank": None, "mla_use_output_gate": False})
    )
    names = {name.split(".")[0] for name, _ in KimiK3MLAttention(config, 0).named_parameters()}
    assert names == {"q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
