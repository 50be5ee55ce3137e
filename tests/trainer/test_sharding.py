"""What a draft needs to be sharded; with two processes it is tried in `test_two_ranks.py`."""

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from decoding_models import build_draft, build_dspark_draft, build_target
from draft_trainers import make_trainer
from transformers.training_args import ParallelMode

from blockdraft.trainer.sharding import (
    check_fsdp,
    check_placement,
    check_whole,
    keep_precision,
    whole_copy,
    without_weights,
)


def plugin(**settings) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(**({"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"} | settings))


def test_ways_of_fsdp_that_no_draft_can_take():
    check_fsdp(plugin())
    with pytest.raises(ValueError, match="`fsdp_version` is 1.*`fsdp_version: 2`"):
        check_fsdp(plugin(fsdp_version=1))
    with pytest.raises(ValueError, match="`fsdp_state_dict_type` is SHARDED_STATE_DICT.*FULL_STATE_DICT"):
        check_fsdp(plugin(state_dict_type="SHARDED_STATE_DICT"))


def test_gradients_are_summed_in_fp32_whatever_is_gathered():
    in_bf16, in_fp32 = plugin(mixed_precision_policy="bf16"), plugin()
    for one in (in_bf16, in_fp32):
        keep_precision(one)
    policy = in_bf16.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    assert not policy.cast_forward_inputs and in_fp32.mixed_precision_policy is None


@pytest.mark.parametrize("build", [build_draft, build_dspark_draft])
def test_a_whole_copy_is_the_draft_in_another_dtype(build):
    draft = build(build_target("k3"), block_size=4)
    empty = without_weights(draft).to(torch.bfloat16)
    assert all(weight.device.type == "meta" for weight in empty.parameters())
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 1  # trained on meanwhile
    copy, state = whole_copy(empty, draft), draft.state_dict()
    served = build(build_target("k3"), block_size=4).to(torch.bfloat16)
    assert {name: tensor.dtype for name, tensor in copy.state_dict().items()} == {
        name: tensor.dtype for name, tensor in served.state_dict().items()
    }
    assert all(torch.equal(tensor, state[name].to(tensor.dtype)) for name, tensor in copy.state_dict().items())
    assert not any(weight.requires_grad for weight in copy.parameters())


def test_fsdp_on_cpus_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("draft_trainers.shard_on_cpus", lambda args: None)
    monkeypatch.setattr("transformers.training_args.TrainingArguments.parallel_mode", ParallelMode.DISTRIBUTED)
    with pytest.raises(ValueError, match="`fsdp`.*not on cpu"):
        make_trainer(tmp_path, fsdp=True)


def test_a_target_that_processes_cannot_run_apart_is_refused(monkeypatch):
    target = build_target("qwen3")
    check_placement(target, ranks=8, ranks_here=8)
    target.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    check_placement(target, ranks=2, ranks_here=1)  # a process a machine
    with pytest.raises(ValueError, match="`device_map` has put the target on 0, 1, where the other 7 processes"):
        check_placement(target, ranks=8, ranks_here=8)
    del target.hf_device_map
    monkeypatch.setattr(type(target), "is_distributed_loading_by_transformers", True)
    check_placement(target, ranks=1, ranks_here=1)
    with pytest.raises(ValueError, match="`tp_plan`.*the 2 processes.*`blockdraft cache-features`"):
        check_placement(target, ranks=2, ranks_here=1)


def test_what_zero3_shared_out_in_loading_is_refused():
    target, draft = build_target("qwen3"), build_draft(build_target("qwen3"), block_size=4)
    check_whole(target=target, draft=draft)
    next(draft.parameters()).ds_id = 0
    with pytest.raises(ValueError, match=r"draft's weights were shared out by ZeRO-3.*loading\.load_draft`"):
        check_whole(target=target, draft=draft)
