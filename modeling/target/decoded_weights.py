"""How targets are loaded. A checkpoint whose quantised weights nothing decodes would load, with a line in the log, and
answer with noise."""

import re
from collections.abc import Callable, Iterable

from transformers import PreTrainedConfig, PreTrainedModel

# Endings of the names of what lies beside quantised weights in FP8, MXFP4, NVFP4, GPTQ, AWQ and bitsandbytes files.
COMPANIONS = re.compile(
    r"\.(weight_scale\w*|weight_packed|\w*scale_inv|qscale_weight|qweight|qzeros|scales|SCB|weight\.(absmax|quant_\w+))$"
)
# DeepSeek's, which elsewhere is a parameter of its own: a weight's only beside one.
SCALE = ".scale"


def load_decoded(load: Callable, *args, output_loading_info: bool = False, **kwargs):
    """
    Calls a `from_pretrained`.

    Args:
        load: the `from_pretrained` of a model class or an Auto class; args, output_loading_info, kwargs: its.

    Returns:
        What it returns.

    Raises:
        ValueError: if the checkpoint has scales, or other parts of quantised weights, that were not read.
    """
    model, info = load(*args, output_loading_info=True, **kwargs)
    check_decoded(model, info["unexpected_keys"])
    return (model, info) if output_loading_info else model


def with_text_config(kwargs: dict) -> dict:
    """Arguments of a text model's `from_pretrained`, with the text side of a multimodal `config`."""
    config = kwargs.get("config")
    return kwargs | {"config": config.get_text_config()} if isinstance(config, PreTrainedConfig) else kwargs


def check_decoded(model: PreTrainedModel, unread: Iterable[str]) -> None:
    """Raises a `ValueError` if tensors of a model's checkpoint that it has not read belong to quantised weights."""
    weights = {name for name, _ in model.named_parameters()}
    left_over = sorted(name for name in unread if _is_companion(name, weights))
    if left_over:
        raise ValueError(
            f"{model.name_or_path} has {len(left_over)} tensors of quantised weights that nothing reads, first "
            f"`{left_over[0]}`: without them the weights are other numbers. The `quantization_config` in its "
            "config.json is missing or names another format: put the right one there, or convert the weights to "
            "bfloat16."
        )


def _is_companion(name: str, weights: set[str]) -> bool:
    if name.endswith(SCALE):
        return f"{name.removesuffix(SCALE)}.weight" in weights
    return COMPANIONS.search(name) is not None
