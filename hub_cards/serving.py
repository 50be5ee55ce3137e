"""Who decodes with a draft: transformers' own loop, and the serving engines."""

from transformers import PreTrainedConfig

from ..configuration.configuration_draft import ANCHOR_FIRST, LAYER_OUTPUT
from ..modeling.deepseek_v41.engine_fit import ENGINES, engine_misfits

V41_TYPES = ("deepseek_v41", "deepseek_v41_text")
# Targets whose classes come with this package.
OWN_TARGET_TYPES = ("kimi_k3", "kimi_k3_text", *V41_TYPES)
VERSIONS = "vLLM 0.33.0 and SGLang 0.5.23"
V41_SERVING = f"""\
{VERSIONS} read it as the `mtp.*` weights of its target's own checkpoint:

```bash
blockdraft export user/draft --into TARGET_DIR  # the target's files stay as they are
vllm serve TARGET_DIR --speculative-config '{{"method": "dspark"}}'
python -m sglang.launch_server --model-path TARGET_DIR --speculative-algorithm DSPARK
```

"""


def decoding_limits(config: PreTrainedConfig) -> list[str]:
    """Why `speculation_type="dflash"` of transformers gives this draft other blocks than it was trained on; empty
    where it gives the same."""
    native = '`speculation_type="dflash"` of transformers'
    limits = []
    if config.slot_layout == ANCHOR_FIRST:
        limits.append(f"{native} reads another slot layout: with it, hardly a token is accepted.")
    elif config.capture_point != LAYER_OUTPUT:
        limits.append(f"{native} hands out outputs of layers, which this draft does not read.")
    if config.input_embedding_scale != 1:
        limits.append(
            f"It reads block embeddings multiplied by {config.input_embedding_scale:g}, which {native} does not do: "
            "fewer tokens are accepted there."
        )
    if (config.objective or {}).get("loss_type") == "variable_prefix":
        limits.append(
            f"It was trained on blocks with at least two known tokens (variable prefix), while {native} gives it one: "
            "fewer tokens are accepted there."
        )
    return limits


def serving(config: PreTrainedConfig) -> str:
    """Which engines read a draft and how, as Markdown."""
    here = "Decode with transformers, as above."
    if config.model_type == "kimi_k3_dflash":
        return (
            f"{VERSIONS} do not read it: their DFlash drafts have Qwen3's attention, this one has Kimi K3's (MLA). "
            f"SGLang would drop the weights that it does not know without a word. {here}"
        )
    if (config.target or {}).get("model_type") not in V41_TYPES:
        return f"{VERSIONS} read DSpark drafts of this kind for DeepSeek V4.1 targets only. {here}"
    misfits = {
        name: [f"- {misfit}" for misfit in engine_misfits(config, engine, quantized=False)]
        for engine, name in ENGINES.items()
    }
    return V41_SERVING + "\n".join(line for name in misfits for line in misfits[name])
