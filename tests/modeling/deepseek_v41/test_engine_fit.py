import pytest
from deepseek_v41_dspark_models import TINY

from blockdraft.configuration.configuration_deepseek_v41_dspark import DeepseekV41DSparkConfig
from blockdraft.modeling.deepseek_v41.engine_fit import engine_misfits

ENGINES = ["vllm", "sglang"]
# As many stages as layers read, and the head as engines feed it.
FITTING = {"target_layer_ids": [3, 4, 5], "confidence_input": "pre_norm"}
BF16_TARGET = {"text_config": {}, "vision_config": {"n_layers": 2}}
FP8_TARGET = BF16_TARGET | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}


def misfits(engine: str, quantized: bool = False, target: dict | None = BF16_TARGET, **settings) -> list[str]:
    config = DeepseekV41DSparkConfig(**(TINY | FITTING | settings))
    return engine_misfits(config, engine, quantized, target)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_released_shape_fits(engine):
    assert misfits(engine) == []
    assert misfits(engine, quantized=True, target=FP8_TARGET) == []


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "settings, word",
    [
        ({"capture_point": "layer_output", "num_target_layers": 8}, "`capture_point`"),
        ({"confidence_input": "post_norm"}, "pre_norm"),
        ({"confidence_temperatures": [1.0, 1.5, 2.0, 2.0]}, "`confidence_temperatures`"),
        ({"output_multiplier": 0.5}, "`output_multiplier`"),
        ({"input_embedding_scale": 2.0}, "`input_embedding_scale`"),
        ({"final_logit_softcapping": 30.0}, "`final_logit_softcapping`"),
    ],
)
def test_each_misfit_of_the_configuration_is_told(engine, settings, word):
    (misfit,) = misfits(engine, **settings)
    assert word in misfit


def test_stage_count_matters_to_sglang_alone():
    (misfit,) = misfits("sglang", target_layer_ids=[3, 5])
    assert "(2)" in misfit and "(3)" in misfit
    assert misfits("vllm", target_layer_ids=[3, 5]) == []


def test_missing_heads():
    assert "Markov head" in misfits("vllm", markov_rank=None)[0]
    assert misfits("vllm", confidence_head=False) == []
    (misfit,) = misfits("sglang", confidence_head=False)
    assert "confidence head" in misfit


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_have_the_form_of_the_targets(engine):
    (misfit,) = misfits(engine, target=FP8_TARGET)
    assert "not quantised and its target is" in misfit
    (misfit,) = misfits(engine, quantized=True)
    assert "quantised and its target is not" in misfit
    nested = {"text_config": {"quantization_config": {"weight_block_size": [128, 128]}}, "vision_config": {"depth": 1}}
    (misfit,) = misfits(engine, quantized=True, target=nested)
    assert "[128, 128]" in misfit
    (misfit,) = misfits(engine, target=None)
    assert "bfloat16 target" in misfit


def test_image_bias_needs_a_vision_side_in_vllm():
    (misfit,) = misfits("vllm", target={"text_config": {}})
    assert "bias_vl" in misfit
    assert misfits("sglang", target={"text_config": {}}) == []


def test_unknown_engines_are_refused():
    with pytest.raises(ValueError, match="`engine` is 'tgi'"):
        misfits("tgi")
