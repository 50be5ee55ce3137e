"""Model cards: metadata as the Hub takes it, runnable code, no local paths, the same bytes every time."""

import html
import math
import re
import tomllib
from pathlib import Path

import matplotlib
import pytest
from cards import (
    ADAPTER,
    CHAT,
    COMMIT,
    METRICS,
    PROTOCOL,
    TARGET,
    V41,
    code_of,
    config,
    dspark_config,
    metadata,
    recipe,
    table_of,
)
from decoding_models import build_draft, build_dspark_draft, build_target
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from blockdraft.hub_cards.card import (
    THIS_REPOSITORY,
    TRANSFORMERS_VERSION,
    check_card,
    make_card,
    rewrite_card,
    write_card,
)
from blockdraft.hub_cards.facts import text
from blockdraft.hub_cards.rules import is_repo_id
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel
from blockdraft.modeling.target.target_identity import target_record
from blockdraft.trainer.adapters import adapt, describe, save_adapter

# ---- metadata -----------------------------------------------------------------------------------------------------


def test_metadata_of_a_draft():
    given = recipe(license="apache-2.0", datasets=["HuggingFaceH4/ultrachat_200k"])
    assert metadata(make_card(config(**given))) == {
        "base_model": "Qwen/Qwen3-0.6B",
        "base_model_relation": "adapter",
        "datasets": ["HuggingFaceH4/ultrachat_200k"],
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "blockdraft", "dflash", "kimi_k3_dflash", "kimi_k3"],
    }
    assert metadata(make_card(dspark_config()))["tags"][3:] == ["dspark", "deepseek_v41_dspark", "deepseek_v41"]


def test_licence():
    of_target = metadata(make_card(config()))
    assert (of_target["license"], of_target["license_name"]) == ("other", "terms-of-the-base-model")
    assert of_target["license_link"] == "https://huggingface.co/Qwen/Qwen3-0.6B"
    assert metadata(make_card(config(target=None)))["license"] == "unknown"
    assert metadata(make_card(config(**recipe(license="mit")), license="gemma"))["license"] == "gemma"
    assert "licensed under gemma" in make_card(config(), license="gemma")


def test_a_licence_of_one_s_own():
    own = {"license": "other", "license_name": "House [1] licence", "license_link": "LICENSE"}
    for card in (make_card(config(**recipe(**own))), make_card(config(**recipe(license="mit")), **own)):
        assert {name: metadata(card)[name] for name in own} == own
        assert card.endswith("The weights are licensed under [House \\[1\\] licence](LICENSE).\n")
        assert "license" not in " ".join(table_of(card, "Training"))
    with pytest.raises(ValueError, match="`license_link` is missing"):
        make_card(config(), license="other", license_name="mine")


@pytest.mark.parametrize(
    "card, message",
    [
        ("# No metadata\n", "has no metadata"),
        ("---\n---\n", "has no metadata"),
        ("---\nlicense: [mit\n---\n", "is not valid"),
        ("---\n- mit\n---\n", "is not valid"),
        ("---\nmodel-index:\n- name: d\n---\n", "is not valid"),
    ],
)
def test_metadata_that_cannot_be_read(card, message):
    with pytest.raises(ValueError, match=message) as error:
        check_card(card)
    assert "\n" not in str(error.value)


# ---- text ---------------------------------------------------------------------------------------------------------


