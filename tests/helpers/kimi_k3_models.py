"""Tiny Kimi K3 targets, released checkpoints made of them, and the goldens' parameters under the names used here."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from blockdraft.configuration.configuration_kimi_k3 import KimiK3TextConfig
from blockdraft.modeling.kimi_k3.modeling_kimi_k3 import KimiK3ForCausalLM

KDA = {
    "head_dim": 16,
    "num_heads": 4,
    "short_conv_kernel_size": 4,
    "use_full_rank_gate": True,
    "gate_lower_bound": -5.0,
    "kda_layers": [1, 2, 4],
    "full_attn_layers": [3, 5],
}
TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 5,
    "num_attention_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rms_norm_eps": 3e-3,
    "num_experts": 6,
    "num_experts_per_token": 3,
    "num_shared_experts": 2,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
    "routed_scaling_factor": 1.6,
    "attn_res_block_size": 2,
    "activation_situ_beta": 1.7,
    "activation_situ_linear_beta": 2.3,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "linear_attn_config": KDA,
}
FP32_PARTS = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def tiny_config(**settings) -> KimiK3TextConfig:
    return KimiK3TextConfig(**(TINY | settings))


def tiny_k3(**settings) -> KimiK3ForCausalLM:
    """Random weights, also where a fresh model has constants: a constant hides an exchange."""
    model = KimiK3ForCausalLM(tiny_config(**settings)).eval()
    for name, tensor in model.state_dict().items():
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensor.uniform_(0.5, 1.5)
        elif name.endswith("e_score_correction_bias"):
            tensor.normal_(std=0.1)
        elif name.endswith("dt_bias"):
            tensor.normal_()
    return model


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max|actual - expected| / max|expected|"""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def golden_name(name: str) -> str:
    """The reference's parameter name to ours; its experts' are also transposed, see `golden_layout`."""
    name = name.replace("_fp32_params.", "")
    return name.replace("gate_and_up_projs", "gate_up_proj").replace("down_projs", "down_proj")


def golden_layout(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous() if name.endswith(("gate_and_up_projs", "down_projs")) else tensor


def golden_parameters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {golden_name(name): golden_layout(name, tensor) for name, tensor in tensors.items()}


def released_tensors(model: KimiK3ForCausalLM) -> dict[str, torch.Tensor]:
    """The model's weights as a released file has them, vision side included, experts plain."""
    released = {"vision_tower.patch_embed.weight": torch.ones(2), "mm_projector.proj.0.weight": torch.ones(2)}
    for name, tensor in model.state_dict().items():
        prefix, _, expert_part = name.partition(".mlp.experts.")
        if expert_part:
            projections = ("w1", "w3") if expert_part == "gate_up_proj" else ("w2",)
            for projection, part in zip(projections, tensor.chunk(len(projections), dim=1), strict=True):
                for expert, weight in enumerate(part):
                    stem = f"language_model.{prefix}.block_sparse_moe.experts.{expert}.{projection}.weight"
                    released[stem] = weight.clone()
            continue
        if f"{prefix.split('.mlp.')[0]}.mlp.gate.weight" in model.state_dict():
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith("A_log"):
            tensor = torch.cat([tensor, torch.zeros(128 - len(tensor))])
        released[f"language_model.{name}"] = tensor.clone()
    return released


def pack_experts(released: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Random MXFP4 weights in place of the plain experts."""
    packed = {}
    for name, tensor in released.items():
        if ".experts." not in name:
            packed[name] = tensor
            continue
        rows, columns = tensor.shape
        packed[f"{name}_packed"] = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
        packed[f"{name}_scale"] = torch.randint(118, 127, (rows, columns // 32), dtype=torch.uint8)
    return packed


def write_released(folder: Path, config: KimiK3TextConfig, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """A directory like a released one: `kimi_k3` outside, `kimi_linear` inside, one or more safetensors files."""
    text_config = config.to_dict() | {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}
    del text_config["dtype"]
    if any(name.endswith("_packed") for name in tensors):
        groups = {"group_0": {"format": "mxfp4-pack-quantized", "targets": ["re:.*experts.*"]}}
        text_config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": groups}
    outer = {
        "model_type": "kimi_k3",
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config", "AutoModelForCausalLM": "m.KimiK3"},
        "dtype": "bfloat16",
        "text_config": text_config,
        "vision_config": {"hidden_size": 32, "patch_size": 14},
        "media_placeholder_token_id": 5,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(outer))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def check_gradients(module: torch.nn.Module, golden, output: torch.Tensor, tolerance: float) -> None:
    """The gradients of a golden's scalar for the parameters of a module."""
    (output * golden["in.cotangent"]).sum().backward()
    parameters = dict(module.named_parameters())
    for name, expected in golden.group("grad").items():
        assert relative_error(parameters[name].grad, expected) < tolerance, name


def quantize_fp8(released: dict[str, torch.Tensor], block: int = 2) -> tuple[dict[str, torch.Tensor], dict]:
    """Matrices of the layers as FP8 with a scale for each block of rows and columns, and all tensors plain again."""
    stored, plain = {}, {}
    for name, tensor in released.items():
        stored[name] = plain[name] = tensor
        if tensor.dim() == 2 and len(tensor) > 1 and ("_proj" in name or ".experts." in name):
            blocks = tensor.unflatten(1, (-1, block)).unflatten(0, (-1, block)).float()
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            codes = (blocks / scale).to(torch.float8_e4m3fn)
            stored[name] = codes.flatten(2).flatten(0, 1)
            stored[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
            plain[name] = (codes.float() * scale).flatten(2).flatten(0, 1)
    return stored, plain
