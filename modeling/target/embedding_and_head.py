"""A target of which only embedding, final norm and LM head are loaded: all that training on stored states needs."""

import json
import os
from contextlib import suppress

import torch
from accelerate import init_empty_weights
from accelerate.utils import set_module_tensor_to_device
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

ABSENT = "meta"  # where the layers are, in `hf_device_map`


def has_layers(target: PreTrainedModel) -> bool:
    """Whether a target can run: it was not loaded by [`load_embedding_and_head`]."""
    return ABSENT not in (getattr(target, "hf_device_map", None) or {}).values()


def load_embedding_and_head(
    name: str,
    revision: str | None = None,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    auto_class: type = AutoModelForCausalLM,
) -> PreTrainedModel:
    """
    Reads the embedding, the final norm and the LM head of a causal LM, tensor by tensor; of a repository on the Hub,
    only the files that hold them are downloaded.

    Args:
        name, revision, dtype, trust_remote_code: those of `from_pretrained`.
        device: where embedding and head go.
        auto_class: the Auto class that knows the target.

    Returns:
        The target, frozen, in evaluation mode; its other weights are on the meta device, and it cannot run.

    Raises:
        ValueError: if the weights are not safetensors, or embedding or head are quantised or not there.
    """
    where = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(name, **where)
    if dtype == "auto":
        dtype = config.dtype or config.get_text_config().dtype or torch.float32
    with init_empty_weights(include_buffers=False):  # an embedding may have its scale in a buffer
        target = auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    target.config.name_or_path = name
    with suppress(OSError):  # not every target has one
        target.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
    target.tie_weights()
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    parts, names = (embedding, head, *final_norms(target)), {}
    for module, part in target.named_modules():
        for weight_name, weight in part.named_parameters() if part in parts else ():
            names.setdefault(weight, f"{module}.{weight_name}")  # of two that are tied, the first
    files = _files(name, revision, target, set(names.values()))
    devices = {"": ABSENT}
    for weight, full_name in names.items():
        if full_name not in files:
            raise ValueError(f"{name} has no `{full_name}`: its embedding or head cannot be read.")
        file, key = files[full_name]
        with safe_open(file, framework="pt") as opened:
            value = opened.get_tensor(key)
        if not value.is_floating_point() or value.itemsize < 2 or value.shape != weight.shape:
            raise ValueError(
                f"{name}: `{key}` is {value.dtype} {list(value.shape)}, where {list(weight.shape)} numbers that are "
                "not quantised are needed. Load the whole target instead."
            )
        set_module_tensor_to_device(target, full_name, device, value=value, dtype=weight.dtype)
        devices[full_name.rpartition(".")[0]] = str(device)
    if head.weight.is_meta:  # tied
        head.weight = embedding.weight
    target.hf_device_map = devices
    return target.eval().requires_grad_(False)


def final_norms(target: PreTrainedModel) -> list[nn.Module]:
    """The norm between a target's last layer and its head: the last that its decoder has for itself, after its layers;
    empty where there is none."""
    norms, after_layers = [], False
    for module in target.get_decoder().children():
        after_layers |= isinstance(module, nn.ModuleList)
        if after_layers and type(module).__name__.endswith("Norm"):
            norms = [module]
    return norms


def _files(name: str, revision: str | None, target: PreTrainedModel, wanted: set[str]) -> dict[str, tuple[str, str]]:
    """For each of the wanted parameters, the file that holds it, here, and its name there."""

    def fetch(file: str, may_lack: bool = False) -> str | None:
        return cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=not may_lack)

    index = fetch(SAFE_WEIGHTS_INDEX_NAME, may_lack=True)
    if index is not None:
        with open(index, encoding="utf-8") as opened:
            places = json.load(opened)["weight_map"]
    else:
        if (single := fetch(SAFE_WEIGHTS_NAME, may_lack=True)) is None:
            raise ValueError(f"{name} has no safetensors files: its embedding and head cannot be read on their own.")
        with safe_open(single, framework="pt") as opened:
            places = dict.fromkeys(opened.keys(), SAFE_WEIGHTS_NAME)
    mapping = get_model_conversion_mapping(target)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    parameters = target.state_dict()
    found = {}
    for key, file in places.items():
        renamed, _ = rename_source_key(key, renamings, converters, target.base_model_prefix, parameters)
        if renamed not in parameters and key in parameters:
            renamed = key
        if renamed in wanted:
            found[renamed] = (fetch(os.path.basename(file)), key)
    return found