def test_says_what_it_is_and_how_to_decode():
    card = make_card(config(**recipe(datasets=["org/chats"])), METRICS)
    facts, training = table_of(card, "What it is"), table_of(card, "Training")
    assert facts["block"] == "4 slots: 1 known, 3 drafted" and facts["mask token id"] == "63"
    assert facts["target layers read"] == "1, 3 of 6, zero-based: their outputs"
    assert facts["target's revision"] == COMMIT and facts["target in training"] == "bfloat16"
    assert facts["target's fingerprint"] == f"embedding {'ab' * 8}"
    assert training["learning rate"] == "0.0006" and training["loss decay gamma"] == "4"
    assert training["labels"] == "the tokens of the data" and training["loss type"] == "fixed_anchor"
    assert training["versions"] == "blockdraft 0.1.0, torch 2.13.0"
    assert training["data"] == "[org/chats](https://huggingface.co/datasets/org/chats)"
    code = code_of(card)
    assert 'target_id = "Qwen/Qwen3-0.6B"' in code and code.count(f'revision="{COMMIT}"') == 2
    assert 'draft_id, commit = "<this repository>", "<commit sha>"  # fill in the commit' in code
    assert '"custom_generate": draft_id, "revision": commit, "trust_remote_code": True' in code
    assert 'assistant_model=draft, speculation_type="dflash"' in code and "import blockdraft" not in code
    assert "proposes 3 tokens in one forward pass" in card and f'"transformers>={TRANSFORMERS_VERSION}"' in card
    assert "![Rounds that accept each drafted token. chat: 70, 40, 25 %](acceptance.png)" in card


def test_the_version_of_transformers_is_the_package_s():
    with open(Path(__file__).parents[2] / "pyproject.toml", "rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    assert any(re.match(rf"transformers>={re.escape(TRANSFORMERS_VERSION)}\b", line) for line in dependencies)


def test_own_targets_need_the_package():
    """Which no index has: cards name it and do not say how to install it."""
    card = make_card(config(target=TARGET | {"model_type": "kimi_k3_text"}))
    assert code_of(card).startswith("import blockdraft") and "from the `blockdraft` package, which has to be" in card
    dspark = dspark_config(target=V41, capture_point="attention_input_mean")
    for page in (card, make_card(config()), make_card(dspark), make_card(dspark, adapter=ADAPTER)):
        [install] = re.findall(r"```bash\n(pip .*)\n```", page)
        assert "blockdraft" not in install


def test_dspark_card():
    card = make_card(dspark_config(target=V41, capture_point="attention_input_mean"), METRICS)
    code = code_of(card)
    assert code.startswith("import blockdraft") and "speculation_type" not in code and "custom_generate" in code
    assert "ConfidenceThreshold" in card and "not calibrated" in card
    assert "ConfidenceThreshold" not in make_card(dspark_config(markov_rank=None))


def test_adapter_card():
    card = make_card(config(**recipe(adapter={"r": 8, "base": "user/base-draft"})), METRICS, ADAPTER)
    data = metadata(card)
    assert (data["base_model"], data["base_model_relation"], data["library_name"]) == (
        "user/base-draft",
        "adapter",
        "peft",
    )
    assert data["license_link"] == "https://huggingface.co/user/base-draft" and "lora" in data["tags"]
    assert data["model-index"][0]["results"][0]["metrics"][0]["type"] == "tau"
    facts = table_of(card, "What it is")
    assert facts["trained"] == "12,345 of 1,234,567 parameters (1.00%)" and facts["adapter"] == "LoRA, rank 8"
    assert facts["its revision"] == ADAPTER["base_revision"] and facts["target's revision"] == COMMIT
    assert table_of(card, "Training")["adapter"] == "base user/base-draft, r 8"
    code = code_of(card)
    assert "AutoPeftModelForFeatureExtraction.from_pretrained(" in code and "merge_and_unload()" in code
    assert f'base_id, base_commit = "user/base-draft", "{ADAPTER["base_revision"]}"' in code
    assert "# LoRA adapter of a DFlash draft for Qwen/Qwen3-0.6B" in card


def test_a_published_card_names_its_repository():
    """In every place that is kept for it, by a name that no repository can have."""
    draft = make_card(dspark_config(target=V41, capture_point="attention_input_mean"))
    cards = (draft, make_card(config(), adapter=ADAPTER))
    published = [card.replace(THIS_REPOSITORY, "me/mine") for card in cards]
    assert 'draft_id, commit = "me/mine", "<commit sha>"' in code_of(published[0])
    assert 'blockdraft export "me/mine" --into TARGET_DIR' in published[0]
    assert '    "me/mine", revision=' in code_of(published[1]) and 'load_draft("me/mine", ' in published[1]
    assert [card.count("me/mine") for card in published] == [card.count(THIS_REPOSITORY) for card in cards] == [2, 2]
    assert not is_repo_id(THIS_REPOSITORY)


def test_adapter_of_a_base_in_a_directory():
    local = ADAPTER | {"base": "/home/someone/base-draft", "base_revision": None, "peft_type": "DoRA"}
    card = make_card(dspark_config(), adapter=local)
    assert "someone" not in card and "None" not in card and "base_model" not in metadata(card)
    assert metadata(card)["license_link"] == "https://huggingface.co/Qwen/Qwen3-0.6B"
    assert 'base_id, base_commit = "path/to/the/base/draft", "<commit sha>"' in code_of(card)
    assert "dora" in metadata(card)["tags"] and "base draft" not in table_of(card, "What it is")


def test_the_code_of_the_cards_runs(tmp_path, chat_tokenizer):
    """As in the card, with other places: it decodes what the target decodes greedily."""
    shape = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 48}
    target = LlamaForCausalLM(LlamaConfig(vocab_size=len(chat_tokenizer), bos_token_id=None, **shape))
    target.save_pretrained(tmp_path / "target")
    chat_tokenizer.save_pretrained(tmp_path / "target")
    cards = {}
    for family, build in (("dflash", build_draft), ("dspark", build_dspark_draft)):
        draft = build(target)
        draft.save_pretrained(tmp_path / family)
        cards[family] = make_card(draft.config).replace(THIS_REPOSITORY, str(tmp_path / family))
    model = adapt(KimiK3DFlashDraftModel.from_pretrained(tmp_path / "dflash"), LoraConfig(r=2))
    save_adapter(tmp_path / "adapter", model)
    card = make_card(model.config, adapter=describe(model)).replace("path/to/the/base/draft", str(tmp_path / "dflash"))
    cards["adapter"] = card.replace(THIS_REPOSITORY, str(tmp_path / "adapter"))
    for card in cards.values():
        code = code_of(card).replace("path/to/the/target", str(tmp_path / "target")).replace("tokens=256", "tokens=8")
        names = {}
        exec(code, names)
        plain = names["target"].generate(**names["inputs"], max_new_tokens=8, do_sample=False)
        assert names["output"].tolist() == plain.tolist()


