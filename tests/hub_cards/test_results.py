"""Figures of decoding in cards and in the Hub's evaluation files: with their protocol or not at all."""

import math
import re

import pytest
import yaml
from cards import METRICS, PROTOCOL, config, metadata
from huggingface_hub import EvalResultEntry, ModelCard, parse_eval_result_entries

from blockdraft.hub_cards.card import EVALUATION, make_card, write_card

RANKED = {"tau": 2.34567, "speedup": 1.5, "protocol": PROTOCOL, "benchmark_task": "tau_greedy"}


def test_model_index_has_a_result_for_each_data_set_and_protocol():
    sampled = {"tau": 2.0, "speedup": 1.25, "protocol": PROTOCOL | {"decoding": "sampling temperature 1"}}
    results = METRICS | {"chat": [METRICS["chat"], sampled]}
    card = make_card(config(), results)
    greedy_text = "greedy, block 4, 40 prompts, up to 64 new tokens, batch 1, bfloat16, draft float32, CPU (2 threads)"
    found = [
        (r.dataset_type, r.dataset_name, r.dataset_config, r.metric_type, r.metric_value)
        for r in ModelCard(card).data.eval_results
    ]
    assert found == [
        ("chat", "chat", greedy_text, "tau", 2.3457),
        ("chat", "chat", greedy_text, "speedup", 1.5),
        ("chat", "chat", greedy_text.replace("greedy", "sampling temperature 1"), "tau", 2.0),
        ("chat", "chat", greedy_text.replace("greedy", "sampling temperature 1"), "speedup", 1.25),
        ("openai/openai_humaneval", "openai/openai_humaneval", greedy_text, "tau", 3.0),
    ]
    assert metadata(card)["model-index"][0]["name"] == "Qwen3-0.6B-DFlash"
    lines = [line for line in card.splitlines() if line.endswith("CPU (2 threads) |")]
    assert lines[0].startswith("| chat | 2.35 (2.10 to 2.60) | 2% | 1.50 (1.25 to 1.75) | greedy,")
    assert lines[2].startswith("| openai/openai_humaneval | 3.00 | - | - | greedy,")
    assert "model-index" not in metadata(make_card(config())) and "model_name" not in make_card(config())


def test_figures_of_few_prompts_are_called_a_rough_measure():
    few = {"tau": 2.0, "protocol": PROTOCOL | {"prompts": 16}}
    assert "fewer than 32 prompts are a rough measure" in make_card(config(), {"chat": few})
    assert "rough measure" not in make_card(config(), METRICS)


def test_a_benchmark_that_ranks_drafts_has_an_evaluation_file(tmp_path):
    """As the Hub's own client reads it; for no data set whose leaderboard is about something else."""
    write_card(tmp_path, config(), METRICS)
    assert not (tmp_path / ".eval_results").exists()
    sampled = RANKED | {"protocol": PROTOCOL | {"decoding": "sampling"}, "benchmark_task": "tau_sampled"}
    write_card(tmp_path, config(), METRICS | {"org/draft-bench": [RANKED, sampled]})
    notes = "greedy, block 4, 40 prompts, up to 64 new tokens, batch 1, bfloat16, draft float32, CPU (2 threads)"
    assert parse_eval_result_entries(yaml.safe_load((tmp_path / EVALUATION).read_text())) == [
        EvalResultEntry("org/draft-bench", "tau_greedy", 2.3457, notes=notes),
        EvalResultEntry("org/draft-bench", "tau_sampled", 2.3457, notes=notes.replace("greedy", "sampling")),
    ]
    assert len(metadata((tmp_path / "README.md").read_text())["model-index"][0]["results"]) == 4
    write_card(tmp_path, config(), METRICS)
    assert not (tmp_path / EVALUATION).exists()


@pytest.mark.parametrize(
    "figures, message",
    [
        ({"tau": 2.0}, "no `protocol`"),
        ({"tau": 2.0, "protocol": {"decoding": "greedy"}}, "without `block_size`"),
        ({"tau": 2.0, "protocol": PROTOCOL | {"dtype": None}}, "without `dtype`"),
        ({"accuracy": 0.9, "protocol": PROTOCOL}, "`accuracy`, which is no figure of real decoding"),
        ({"tau": math.nan, "protocol": PROTOCOL}, "`tau` = nan: leave out"),
        ({"speedup": math.inf, "protocol": PROTOCOL}, "`speedup` = inf"),
        ({"tau": None, "protocol": PROTOCOL}, "`tau` = None"),
        ({"tau": 2.0, "intervals": {"tau": [1.5, math.nan]}, "protocol": PROTOCOL}, "`intervals tau` = nan"),
        ({"tau": 2.0, "intervals": {"speedup": [1.5, 2.5]}, "protocol": PROTOCOL}, "`speedup`, which is no figure"),
        ({"acceptance_by_slot": [0.5, math.nan], "protocol": PROTOCOL}, "`acceptance_by_slot` = nan"),
        ([{"tau": 2.0, "protocol": PROTOCOL}] * 2, "two results of 'chat' by the same protocol"),
        (RANKED, "`benchmark_task` is 'tau_greedy' beside the data set 'chat'"),
    ],
)
def test_numbers_without_protocol_or_value_are_refused(figures, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        write_card(tmp_path, config(), {"chat": figures})
    assert "\n" not in str(error.value) and not any(tmp_path.iterdir())


def test_a_task_is_of_a_figure_that_was_measured():
    for wrong in ({"benchmark_task": "../x"}, {"benchmark_task": ""}):
        with pytest.raises(ValueError, match="`benchmark_task` is"):
            make_card(config(), {"org/draft-bench": RANKED | wrong})
    without_tau = {name: value for name, value in RANKED.items() if name != "tau"}
    with pytest.raises(ValueError, match="ranks drafts by tau, which has to be measured"):
        make_card(config(), {"org/draft-bench": without_tau})
