"""A DSpark draft as DeepSeek releases it: `mtp.*` tensors, plain or quantised, alone or beside its target's files."""

import json
import os
import re
import struct
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from ...configuration.build_deepseek_v41_dspark import build_deepseek_v41_dspark_draft_config
from ...configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from ...configuration.configuration_deepseek_v41_base import DeepseekV41BaseConfig
from ...configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from ..ops.number_formats import SCALE_GROUP, dequantize_fp4, dequantize_fp8_block, quantize_fp4, quantize_fp8_block
from ..saving.atomic_save import staged_directory
from .conversion_deepseek_v41 import native_name, released_name
from .engine_fit import engine_misfits
from .modeling_deepseek_v41_dspark import DeepseekV41DSparkModel

# Sorts behind a target's own shards: whoever reads whole files in the order of their names sees these tensors last.
DRAFT_FILE = "mtp.safetensors"
# Entry of that file's metadata with the draft's configuration.
CONFIG_ENTRY = "draft_config"

FP32_TENSORS = re.compile(
    r".*\.(attn_sink|hc_(attn|ffn)_(fn|base|scale)|ffn\.gate\.bias(_vl)?|confidence_head\.proj\.weight)"
)
FP8_WEIGHTS = re.compile(r".*\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|ffn\.shared_experts\.w[123]|main_proj)\.weight")
FP4_WEIGHTS = re.compile(r".*\.ffn\.experts\.\d+\.w[123]\.weight")
EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w[123])\.weight")
# Engines read a V4.1 layer's settings in the target's configuration for the draft's stages as well, but for what the
# draft has of its own, and for settings of training, of caching and of special tokens.
NOT_SHARED = {"num_hidden_layers", "n_routed_experts", "num_experts_per_tok"}
NOT_SHARED |= {"max_position_embeddings", "initializer_range", "attention_dropout", "use_cache"}
NOT_SHARED |= {"pad_token_id", "bos_token_id", "eos_token_id"}
SHARED_SETTINGS = [name for name in DeepseekV41BaseConfig.__annotations__ if name not in NOT_SHARED]


def released_tensors(
    native: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16, quantize: bool = False
) -> dict[str, Tensor]:
    """
    A draft's tensors under the released names, one for each expert's projection.

    Args:
        native: the draft's state dict, `mtp.{stage}.*`.
        dtype: of what is neither quantised nor always fp32 (sinks, hyper-connections, correction biases, the
            confidence head).
        quantize: FP8 E4M3 for the attention's, the shared expert's and `main_proj`'s weights, with a scale
            `[ceil(out / 32), ceil(in / 32)]`; FP4 for the routed experts', int8 `[out, in / 2]` with a scale
            `[out, in / 32]`. A scale is float8_e8m0fnu, named `.scale` in place of `.weight`.

    Raises:
        ValueError: if `quantize` and a size does not suit FP4.
    """
    released = {}
    for name, tensor in native.items():
        for plain_name, plain in _unstacked(name, tensor):
            if quantize and FP8_WEIGHTS.fullmatch(plain_name):
                released[plain_name], released[_scale_name(plain_name)] = quantize_fp8_block(plain)
            elif quantize and FP4_WEIGHTS.fullmatch(plain_name):
                if plain.shape[1] % SCALE_GROUP:
                    raise ValueError(
                        f"`{plain_name}` has {plain.shape[1]} columns: FP4 needs a multiple of {SCALE_GROUP}. "
                        "`hidden_size` and `moe_intermediate_size` decide that; export without quantising."
                    )
                released[plain_name], released[_scale_name(plain_name)] = quantize_fp4(plain)
            else:
                kept = torch.float32 if FP32_TENSORS.fullmatch(plain_name) else dtype
                released[plain_name] = plain.to(kept).contiguous()
    return released


def _scale_name(weight_name: str) -> str:
    return weight_name.removesuffix("weight") + "scale"


