"""In which ways a DSpark draft in the released layout does not fit a serving engine (vLLM 0.33.0, SGLang 0.5.23)."""

from ...configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from ...configuration.configuration_draft import ATTENTION_INPUT_MEAN

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
# When an engine asks the confidence head at all.
READS_CONFIDENCE = {
    "vllm": "with `enable_adaptive_verification`",
    "sglang": "with SGLANG_RAGGED_VERIFY_MODE cap-accept or compact",
}
# How an engine takes its target's quantisation for the draft's.
DRAFT_QUANTIZATION = {
    "vllm": "vLLM builds the draft with its target's quantisation and may leave scales that are absent unset, without "
    "a word",
    "sglang": "SGLang builds the draft with its target's quantisation; whether "
    "`--speculative-draft-model-quantization unquant` helps is not known",
}


def engine_misfits(
    config: DeepseekV41DSparkConfig, engine: str, quantized: bool, target_config: dict | None = None
) -> list[str]:
    """
    What an engine does not support or does otherwise than the draft was trained.

    Args:
        config: the draft's.
        engine: `"vllm"` or `"sglang"`.
        quantized: whether the draft's weights are FP8 and FP4.
        target_config: the target's `config.json` as read, if the files go beside it.

    Returns:
        A sentence or two for each misfit, with what to do about it.

    Raises:
        ValueError: if the engine is unknown.
    """
    if engine not in ENGINES:
        raise ValueError(f"`engine` is {engine!r}: known are {list(ENGINES)}.")
    return [
        *_target_misfits(config, engine),
        *_head_misfits(config, engine),
        *_weight_misfits(engine, quantized, target_config),
    ]


def _target_misfits(config: DeepseekV41DSparkConfig, engine: str) -> list[str]:
    name = ENGINES[engine]
    misfits = []
    if config.capture_point != ATTENTION_INPUT_MEAN:
        misfits.append(
            f"`capture_point` is {config.capture_point!r}, but {name} feeds `mtp.*` drafts the stream mean of what "
            "enters a DeepSeek V4.1 layer. Serve this draft with `generate`, or train one for a V4.1 target."
        )
    if engine == "sglang" and config.num_hidden_layers != len(config.target_layer_ids):
        misfits.append(
            f"SGLang takes the number of `target_layer_ids` ({len(config.target_layer_ids)}) for the number of stages "
            f"({config.num_hidden_layers}). Train with as many ids as stages."
        )
    without_effect = {"output_multiplier": 1, "input_embedding_scale": 1, "final_logit_softcapping": None}
    for setting, neutral in without_effect.items():
        if (value := getattr(config, setting)) != neutral:
            misfits.append(f"`{setting}` is {value}, which {name} does not apply to `mtp.*` drafts.")
    return misfits


def _head_misfits(config: DeepseekV41DSparkConfig, engine: str) -> list[str]:
    name, reads = ENGINES[engine], READS_CONFIDENCE[engine]
    misfits = []
    if config.markov_rank is None:
        misfits.append(f"The draft has no Markov head, and {name} always builds one. Train with a `markov_rank`.")
    if config.confidence_head and config.confidence_input == "post_norm":
        misfits.append(
            f'The confidence head reads the state after the final norm (`confidence_input` "post_norm"); {name} '
            f"feeds it the state before it. Tokens are right, but {reads} the verified lengths are not. Train with "
            '"pre_norm".'
        )
    if config.confidence_head and config.confidence_temperatures is not None:
        misfits.append(
            f"`confidence_temperatures` have no place in the layout: {reads}, {name} takes confidences as the head "
            "gives them."
        )
    if not config.confidence_head and engine == "sglang":
        misfits.append(f"The draft has no confidence head: SGLang refuses it {reads}.")
    return misfits


def _weight_misfits(engine: str, quantized: bool, target_config: dict | None) -> list[str]:
    name = ENGINES[engine]
    if target_config is None:
        needed = "an FP8/FP4" if quantized else "a bfloat16"
        return [f"{name} takes its target's quantisation for the draft's: serve these weights beside {needed} target."]
    text_config = target_config.get("text_config", target_config)
    quantization = target_config.get("quantization_config") or text_config.get("quantization_config")
    misfits = []
    if quantization and not quantized:
        misfits.append(
            f"The draft is not quantised and its target is: {DRAFT_QUANTIZATION[engine]}. Export with `quantize`, or "
            "serve a bfloat16 target."
        )
    if quantized and not quantization:
        misfits.append(
            f"The draft is quantised and its target is not: {name} then builds it unquantised, with no place for the "
            "scales. Export without `quantize`."
        )
    block = (quantization or {}).get("weight_block_size")
    if quantized and block not in (None, [32, 32]):
        misfits.append(f"The target's `weight_block_size` is {block}; the draft's FP8 blocks are [32, 32].")
    if engine == "vllm" and not target_config.get("vision_config"):
        misfits.append(
            "vLLM has a place for `ffn.gate.bias_vl` only where the target has a vision side, and stops at the name "
            "otherwise."
        )
    return misfits
