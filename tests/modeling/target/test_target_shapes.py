"""A draft is for a target of certain shapes."""

import pytest
from decoding_models import build_draft, build_target
from peft import PromptTuningConfig, get_peft_model

from blockdraft.modeling.target.target_identity import target_record
from blockdraft.modeling.target.target_shapes import shape_faults


def check_shapes(target, config):
    for fault in shape_faults(target, config):
        raise ValueError(fault)


@pytest.fixture
def pair():
    target = build_target("qwen3")
    return target, build_draft(target, target=target_record(target, None))


def test_another_shape_is_an_error(pair):
    target, draft = pair
    check_shapes(target, draft.config)
    target.resize_token_embeddings(72)
    with pytest.raises(ValueError, match="`vocab_size`=64.*72"):
        check_shapes(target, draft.config)
    target.config.vocab_size = 64  # rows that only the embedding has
    with pytest.raises(ValueError, match="`target.embedding_rows`=64.*72"):
        check_shapes(target, draft.config)
    with pytest.raises(ValueError, match="`hidden_size`=16.*32"):
        check_shapes(target, build_draft(target, hidden_size=16).config)
    with pytest.raises(ValueError, match="`num_target_layers`=9.*6"):
        check_shapes(target, build_draft(target, num_target_layers=9).config)


def test_a_target_without_a_head_is_refused(pair):
    target, draft = pair
    with pytest.raises(ValueError, match="Qwen3Model has no LM head.*AutoModelForCausalLM"):
        check_shapes(target.model, draft.config)


def test_virtual_tokens_are_refused(pair):
    target, draft = pair
    adapted = get_peft_model(target, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="virtual tokens"):
        check_shapes(adapted, draft.config)