def _unstacked(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    prefix, separator, projection = name.rpartition(".experts.")
    if not separator:
        return [(released_name(name), tensor)]
    names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[projection]
    return [
        (f"{prefix}.experts.{expert}.{released}.weight", weight.T)
        for expert, stacked in enumerate(tensor)
        for released, weight in zip(names, stacked.chunk(len(names), dim=1), strict=True)
    ]


def native_tensors(released: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The inverse of [`released_tensors`] for the tensors of one draft, complete and of the right shapes, see
    [`check_released`]: decodes what has a scale, and stacks the experts. `dtype` is of what is not always fp32."""
    native, experts = {}, {}
    for name, tensor in released.items():
        if name.endswith(".scale"):
            continue
        scale = released.get(_scale_name(name)) if name.endswith(".weight") else None
        if scale is not None:
            decode = dequantize_fp4 if FP4_WEIGHTS.fullmatch(name) else dequantize_fp8_block
            tensor = decode(tensor, scale, dtype)
        tensor = tensor.to(torch.float32 if FP32_TENSORS.fullmatch(name) else dtype)
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            native[native_name(name)] = tensor
    for prefix, weights in experts.items():
        count = len(weights) // 3
        gate_up = [torch.cat([weights[expert, "w1"], weights[expert, "w3"]]).T for expert in range(count)]
        native[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        native[f"{prefix}.down_proj"] = torch.stack([weights[expert, "w2"].T for expert in range(count)])
    return native


def expected_shapes(config: DeepseekV41DSparkConfig) -> dict[str, torch.Size]:
    """Released names of a draft's tensors and their shapes before quantising."""
    with torch.device("meta"):
        state_dict = DeepseekV41DSparkModel(config).state_dict()
    return {name: tensor.shape for name, tensor in released_tensors(state_dict).items()}


def check_released(released: Mapping[str, Tensor], config: DeepseekV41DSparkConfig) -> None:
    """Raises a `ValueError` that names every tensor that the draft lacks, does not have, or has in another shape."""
    expected = expected_shapes(config)
    faults = {
        "missing": [name for name in expected if name not in released],
        "unexpected": [],
        "without the scale that its numbers need": [],
        "a scale without a quantised weight": [],
        "of another shape": [],
    }
    for name, tensor in released.items():
        weight_name = name.removesuffix("scale") + "weight"
        if name.endswith(".scale") and weight_name in expected:
            if weight_name not in released or not _is_quantized(released[weight_name]):
                faults["a scale without a quantised weight"].append(name)
            continue
        if name not in expected:
            faults["unexpected"].append(name)
            continue
        shapes = {name: tuple(expected[name])}
        if _is_quantized(tensor):
            if _scale_name(name) not in released:
                faults["without the scale that its numbers need"].append(name)
            shapes = _quantized_shapes(name, expected[name])
        for stored, shape in shapes.items():
            if stored in released and (actual := tuple(released[stored].shape)) != shape:
                faults["of another shape"].append(f"{stored} {actual}, not {shape}")
    if any(faults.values()):
        listed = "; ".join(f"{fault}: {', '.join(names)}" for fault, names in faults.items() if names)
        raise ValueError(f"These tensors are no draft of this configuration. {listed}.")


def _is_quantized(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float8_e4m3fn, torch.int8)


def _quantized_shapes(name: str, shape: torch.Size) -> dict[str, tuple[int, ...]]:
    """By name, the shapes that a tensor and its scale have in a file."""
    if len(shape) != 2:
        return {name: tuple(shape), _scale_name(name): ()}
    rows, groups = shape[0], -(-shape[1] // SCALE_GROUP)
    if FP4_WEIGHTS.fullmatch(name):
        return {name: (rows, shape[1] // 2), _scale_name(name): (rows, groups)}
    return {name: tuple(shape), _scale_name(name): (-(-rows // SCALE_GROUP), groups)}


def export_deepseek(
    draft: DeepseekV41DSparkModel,
    directory: str | os.PathLike | None = None,
    quantize: bool = False,
    into: str | os.PathLike | None = None,
    engine: str | None = None,
) -> list[str]:
    """
    Writes a draft in the released layout: one safetensors file with `mtp.*` tensors, and the draft's configuration in
    its metadata. Files appear whole or not at all.

    Args:
        draft (`DeepseekV41DSparkModel`): The draft. Embedding and head are the target's and are not written.
        directory (`str` or `os.PathLike`, *optional*): Where to write it on its own.
        quantize (`bool`): FP8 and FP4 instead of bfloat16, see [`released_tensors`].
        into (`str` or `os.PathLike`, *optional*): Directory of the draft's target: gets the file beside its own, and
            an index of all of them. The target's weight files stay as they are; if they hold `mtp.*` tensors already,
            the index lists the new ones instead.
        engine (`str`, *optional*): `"vllm"` or `"sglang"`: warns of each way in which the draft does not fit it, see
            [`engine_misfits`].

    Returns:
        `list[str]`: the warnings.

    Raises:
        ValueError: if no place is given, or if the draft cannot be written so or does not belong to the target.
    """
    places = [Path(place) for place in (directory, into) if place is not None]
    if not places:
        raise ValueError("Give a `directory` for the draft's file, or `into`, the directory of its target.")
    if not isinstance(draft, DeepseekV41DSparkModel):
        raise ValueError(
            f"`draft` is a {type(draft).__name__}: only DSpark drafts with DeepSeek V4.1 stages have the released "
            "layout. Adapters have to be merged into the draft first."
        )
    if into is not None:
        check_belongs_to(draft.config, into)
    target_config = None if into is None else json.loads((Path(into) / CONFIG_NAME).read_text(encoding="utf-8"))
    found = [] if engine is None else engine_misfits(draft.config, engine, quantize, target_config)
    native = {name: tensor for name, tensor in draft.state_dict().items() if name.startswith("mtp.")}
    released = released_tensors(native, quantize=quantize)
    check_released(released, draft.config)
    if into is not None:
        found += _left_behind(read_weight_map(into), released)
    metadata = {"format": "pt", CONFIG_ENTRY: draft.config.to_json_string(use_diff=False)}
    for place in places:
        with staged_directory(place) as staging:
            save_file(released, staging / DRAFT_FILE, metadata)
    if into is not None:
        # After the shard: an index never lists a file that is not there.
        index = json.dumps(merged_index(into), indent=2)
        with staged_directory(into) as staging:
            (staging / SAFE_WEIGHTS_INDEX_NAME).write_text(f"{index}\n", encoding="utf-8")
    for warning in found:
        warnings.warn(warning, stacklevel=2)
    return found


def load_deepseek(
    directory: str | os.PathLike, dtype: torch.dtype = torch.bfloat16, config: DeepseekV41DSparkConfig | None = None
) -> DeepseekV41DSparkModel:
    """
    Reads a draft in the released layout, quantised or not, from a directory of its own or from its target's.

    Args:
        directory (`str` or `os.PathLike`): What [`export_deepseek`] wrote, or a DeepSeek V4.1 checkpoint with `mtp.*`
            tensors.
        dtype (`torch.dtype`): Of what is not always fp32.
        config (`DeepseekV41DSparkConfig`, *optional*): Default: that in the file's metadata, else the one that belongs
            to the `config.json` beside it, with the confidence input of DeepSeek's own draft.

    Returns:
        `DeepseekV41DSparkModel` in evaluation mode.

    Raises:
        ValueError: if there is no draft, or if tensors are missing, unexpected or of another shape; it names them.
    """
    files = {name: file for name, file in read_weight_map(directory).items() if name.startswith("mtp.")}
    if not files:
        raise ValueError(f"The safetensors files in {directory} hold no `mtp.*` tensors: there is no draft in them.")
    released, stored = {}, None
    for file in dict.fromkeys(files.values()):
        with safe_open(Path(directory) / file, framework="pt") as opened:
            stored = (opened.metadata() or {}).get(CONFIG_ENTRY, stored)
            released |= {name: opened.get_tensor(name) for name in files if files[name] == file}
    if config is None and stored is not None:
        config = DeepseekV41DSparkConfig.from_dict(json.loads(stored))
    elif config is None:
        config = build_deepseek_v41_dspark_draft_config(
            _target_text_config(directory),
            confidence_input="pre_norm",
            confidence_head=any(name.endswith(".confidence_head.proj.weight") for name in released),
        )
    check_released(released, config)
    state_dict = native_tensors(released, dtype)
    return DeepseekV41DSparkModel.from_pretrained(None, config=config, state_dict=state_dict, dtype=dtype)


def released_folder(name: str, revision: str | None = None) -> Path:
    """The directory of a checkpoint that [`load_deepseek`] reads: `name` itself, or of a repository on the Hub the
    configuration and those files that hold `mtp.*` tensors."""
    if Path(name).is_dir():
        return Path(name)
    wanted = [CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME]
    folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    files = ["*.safetensors"]
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        files = sorted({file for tensor, file in read_weight_map(folder).items() if tensor.startswith("mtp.")})
    return Path(snapshot_download(name, revision=revision, allow_patterns=[*wanted, *files]))


def check_belongs_to(config: DeepseekV41DSparkConfig, directory: str | os.PathLike) -> None:
    """Raises a `ValueError` that names each setting of a draft that a target's `config.json` states differently."""
    text_config = _target_text_config(directory)
    pairs = {name: getattr(config, own_name) for name, own_name in config.engine_view.items()}
    pairs |= {name: getattr(config, name) for name in SHARED_SETTINGS}
    differing = [
        f"`{name}` is {value} in the draft and {getattr(text_config, name)} in the target"
        for name, value in pairs.items()
        if getattr(text_config, name) != value
    ]
    if differing:
        raise ValueError(
            f"The draft does not fit {directory}, whose config.json engines read for the draft too: "
            f"{'; '.join(differing)}. Make them agree there, if the draft was trained for this target."
        )


def _target_text_config(directory: str | os.PathLike) -> DeepseekV41TextConfig:
    config = AutoConfig.from_pretrained(directory).get_text_config()
    if not isinstance(config, DeepseekV41TextConfig):
        raise ValueError(f"{directory} is not a DeepSeek V4.1 target, but has the model type {config.model_type!r}.")
    return config


def read_weight_map(directory: str | os.PathLike) -> dict[str, str]:
    """Tensor names of a directory's safetensors files and the files they are in, by its index; without one by what the
    files hold, of which the last by name counts."""
    directory = Path(directory)
    if (index := directory / SAFE_WEIGHTS_INDEX_NAME).exists():
        return json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    weight_map = {}
    for file in sorted(directory.glob("*.safetensors")):
        weight_map |= dict.fromkeys(tensor_sizes(file), file.name)
    if not weight_map:
        raise ValueError(f"{directory} has no safetensors files.")
    return weight_map


def tensor_sizes(file: Path) -> dict[str, int]:
    """Names of a safetensors file's tensors and their bytes."""
    with open(file, "rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}


def merged_index(directory: str | os.PathLike) -> dict:
    """The index of a target's files in which [`DRAFT_FILE`] is the one with `mtp.*` tensors."""
    directory = Path(directory)
    kept = {name: file for name, file in read_weight_map(directory).items() if not name.startswith("mtp.")}
    weight_map = kept | dict.fromkeys(tensor_sizes(directory / DRAFT_FILE), DRAFT_FILE)
    sizes = {file: tensor_sizes(directory / file) for file in set(weight_map.values())}
    total = sum(sizes[file][name] for name, file in weight_map.items())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _left_behind(weight_map: Mapping[str, str], released: Mapping[str, Tensor]) -> list[str]:
    """Warns of another draft's tensors in the target's own files."""
    old = {name for name, file in weight_map.items() if name.startswith("mtp.") and file != DRAFT_FILE}
    if not old:
        return []
    files = sorted({weight_map[name] for name in old})
    warning = (
        f"{', '.join(files)} of the target hold {len(old)} `mtp.*` tensors of another draft. They stay there, and the "
        f"index does not list them any more. An engine that loads whole files meets both; {DRAFT_FILE} comes last."
    )
    if unmatched := sorted(old - released.keys()):
        warning += f" Of these the new draft has nothing to put in place: {', '.join(unmatched)}."
    return [warning]
