"""What cards say of a draft: read off its settings, in words, whatever its family."""

import pytest
from cards import TARGET, V41, config, dspark_config, table_of, third_config
from kimi_k3_dspark import add_kimi_k3_dspark

from blockdraft.hub_cards.card import make_card
from blockdraft.hub_cards.facts import recipe


def facts(config) -> dict[str, str]:
    return table_of(make_card(config), "What it is")


def test_what_only_dspark_has():
    settings = {"capture_point": "attention_input_mean", "confidence_temperatures": [1.0, 1.25, 1.5, 2.0]}
    known = facts(dspark_config(target=V41, **settings))
    assert known["block"].startswith("4 slots: the first slot reads the last known token")
    assert known["context window"] == "6 tokens" and known["Markov head"] == "rank 8"
    assert known["experts"] == "5 per layer; each token uses 2 and a shared one"
    assert known["confidence head"] == "reads the state after the final norm (post_norm)"
    assert known["confidence temperatures by slot"] == "1, 1.25, 1.5, 2"
    assert known["target layers read"].endswith("the input of their attention, averaged over its streams")
    assert "before the final norm (pre_norm)" in facts(dspark_config(confidence_input="pre_norm"))["confidence head"]
    bare = dspark_config(markov_rank=None)
    assert facts(bare)["Markov head"] == facts(bare)["confidence head"] == "none"
    assert "confidence temperatures by slot" not in facts(bare) and "calibrate" not in make_card(bare)
    assert "not calibrated" in make_card(dspark_config())
    assert recipe(dspark_config(objective={"loss_type": "dspark"}))["labels"].endswith("the target's own distribution")
    assert not {"Markov head", "confidence head", "experts"} & facts(config()).keys()


def test_a_draft_of_another_family(monkeypatch):
    """A line in the table of families gives it a card."""
    add_kimi_k3_dspark(monkeypatch)
    card = make_card(third_config(num_hidden_layers=3, sliding_window=4, num_full_attention_layers=1))
    known = table_of(card, "What it is")
    assert known["Markov head"] == "rank 4" and known["confidence temperatures by slot"] == "not calibrated"
    assert known["context window"] == "4 tokens; the last layer sees the whole context" and "experts" not in known
    assert "# DSpark draft for Qwen/Qwen3-0.6B" in card and "- kimi_k3_dspark\n- kimi_k3\n" in card
    assert "ConfidenceThreshold" in card and "`blockdraft calibrate`" in card


def test_the_form_of_the_target_is_named():
    card = make_card(
        config(target=TARGET | {"quantization": "mxfp4", "adapters": ["LORA"], "weights_sha256": "f" * 64})
    )
    known = table_of(card, "What it is")
    assert known["target in training"] == "bfloat16, quantised (mxfp4), with adapters (LORA)"
    assert known["target's fingerprint"] == f"weights {'f' * 16}, embedding {'ab' * 8}"
    assert "load the target with the same adapter" in card and "PEFT" not in make_card(config())


def test_a_draft_of_variable_prefixes_drafts_one_token_less():
    variable = config(objective={"loss_type": "variable_prefix"})
    assert (config().num_drafted, variable.num_drafted, dspark_config().num_drafted) == (3, 2, 4)
    assert config(objective={"loss_type": "variable_prefix"}, block_size=2).num_drafted == 1
    assert facts(variable)["block"] == "4 slots: 2 known, 2 drafted"


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"sliding_window": None}, "whole context"),
        ({"sliding_window": 4}, "4 tokens"),
        ({"sliding_window": 4, "num_full_attention_layers": 1}, "4 tokens; the last layer sees the whole context"),
        ({"sliding_window": 4, "num_full_attention_layers": 2}, "4 tokens; the last 2 layers see the whole context"),
    ],
)
def test_the_context_of_each_layer_is_said(settings, says):
    assert facts(config(num_hidden_layers=3, **settings))["context window"] == says
