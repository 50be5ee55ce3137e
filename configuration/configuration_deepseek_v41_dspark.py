"""Configuration of the DSpark draft with DeepSeek V4.1 stages."""

from huggingface_hub.dataclasses import strict

from .configuration_deepseek_v41_base import DeepseekV41BaseConfig
from .configuration_draft import ATTENTION_INPUT_MEAN, LAYER_OUTPUT
from .configuration_dspark import DSparkConfig

# The cache layer type of a stage: the keys of the context window. transformers keeps one class for each type, that of
# the code loaded last, and drafts ship their code: a layer that computes anything else needs another name.
DSPARK_CONTEXT = "dspark_context_2"


@strict
class DeepseekV41DSparkConfig(DSparkConfig, DeepseekV41BaseConfig):
    r"""
    A [`DSparkConfig`] whose backbone is a few of DeepSeek V4.1's window-only layers (stages): every field of
    [`DeepseekV41BaseConfig`], of which `hidden_size` is the target's. `num_hidden_layers`, `n_routed_experts` and
    `num_experts_per_tok` are the draft's own. The defaults are the released drafter's; those for any other target are
    in `build_deepseek_v41_dspark`.
    """

    model_type = "deepseek_v41_dspark"
    builder = "build_deepseek_v41_dspark"
    family_capture_points = (ATTENTION_INPUT_MEAN, LAYER_OUTPUT)
    fixed_in_training = (*DSparkConfig.fixed_in_training, "n_routed_experts")
    engine_view = {
        "dspark_block_size": "block_size",
        "dspark_noise_token_id": "mask_token_id",
        "dspark_target_layer_ids": "target_layer_ids",
        "dspark_markov_rank": "markov_rank",
        "dspark_n_routed_experts": "n_routed_experts",
        "dspark_num_experts_per_tok": "num_experts_per_tok",
        "num_nextn_predict_layers": "num_hidden_layers",
    }

    num_hidden_layers: int = 3
    n_routed_experts: int = 128
    num_experts_per_tok: int = 3
    sliding_window: int = 128
    capture_point: str = ATTENTION_INPUT_MEAN

    @property
    def layer_types(self) -> list[str]:
        """What a `DFlashCache` builds its cache layers from."""
        return [DSPARK_CONTEXT] * self.num_hidden_layers