# ---- nothing local, nothing empty ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/data/models/target", "./target", "../a/b", "out/run/target", "target", "a b/c", ""]
)
def test_a_local_target_is_not_named(path):
    card = make_card(config(target=TARGET | {"name_or_path": path}), METRICS)
    assert "base_model" not in metadata(card) and "base_model_relation" not in metadata(card)
    assert path in ("", "target") or path not in card
    assert 'target_id = "path/to/the/target"' in code_of(card) and COMMIT not in card
    assert "# DFlash draft for a Qwen3ForCausalLM language model" in card


def test_the_record_of_a_target_in_a_directory_keeps_the_folder_s_name_alone(tmp_path, monkeypatch):
    """`owner/name` can be a directory as well: what a card shows must not depend on where it is written."""
    (tmp_path / "owner/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    target = build_target("qwen3")
    for name in ("owner/name", str(tmp_path / "owner/name"), "owner/name/"):
        target.config.name_or_path = name
        assert target_record(target, None)["name_or_path"] == "name"
    target.config.name_or_path = "owner/other"
    assert target_record(target, None)["name_or_path"] == "owner/other"


@pytest.mark.parametrize("adapter", [None, ADAPTER])
def test_what_says_nothing_or_too_much_is_left_out(adapter):
    settings = {
        "epoch": None,
        "noise": math.nan,
        "adapter": {"base": "/home/someone/draft", "r": 4, "alpha": None},
        "data": "/home/someone/rows.jsonl",
        "more_data": ["C:\\rows.jsonl", "~/rows", "./rows"],
        "extra": {},
    }
    given = config(**recipe(**settings), target={"architecture": "LlamaForCausalLM", "revision": None, "dtype": None})
    for metrics in (None, METRICS):
        card = make_card(given, metrics, adapter)
        for word in ("someone", "None", "nan", "null", "rows", "{{", "{%", "\n\n\n", "epoch", "noise"):
            assert word not in card, word
        assert table_of(card, "Training")["adapter"] == "r 4"
        check_card(card)


def test_a_draft_without_provenance_says_so():
    card = make_card(config(target=None, objective=None, training=None))
    assert "does not say how it was trained" in card and "## Results" not in card
    assert "a causal language model" in card and code_of(card)


# ---- the same bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_config", [config, dspark_config])
def test_the_same_card_after_a_reload_anywhere(make_config, tmp_path, monkeypatch):
    given = make_config(**recipe(license="mit", adapter={"r": 1, "base": "a/b"}))
    first, second = tmp_path / "first", tmp_path / "elsewhere/second"
    given.save_pretrained(first)
    assert write_card(first, given, METRICS) == first / "README.md"
    (tmp_path / "Qwen/Qwen3-0.6B").mkdir(parents=True)  # a directory that is called like the target
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(matplotlib.rcParams, "axes.facecolor", "red")
    reloaded = type(given).from_pretrained(first)
    write_card(second, reloaded, METRICS)
    names = ["README.md", "acceptance.png", "metrics.json"]
    written = {name: (first / name).read_bytes() for name in names}
    assert {name: (second / name).read_bytes() for name in names} == written
    reloaded.save_pretrained(second)
    rewrite_card(second, type(given).from_pretrained(second))  # with the metrics there
    assert {name: (second / name).read_bytes() for name in names} == written
    assert written["acceptance.png"].startswith(b"\x89PNG") and len(written["acceptance.png"]) < 60_000
    assert b"matplotlib" not in written["acceptance.png"]


# ---- hostile names ------------------------------------------------------------------------------------------------

HOSTILE = [
    'a: b\n---\nlicense: mit\n---\n# "hi" | x',
    "</td><script>alert(1)</script>",
    "[a](javascript:x) ![b](/c) `d` | e ```",
    "{{ 7 * 7 }}{% raw %}",
    "$x_1$ & &lt; \\ \u2028 \x85 \t end",
    "!!python/object:os.system {a: [b",
    "__hidden__ 🙂 数据",
    "|",
]


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text(name, tmp_path):
    settings = {
        "target": TARGET | {"architecture": name, "revision": f'x", trust_remote_code=True, y="{name}'},
        "objective": {"loss_type": name, name: name},
        "training": {name: {name: name}},
    }
    metrics = {name: CHAT | {"protocol": PROTOCOL | {"hardware": name}}}
    for adapter in (None, ADAPTER | {"base": name, "peft_type": name, "base_revision": name}):
        card = write_card(tmp_path, config(**settings), metrics, adapter).read_text()
        check_card(card)
        data = metadata(card)
        plain = " ".join(name.split())
        assert data["license"] == "other" and data["model-index"][0]["results"][0]["dataset"]["name"] == plain
        body = card.split("\n---\n", 1)[1]
        assert "<script" not in body and "](javascript" not in body.replace("\\](", "") and "49" not in body
        assert "trust_remote_code=True, y" not in card
        tables = [line for line in body.splitlines() if line.startswith("|")]
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {3, 6}  # two columns, and the results' five
        assert code_of(card) and (tmp_path / "acceptance.png").stat().st_size > 5_000
        row = next(line for line in tables if line.endswith(f"{text(name)} |") and "batch 1" in line)
        assert html.unescape(re.sub(r"\\(.)", r"\1", row)).startswith(f"| {plain} | 2.35 (")
