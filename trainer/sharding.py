"""A draft whose weights FSDP2 or DeepSpeed ZeRO-3 share out over the ranks: what is sharded apart, and the whole."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.integrations import deepspeed


def check_fsdp(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raises a `ValueError` for a way of FSDP in which a draft cannot be trained or would not be saved."""
    if plugin.fsdp_version != 2:
        raise ValueError(
            "`fsdp_version` is 1, which flattens weights, so that neither Muon nor fp32 parts can have their own: "
            'set `fsdp_version: 2` in the configuration of accelerate, or leave out "version" of `fsdp_config`.'
        )
    if plugin.state_dict_type != StateDictType.FULL_STATE_DICT:
        raise ValueError(
            f"`fsdp_state_dict_type` is {plugin.state_dict_type.name}, with which no draft is saved that can be "
            "loaded: set FULL_STATE_DICT. A draft is small beside its target."
        )


def check_whole(**models: nn.Module) -> None:
    """Raises a `ValueError` for a model that transformers has shared out by ZeRO-3 while it was loaded: outside of an
    engine nothing brings its weights back."""
    for name, model in models.items():
        if any(hasattr(weight, "ds_id") for weight in model.parameters()):
            raise ValueError(
                f"The {name}'s weights were shared out by ZeRO-3 as they were loaded. Load it before the training "
                "arguments are made, which switch that on for whatever is loaded after them, or with "
                f"`blockdraft.trainer.loading.load_{name}`."
            )


def check_placement(target: PreTrainedModel, ranks: int, ranks_here: int) -> None:
    """
    Raises a `ValueError` for a target that several processes cannot run on rows of their own.

    Args:
        target: where it was put when it was loaded.
        ranks, ranks_here: processes of the training, and how many of them are on this machine.
    """
    ways_out = (
        "Give each process the whole target, one process with `device_map` all GPUs of its machine, or train on "
        "features from disk (`blockdraft cache-features`)."
    )
    if ranks > 1 and target.is_distributed_loading_by_transformers:
        raise ValueError(
            f"The target is shared out over ranks (`distributed_config`, `tp_plan`), which then have to run it on the "
            f"same rows, but the {ranks} processes of a training have different ones. {ways_out}"
        )
    devices = {str(device) for device in (getattr(target, "hf_device_map", None) or {}).values()}
    if ranks_here > 1 and len(devices) > 1:
        raise ValueError(
            f"`device_map` has put the target on {', '.join(sorted(devices))}, where the other {ranks_here - 1} "
            f"processes of this machine put theirs. {ways_out}"
        )


@contextmanager
def apart_from_zero3() -> Iterator[None]:
    """While the context is open, transformers loads models whole, also for a training with ZeRO-3."""
    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference


def keep_precision(plugin: FullyShardedDataParallelPlugin) -> None:
    """Half precision under FSDP2 as it is without: weights are gathered in it, while inputs keep the dtype in which
    they come, autocast decides about products, and gradients are summed in fp32."""
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
        )


def prepare_sharding(draft: PreTrainedModel, accelerator: Accelerator) -> None:
    """
    What a draft needs before accelerate shards it with FSDP2.

    All ranks get the weights of the first one, as under DDP. Modules that stay in fp32
    (`_keep_in_fp32_modules_strict`) are sharded here, each in a group of its own: a group has one dtype, and those of
    the layers around them are gathered in half precision. Layers and heads, as far as the draft has them, are left to
    accelerate.
    """
    plugin = accelerator.state.fsdp_plugin
    if any(isinstance(module, FSDPModule) for module in draft.modules()):
        return
    for tensor in chain(draft.parameters(), draft.buffers()):
        sent = tensor.data.to(accelerator.device)
        dist.broadcast(sent, src=0)
        tensor.data.copy_(sent)
    mesh = accelerator.torch_device_mesh
    mesh = None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    policy, offload = MixedPrecisionPolicy(cast_forward_inputs=False), plugin.cpu_offload
    names = set(draft._keep_in_fp32_modules_strict or ())
    for name, module in draft.named_modules():
        if name.rpartition(".")[2] in names and any(True for _ in module.parameters()):
            # They are small. Kept after the forward, they are gathered once a step.
            fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)
    if plugin.transformer_cls_names_to_wrap is None:
        present = {type(module).__name__ for module in draft.modules()}
        plugin.transformer_cls_names_to_wrap = [name for name in draft._no_split_modules if name in present]


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters are on the meta device."""
    memo = {id(weight): nn.Parameter(weight.to("meta"), requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, memo)


def whole_copy(empty: nn.Module, sharded: nn.Module) -> nn.Module:
    """
    A sharded model's weights in one piece on each rank. All ranks have to take part.

    Args:
        empty: [`without_weights`] of the model as it was before it was sharded, in the dtypes that are wanted.
        sharded: the model.
    """
    model = copy.deepcopy(empty)
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    state = {name: whole(tensor).to(dtypes[name]) for name, tensor in sharded.state_dict(keep_vars=True).items()}
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be one rank's part of it, apart from the model. All ranks have to take part."""
    if isinstance(tensor, DTensor):
        return tensor.detach().full_tensor()
    if hasattr(tensor, "ds_id"):  # ZeRO-3
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(tensor):
            return tensor.detach().clone()
    return tensor.detach().clone()
