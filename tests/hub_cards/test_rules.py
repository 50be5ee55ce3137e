"""What the Hub takes in a card's metadata, and in the arguments that fill it, checked without the Hub."""

import math
import re
from pathlib import Path

import pytest
import yaml
from draft_models import TINY

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.hub_cards.card import make_card
from blockdraft.hub_cards.rules import check_datasets, check_license, is_hub_id, validate_card
from blockdraft.trainer.data.rows import hub_datasets
from blockdraft.trainer.training_args import DraftTrainingArguments

METADATA = {
    "base_model": "Qwen/Qwen3-0.6B",
    "base_model_relation": "adapter",
    "datasets": ["org/chats"],
    "library_name": "transformers",
    "license": "other",
    "license_name": "terms-of-the-base-model",
    "license_link": "https://huggingface.co/Qwen/Qwen3-0.6B",
    "pipeline_tag": "text-generation",
    "tags": ["speculative-decoding"],
}


def edited(**changes) -> str:
    data = METADATA | changes
    data = {key: value for key, value in data.items() if value != "DELETE"}
    return f"---\n{yaml.safe_dump(data, sort_keys=False)}---\n\n# A card\n"


def index(**changes) -> list[dict]:
    result = {"task": {"type": "a"}, "dataset": {"type": "b", "name": "c"}, "metrics": [{"type": "tau", "value": 2}]}
    return [{"name": "d", "results": [result | changes]}]


def test_a_sound_card_is_valid():
    assert validate_card(edited())["base_model"] == "Qwen/Qwen3-0.6B"
    for changes in (
        {"license": ["mit", "gpl"], "license_name": "DELETE", "license_link": "DELETE"},
        {"license_link": "LICENSE"},
        {"base_model": ["a/b", "gpt2"], "base_model_relation": "merge"},
        {"language": ["en", "zh-Hant", "code"]},
        {"model-index": index(source={"name": "x", "url": "https://x.org"})},
        {"model-index": index(metrics=[{"type": "tau", "value": "2.0 ± 0.1", "args": {"x": 1}}])},
    ):
        validate_card(edited(**changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"license": "Apache-2.0"}, "`license` is 'Apache-2.0'"),
        ({"license_name": "DELETE"}, "`license_name` is None: `license: other` needs it"),
        ({"license_link": "DELETE"}, "`license_link` is None"),
        ({"license_link": "/home/me/LICENSE"}, "`license_link` is '/home/me/LICENSE'"),
        ({"base_model": "/home/me/target"}, "`base_model` is '/home/me/target'"),
        ({"base_model": "a/b/c"}, "`base_model` is 'a/b/c'"),
        ({"base_model": ["a/b", "../c"]}, "`base_model` is '../c'"),
        ({"base_model_relation": "draft"}, "one of adapter, merge, quantized, finetune"),
        ({"base_model": "DELETE"}, "without a `base_model`"),
        ({"datasets": ["org/chats", "data/a/b.jsonl"]}, "`datasets` is 'data/a/b.jsonl'"),
        ({"datasets": [None]}, "`datasets[0]` is None: leave it out"),
        ({"datasets": []}, "`datasets` is []"),
        ({"language": "english"}, "`language` is 'english'"),
        ({"language": False}, "`language` is False: it must be text"),  # `no`, unquoted
        ({"tags": ["a\nb"]}, "`tags` is 'a\\nb'"),
        ({"tags": [1]}, "`tags` is 1"),
        ({"pipeline_tag": "text generation"}, "`pipeline_tag`"),
        ({"library_name": None}, "`library_name` is None"),
        ({"model-index": [{"name": "d"}]}, "`model-index[0].results` is None"),
        ({"model-index": index(metrics={"tau": 2})}, "`model-index[0].results[0].metrics`"),
        ({"model-index": index(task={"name": "x"})}, "`model-index[0].results[0].task.type` is None"),
        ({"model-index": index(dataset={"type": "b"})}, "dataset.name` is None"),
        (
            {"model-index": index(dataset={"type": "b", "name": "c", "config": {"x": 1}})},
            "dataset.config` is {'x': 1}",
        ),
        ({"model-index": index(metrics=[{"type": "tau", "value": math.nan}])}, "metrics[0].value` is nan"),
        ({"model-index": index(metrics=[{"type": "tau", "value": [1]}])}, "metrics[0].value` is [1]"),
        ({"model-index": index(metrics=[{"type": "tau", "value": True}])}, "metrics[0].value` is True"),
    ],
)
def test_each_rule_of_the_hub(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        validate_card(edited(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "card, message",
    [
        ("# No metadata\n", "has no metadata"),
        ("---\nlicense: [mit\n---\n", "not valid YAML"),
        ("---\nlicense: mit\nlicense: gpl\n---\n", "`license` is there twice"),
        ("---\n- mit\n---\n", "`key: value` lines"),
        ("---\n---\n", "has no metadata"),
    ],
)
def test_metadata_that_is_none(card, message):
    with pytest.raises(ValueError, match=message) as error:
        validate_card(card)
    assert "\n" not in str(error.value)


def test_names_of_repositories():
    assert all(map(is_hub_id, ("Qwen/Qwen3-0.6B", "a/b_c.d-e")))
    assert not any(
        map(is_hub_id, ("", None, "a", "a/b/c", "/a/b", "./a", "a//b", "a/b--c", "a/b.git", "a b/c", "a/.."))
    )


# ---- arguments ----


@pytest.mark.parametrize(
    "license, hint", [("Apache-2.0", "apache-2.0?"), ("./LICENSE", "./LICENSE"), ("other", "leave it out"), ("", "''")]
)
def test_licences_that_the_hub_does_not_know_are_refused(license, hint, tmp_path):
    with pytest.raises(ValueError, match=re.escape(hint)):
        check_license(license)
    with pytest.raises(ValueError, match="`license`"):
        DraftTrainingArguments(output_dir=str(tmp_path), use_cpu=True, license=license)
    if license:
        with pytest.raises(ValueError, match="`license`"):
            make_card(KimiK3DFlashConfig(**TINY, training={"license": license}))


@pytest.mark.parametrize(
    "name", ["/data/rows", "rows.jsonl", "data/rows.jsonl", "chats", "a/b/c", "a b/c", "a/b\n- c"]
)
def test_datasets_that_are_no_hub_id_are_refused(name, tmp_path):
    for refuse in (
        lambda: check_datasets([name]),
        lambda: make_card(KimiK3DFlashConfig(**TINY, training={"datasets": ["org/chats", name]})),
        lambda: DraftTrainingArguments(output_dir=str(tmp_path), use_cpu=True, datasets=[name]),
    ):
        with pytest.raises(ValueError, match="`datasets` has .*no Hub dataset"):
            refuse()


def test_arguments_for_the_card(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"output_dir": "out", "use_cpu": True, "license": "mit", "datasets": ["org/chats"]}
    assert DraftTrainingArguments(**given).datasets == ["org/chats"]
    Path("org/chats").mkdir(parents=True)
    with pytest.raises(ValueError, match="'org/chats', which lies here"):
        DraftTrainingArguments(**given)
    names = ["b/two@v1/config:test", "a/one", "a/one:train", "org/chats", "x/rows.jsonl", "rows.parquet"]
    assert hub_datasets(names) == ["a/one", "b/two"]
