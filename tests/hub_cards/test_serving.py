"""Who decodes with a draft: what cards say of transformers' own loop and of engines."""

import pytest
from cards import V41, code_of, config, dspark_config, third_config
from kimi_k3_dspark import add_kimi_k3_dspark

from blockdraft.hub_cards.card import THIS_REPOSITORY, make_card
from blockdraft.hub_cards.serving import has_released_layout, masked_slots_are_alike


@pytest.mark.parametrize(
    "settings, limit",
    [
        ({"input_embedding_scale": 2.0}, "multiplied by 2,"),
        ({"objective": {"loss_type": "variable_prefix"}}, "at least two known tokens"),
        ({"capture_point": "attention_input_mean"}, "hands out outputs of layers"),
    ],
)
def test_the_native_path_is_offered_only_where_it_gives_the_draft_s_own_blocks(settings, limit):
    assert limit not in make_card(config())
    card = make_card(config(**settings))
    assert limit in card and "assistant_model" not in code_of(card)


def test_engines_read_what_is_in_the_released_layout(monkeypatch):
    here = dspark_config(target=V41, capture_point="attention_input_mean", confidence_input="pre_norm")
    text = make_card(here)
    assert f'blockdraft export "{THIS_REPOSITORY}" --into TARGET_DIR' in text and '{"method": "dspark"}' in text
    assert "feeds it the state" not in text
    text = make_card(dspark_config(target=V41, capture_point="attention_input_mean"))
    assert "SGLang feeds it the state before it" in text
    assert "for DeepSeek V4.1 targets only" in make_card(dspark_config())
    assert "vLLM 0.33.0 and SGLang 0.5.23 do not read it: they know no DFlash drafts" in make_card(config())
    add_kimi_k3_dspark(monkeypatch)
    third = third_config()
    assert "know no DSpark drafts with Kimi K3's attention (MLA). Decode with" in make_card(third)
    assert [has_released_layout(known) for known in (here, config(), third)] == [True, False, False]


def test_masked_slots_that_nothing_tells_apart(monkeypatch):
    add_kimi_k3_dspark(monkeypatch)
    third = third_config()
    given = [config(), config(is_causal=True), config(sliding_window=4), dspark_config(), third]
    assert [masked_slots_are_alike(one) for one in given] == [True, False, False, False, False]
    third.markov_rank = None
    assert masked_slots_are_alike(third)
