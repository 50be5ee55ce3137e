"""How many tokens targets can read: found where beyond a table there are no positions, and nowhere else."""

import pytest
import torch
from any_targets import CASES, GPT, LLAMA, Case, build

from blockdraft.modeling.target.positions import check_length, has_position_table, position_limit

NARROW = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64, "bos_token_id": None, "eos_token_id": None}
TABLES = {
    "gpt_neo": Case("gpt_neo", GPT | {"attention_types": [[["global"], 4]]}),
    "gptj": Case("gptj", NARROW | {"rotary_dim": 4, "n_positions": 40}),
    "codegen": Case("codegen", NARROW | {"rotary_dim": 4, "n_positions": 40}),
    "ctrl": Case("ctrl", {"vocab_size": 64, "n_embd": 32, "dff": 32, "n_layer": 1, "n_head": 4, "n_positions": 40}),
    "gpt_bigcode": Case("gpt_bigcode", NARROW | {"n_positions": 40}),
    "biogpt": Case("biogpt", GPT | {"intermediate_size": 48, "max_position_embeddings": 40}),
}
ALL = TABLES | {name: CASES[name] for name in ("gpt2", "opt", "gpt1", "tied", "gpt_neox", "falcon", "phi", "bloom")}


@pytest.mark.parametrize("name", ALL)
def test_a_table_of_positions_is_found_where_reading_beyond_it_fails(name):
    target = build(ALL[name])
    limit = position_limit(target)
    assert (limit is None) == (name == "bloom")
    ids, places = torch.ones(1, 1, dtype=torch.long), torch.tensor([[limit or 4096]])
    inputs = {"input_ids": ids} | ({} if limit is None else {"position_ids": places})
    with torch.no_grad():
        target(**inputs | ({} if limit is None else {"position_ids": places - 1}))
        try:
            target(**inputs)
            reads_on = True
        except IndexError:
            reads_on = False
    assert has_position_table(target) != reads_on


def test_more_tokens_than_positions_are_refused_or_warned_of(caplog):
    learned, computed = build(CASES["gpt2"]), build(CASES["tied"])
    check_length(learned, 1024, "`max_length`", "Lower it.")
    with pytest.raises(ValueError, match="`max_length`: 1025 tokens, more than the 1024 positions of the target"):
        check_length(learned, 1025, "`max_length`", "Lower it.")
    check_length(computed, LLAMA["max_position_embeddings"], "`max_length`", "Lower it.")
    assert not caplog.text
    check_length(computed, LLAMA["max_position_embeddings"] + 1, "`max_length`", "Lower it.")
    assert "`max_length`: 65 tokens, more than the 64 positions of the target, LlamaForCausalLM, beyond" in caplog.text
