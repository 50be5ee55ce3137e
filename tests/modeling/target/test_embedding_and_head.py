"""Embedding, final norm and head read on their own are those of the whole target."""

import json

import pytest
import torch
from any_targets import CASES, build
from decoding_models import build_target
from safetensors.torch import load_file, save_file

from blockdraft.modeling.target.embedding_and_head import final_norms, has_layers, load_embedding_and_head
from blockdraft.modeling.target.pairing import compared_weights
from blockdraft.modeling.target.target_identity import target_record


def assert_same_ends(target, expected):
    ids = torch.arange(20)
    states = torch.randn(3, expected.get_output_embeddings().weight.shape[1], dtype=expected.dtype)
    assert torch.equal(target.get_input_embeddings()(ids), expected.get_input_embeddings()(ids))
    assert torch.equal(target.get_output_embeddings()(states), expected.get_output_embeddings()(states))
    (norm,), (expected_norm,) = final_norms(target), final_norms(expected)
    assert torch.equal(norm(states), expected_norm(states))


def assert_is_final_norm(target):
    """What the norm returns is what the head reads."""
    (norm,), seen = final_norms(target), []
    norm.register_forward_hook(lambda module, args, output: seen.append(output))
    target.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        target(torch.arange(2, 10)[None], use_cache=False)
    assert len(seen) == 2 and torch.equal(*seen)


@pytest.mark.parametrize("shard_size", ["20KB", "5GB"])
@pytest.mark.parametrize("name", ["tied", "gemma3", "phi", "gpt2", "cohere", "kimi_linear"])
def test_any_target(tmp_path, name, shard_size):
    """Tied heads, a scale in a buffer, a bias, another prefix; in many files and in one."""
    whole = build(CASES[name])
    whole.save_pretrained(tmp_path, max_shard_size=shard_size)
    target = load_embedding_and_head(str(tmp_path))
    assert_same_ends(target, whole)
    assert has_layers(whole) and not has_layers(target)
    modules = (target.get_input_embeddings(), target.get_output_embeddings(), *final_norms(target))
    ends = [weight for module in modules for weight in module.parameters()]
    in_memory = [weight for weight in target.parameters() if not weight.is_meta]
    assert {id(weight) for weight in in_memory} == {id(weight) for weight in ends}
    assert not any(weight.requires_grad for weight in in_memory)
    assert_is_final_norm(whole)


@pytest.mark.parametrize("name", ["k3", "v41"])
def test_our_targets(tmp_path, name):
    """K3 is saved under its released names."""
    whole = build_target(name)
    whole.save_pretrained(tmp_path)
    target = load_embedding_and_head(str(tmp_path), dtype=torch.bfloat16)
    assert_is_final_norm(whole)
    assert_same_ends(target, whole.bfloat16())


def test_it_is_the_same_target_to_a_record(tmp_path):
    whole = build_target("qwen3")
    whole.save_pretrained(tmp_path)
    record, found = (target_record(target, None) for target in (whole, load_embedding_and_head(str(tmp_path))))
    assert compared_weights(record, found) == ["embedding_sha256"]
    different = {name for name in record if record[name] != found[name]}
    assert different == {"name_or_path", "weights_sha256"} and found["weights_sha256"] is None


def test_other_files_are_not_opened(tmp_path):
    build_target("qwen3").save_pretrained(tmp_path, max_shard_size="20KB")
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {places[f"{name}.weight"] for name in ("model.embed_tokens", "model.norm", "lm_head")}
    others = set(places.values()) - needed
    assert others
    for file in others:
        (tmp_path / file).unlink()
    load_embedding_and_head(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "has no `lm_head.weight`"),
        (
            lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.float8_e4m3fn)}),
            "`lm_head.weight` is torch.float8_e4m3fn .* not quantised",
        ),
    ],
    ids=["missing", "quantised"],
)
def test_what_cannot_be_read_is_refused(tmp_path, change, message):
    build_target("qwen3").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_embedding_and_head(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no safetensors files"):
        load_embedding_and_head(str(tmp_path))
