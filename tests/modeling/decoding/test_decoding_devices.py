"""Targets whose weights accelerate's hooks bring from elsewhere, and what they move from device to device."""

import pytest
import torch
from accelerate import dispatch_model
from accelerate.utils import send_to_device
from decoding_models import ALL_TARGETS, build_draft, build_dspark_draft, build_target, prompts, tiny_v41

from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.deepseek_v41.compressed_attention import CompressedState
from blockdraft.modeling.deepseek_v41.token_plan import TokenPlan
from blockdraft.modeling.kimi_k3.modeling_kimi_k3 import DocumentRows
from blockdraft.modeling.target.target_identity import target_record

GREEDY = {"do_sample": False, "max_new_tokens": 8}


def offload(model, directory):
    """Every module that holds parameters or buffers to the disk; as `from_pretrained(device_map=...)` does it."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # tied ones twice
    names += [name for name, _ in model.named_buffers()]
    holders = {name.rpartition(".")[0]: "disk" for name in names}
    skip = model._skip_keys_device_placement or "cache"
    return dispatch_model(model, holders, main_device="cpu", offload_dir=directory, skip_keys=skip)


@pytest.mark.parametrize("name", ALL_TARGETS)
def test_a_target_on_the_disk_decodes_the_same(name, tmp_path):
    target, input_ids = build_target(name), prompts(1)[0]
    draft = (build_draft if name in ("k3", "gpt2") else build_dspark_draft)(target, target=target_record(target, None))
    expected = target.generate(input_ids, **GREEDY)
    offload(target, tmp_path)
    assert target.device.type == target.get_output_embeddings().weight.device.type == "meta"
    assert torch.equal(target.generate(input_ids, **GREEDY), expected)
    assert torch.equal(block_decode(target, input_ids, draft=draft, **GREEDY), expected)


@pytest.mark.parametrize("build", [build_draft, build_dspark_draft])
def test_a_draft_on_the_disk_decodes_the_same(build, tmp_path):
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    draft = build(target, target=target_record(target, None))
    expected = block_decode(target, input_ids, draft=draft, return_dict_in_generate=True, **GREEDY)
    offload(draft, tmp_path)
    output = block_decode(target, input_ids, draft=draft, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.accepted_lengths == expected.accepted_lengths


@pytest.mark.parametrize("name, kinds", [("k3", ["static", "quantized"]), ("v41", ["static", "offloaded"])])
def test_a_cache_that_cannot_hold_their_layers_is_refused(name, kinds):
    target = build_target(name)
    for kind in kinds:
        with pytest.raises(ValueError, match=f"cache_implementation='{kind}'"):
            target.generate(prompts(1)[0], cache_implementation=kind, **GREEDY)
    assert target.generate(prompts(1)[0], cache_implementation="dynamic", **GREEDY).shape[1] > 0


def test_document_rows_move_whole():
    """What a K3 layer with a recurrence gets for a padded or packed batch."""
    rows = DocumentRows(torch.tensor([[0, 1, 1], [1, 2, 2]]))
    moved = send_to_device(rows, torch.device("meta"))
    assert moved.valid.device.type == moved.source.device.type == "meta" and moved.shape == rows.shape
    assert rows.valid.device.type == "cpu"


def test_a_token_plan_moves_whole_and_once():
    """What a V4.1 layer gets from the layers below; a meta device stands for another accelerator."""
    config, meta = tiny_v41().config, torch.device("meta")
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    plan = TokenPlan(config, 5, 0, mask, torch.device("cpu"), is_cached=True)
    groups = plan.groups(2, 0)
    state = CompressedState(torch.ones(2, 2, 4), torch.ones(2, 2, 3), groups, torch.ones(2, 5, 2) > 0)
    moved_plan, moved = send_to_device((plan, state), meta)
    assert moved_plan is send_to_device(plan, meta) is moved_plan.to("meta") and moved_plan.to("cpu") is plan
    tensors = [moved_plan.valid, moved_plan.first, moved_plan.positions, *moved_plan.rotations.values()]
    tensors += [moved_plan.window(5), moved.keys, moved.index_keys, moved.selected]
    tensors += [moved.plan.ids, moved.plan.columns, moved.plan.visible_groups, moved.plan.allowed]
    assert {tensor.device for tensor in tensors} == {meta}
    assert moved.plan.total == groups.total and moved.candidates is None
    assert moved_plan.window(5).shape == plan.window(5).shape and plan.window(5).device.type == "cpu"
