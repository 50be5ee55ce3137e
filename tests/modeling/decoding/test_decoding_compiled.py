"""Targets that torch.compile was told to compile, whole or in part, before they are decoded."""

import pytest
import torch
from decoding_models import build_draft, build_target, prompts

from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.decoding.plain_decoding import plain_decode
from blockdraft.modeling.target.target_transforms import run_target
from blockdraft.trainer.target_states import TargetStates

GREEDY = {"do_sample": False, "max_new_tokens": 8}


def whole(target):
    target.compile(backend=fail)
    return target


def wrapped(target):
    return torch.compile(target, backend=fail)


def its_forward(target):
    target.forward = torch.compile(target.forward, backend=fail)
    return target


def its_layers(target):
    for layer in target.model.layers:
        layer.compile(backend=fail)
    return target


def a_layer_wrapped(target):
    target.model.layers[1] = torch.compile(target.model.layers[1], backend=fail)
    return target


def fail(graph, inputs):
    """Hooks of one call, compiled in, would never be called in the next."""
    raise AssertionError("compiled with hooks")


@pytest.mark.parametrize("compiled", [whole, wrapped, its_forward, its_layers, a_layer_wrapped])
def test_a_compiled_target_decodes_the_same(compiled):
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    draft, expected, seen = build_draft(target), target.generate(input_ids, **GREEDY), run_target(target, 64)
    target = compiled(target)
    for _ in range(2):
        assert torch.equal(block_decode(target, input_ids, draft=draft, **GREEDY), expected)
    assert torch.equal(target.generate(input_ids, custom_generate=block_decode, draft=draft, **GREEDY), expected)
    assert all(torch.equal(tensor, seen[name]) for name, tensor in run_target(target, 64).items())
    states = TargetStates(target, draft.config, torch.device("cpu"))
    features, head_input = states.read({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}, True)
    assert features.shape == (1, 9, 64) and head_input.shape == (1, 9, 32)


def test_a_wrapped_target_decodes_without_a_draft():
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    expected = target.generate(input_ids, **GREEDY)
    assert torch.equal(plain_decode(wrapped(target), input_ids, **GREEDY), expected)
