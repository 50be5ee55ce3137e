"""Who decodes with a draft: transformers' own loop, and the serving engines."""

from transformers import PreTrainedConfig

from ..configuration.configuration_draft import LAYER_OUTPUT
from ..modeling.deepseek_v41.engine_fit import ENGINES, engine_misfits
from ..modeling.families import DSPARK, family_of

V41_TYPES = ("deepseek_v41", "deepseek_v41_text")
# Targets whose classes come with this package.
OWN_TARGET_TYPES = ("kimi_k3", "kimi_k3_text", *V41_TYPES)
# Backbones whose attention has no positional encoding.
WITHOUT_POSITIONS = ("kimi_k3",)
VERSIONS = "vLLM 0.33.0 and SGLang 0.5.23"
# The method and the backbone of the drafts that engines read in DeepSeek's released layout.
RELEASED = (DSPARK, "deepseek_v41")
LAYERS = {"kimi_k3": "Kimi K3's attention (MLA)", "deepseek_v41": "DeepSeek V4.1's layers"}
# By method, what to know of the drafts that engines do read.
ENGINE_DRAFTS = {
    "DFlash": " Theirs have Qwen3's attention, and SGLang would silently drop the weights that it does not know."
}
V41_SERVING = """\
{versions} read it as the `mtp.*` weights of its target's own checkpoint. `blockdraft export`, a
command of the `blockdraft` package, writes them:

```bash
blockdraft export {repo_id} --into TARGET_DIR  # the target's files stay as they are
vllm serve TARGET_DIR --speculative-config '{{"method": "dspark"}}'
python -m sglang.launch_server --model-path TARGET_DIR --speculative-algorithm DSPARK
```

"""


def masked_slots_are_alike(config: PreTrainedConfig) -> bool:
    """Whether nothing tells the masked slots of a block apart: no position, no visible key, no token chosen before."""
    return (
        family_of(config).backbone in WITHOUT_POSITIONS
        and not config.is_causal
        and config.sliding_window is None
        and config.to_dict().get("markov_rank") is None
    )


def has_released_layout(config: PreTrainedConfig) -> bool:
    """Whether engines know drafts of this kind, in the layout that DeepSeek releases."""
    family = family_of(config)
    return (family.method, family.backbone) == RELEASED


def decoding_limits(config: PreTrainedConfig) -> list[str]:
    """Why `speculation_type="dflash"` of transformers gives this draft other blocks than it was trained on; empty
    where it gives the same."""
    native = '`speculation_type="dflash"` of transformers'
    limits = []
    if config.sample_from_anchor:
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


def serving(config: PreTrainedConfig, repo_id: str) -> str:
    """Which engines read a draft and how, as Markdown.

    Args:
        config: the draft's.
        repo_id: how the commands name its repository.
    """
    family, here = family_of(config), "Decode with transformers, as above."
    if not has_released_layout(config):
        method, layers = family.method.name, LAYERS.get(family.backbone, f"layers of {family.backbone}")
        theirs = ENGINE_DRAFTS.get(method, "")
        return f"{VERSIONS} do not read it: they know no {method} drafts with {layers}.{theirs} {here}"
    if (config.target or {}).get("model_type") not in V41_TYPES:
        return f"{VERSIONS} read DSpark drafts of this kind for DeepSeek V4.1 targets only. {here}"
    misfits = [misfit for engine in ENGINES for misfit in engine_misfits(config, engine, quantized=False)]
    return V41_SERVING.format(versions=VERSIONS, repo_id=repo_id) + "\n".join(f"- {misfit}" for misfit in misfits)
