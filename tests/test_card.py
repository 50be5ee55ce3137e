"""Model cards: valid metadata, runnable code, no local paths, the same text every time."""

import ast
import re

import pytest
import yaml
from deepseek_v41_dspark_models import tiny_dspark
from draft_models import tiny_draft
from huggingface_hub import ModelCard

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.hub_cards.card import is_hub_id, make_card, write_card

TARGET = {
    "name_or_path": "Qwen/Qwen3-0.6B",
    "revision": "c1899de289a04d12100db370d81485cdf75e47ca",
    "architecture": "Qwen3ForCausalLM",
    "model_type": "qwen3",
}
RECIPE = {
    "objective": {"name": "fixed_anchor", "loss_decay_gamma": 4.0},
    "training": {"steps": 1000, "learning_rate": 0.0006, "data": "a|b"},
}
METRICS = {"chat": {"tau": 2.34567, "speed-up": 1.5}, "code": {"tau": 3.0, "prompts": 40}}


def config(**settings):
    return tiny_draft(**({"target": TARGET} | RECIPE | settings)).config


def dspark_config(**settings):
    return tiny_dspark(**({"target": TARGET} | RECIPE | settings)).config


def metadata(card):
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)[1])


def code_blocks(card):
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)


def test_metadata():
    assert metadata(make_card(config(), license="apache-2.0")) == {
        "base_model": "Qwen/Qwen3-0.6B",
        "base_model_relation": "adapter",
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "blockdraft", "kimi_k3_dflash"],
    }
    unlicensed = metadata(make_card(config()))
    assert (unlicensed["license"], unlicensed["license_name"]) == ("other", "terms-of-the-target-model")


def test_says_what_it_is_and_how_to_decode():
    card = make_card(config(), METRICS)
    for text in (
        "`Qwen/Qwen3-0.6B`",
        "| target revision | c1899de289a04d12100db370d81485cdf75e47ca |",
        "| target layers read | [1, 3] of 6, zero-based, their outputs |",
        "| mask token id | 63 |",
        "| learning_rate | 0.0006 |",
        "| data | a\\|b |",
        "| loss_decay_gamma | 4 |",
        "| data | tau | speed-up | prompts |\n|---|---|---|---|\n| chat | 2.346 | 1.5 | - |\n| code | 3 | - | 40 |",
        "vLLM 0.33.0",
    ):
        assert text in card, text
    (code,) = code_blocks(card)
    ast.parse(code)
    assert 'target_id = "Qwen/Qwen3-0.6B"' in code and TARGET["revision"] in code
    assert 'speculation_type="dflash"' in code and "trust_remote_code=True" in code
    assert "import blockdraft" not in code


def test_a_kimi_k3_target_needs_the_package():
    card = make_card(config(target=TARGET | {"model_type": "kimi_k3_text"}))
    assert code_blocks(card)[0].startswith("import blockdraft")


@pytest.mark.parametrize(
    "path", ["/data/models/target", "./target", "out/run/target", "target", "existing/target", ""]
)
def test_a_local_target_is_not_named(path, tmp_path, monkeypatch):
    (tmp_path / "existing/target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert path == "" or not is_hub_id(path)
    card = make_card(config(target=TARGET | {"name_or_path": path}))
    assert path == "" or f'"{path}"' not in card and f"`{path}`" not in card
    assert "base_model" not in metadata(card) and "base_model_relation" not in metadata(card)
    assert 'target_id = "path/to/the/target"' in card and "revision" not in code_blocks(card)[0]


def test_a_draft_without_provenance_says_so():
    card = make_card(config(target=None, objective=None, training=None))
    assert "does not say how it was trained" in card and "Nothing has been measured" in card
    ast.parse(code_blocks(card)[0])


def test_limits_name_what_the_native_path_does_not_do():
    assert "block_decode`, or fewer" not in make_card(config())
    assert "multiplied by 2," in make_card(config(input_embedding_scale=2.0))
    assert "at least two known tokens" in make_card(config(objective={"name": "variable_prefix"}))


def test_dspark_card_says_what_only_it_has_and_how_to_decode():
    v41 = TARGET | {"model_type": "deepseek_v41_text", "architecture": "DeepseekV41ForCausalLM"}
    card = make_card(dspark_config(target=v41, confidence_temperatures=[1.0, 1.25, 1.5, 2.0]), METRICS)
    for text in (
        "it proposes\n4 tokens in one forward",
        "| block size | 4 (the first slot reads the last known token, every slot proposes the token after its own) |",
        "| context window | 6 |",
        "| experts | 5 in each layer, 2 of them and a shared one a token |",
        "| Markov head | rank 8 |",
        "| confidence head | reads the state after the final norm (`post_norm`) |",
        "| confidence temperatures by slot | 1, 1.25, 1.5, 2 |",
        "- Both give the confidence head the state before the final norm",
        "blockdraft export --format deepseek --into TARGET_DIR",
    ):
        assert text in card, text
    assert metadata(card)["tags"][-1] == "deepseek_v41_dspark"
    (code,) = code_blocks(card)
    ast.parse(code)
    assert code.startswith("from blockdraft import block_decode\n") and "custom_generate=block_decode" in code
    assert "speculation_type" not in code


def test_dspark_limits_follow_the_draft():
    card = make_card(dspark_config())
    assert "not calibrated" in card and "`blockdraft calibrate`" in card
    assert "for DeepSeek V4.1 targets only" in card
    pre_norm = make_card(dspark_config(confidence_input="pre_norm", target={"model_type": "deepseek_v41_text"}))
    assert "the state before the final norm (`pre_norm`)" in pre_norm and "Both give" not in pre_norm
    bare = make_card(dspark_config(markov_rank=None))
    assert "| Markov head | none |" in bare and "| confidence head | none |" in bare
    assert "temperatures" not in bare and "calibrated" not in bare
    captured = make_card(dspark_config(capture_point="attention_input_mean"))
    assert "[3, 5] of 6, zero-based, what enters their attention, the mean over its streams" in captured


@pytest.mark.parametrize("make_config", [config, dspark_config])
def test_no_blank_template_marks_are_left(make_config):
    for metrics in (None, METRICS):
        card = make_card(make_config(), metrics)
        assert "{{" not in card and "{%" not in card and "\n\n\n" not in card and "None" not in card


def test_written_once_and_the_same_after_reading_the_config_back(tmp_path):
    config().save_pretrained(tmp_path)
    path = write_card(tmp_path, config(), METRICS)
    text = path.read_text()
    assert path == tmp_path / "README.md" and ModelCard(text).data.base_model == "Qwen/Qwen3-0.6B"
    write_card(tmp_path, KimiK3DFlashConfig.from_pretrained(tmp_path), METRICS)
    assert path.read_text() == text
