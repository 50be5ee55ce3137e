"""Verifying as many tokens as pay for their time, and what they cost."""

import math

import pytest
import torch
from decoding_models import build_draft, build_dspark_draft, build_target, prompts, reveal

from blockdraft.modeling.decoding import cost_table
from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.modeling.decoding.cost_table import CostTable, measure_cost_table
from blockdraft.modeling.decoding.decoding_state import DecodedSequence
from blockdraft.trainer.evaluation.decoding import cost_table as cost_table_of_a_run

LINEAR = {"tokens": [1, 2, 3, 4, 5, 6], "seconds": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]}


def test_cost_table_weighs_tokens_against_time():
    table = CostTable(**LINEAR)
    assert table([1.0] * 5) == 5
    assert table([0.0] * 5) == 0
    # 1.2 / 1.1 > 1 / 1; then (1.2 + 0.2 * x) / 1.2 > 1.2 / 1.1 needs x > 0.55.
    assert table([0.2, 0.5, 1.0, 1.0, 1.0]) == 1
    assert table([0.2, 0.6, 0.0, 1.0, 1.0]) == 2
    assert table([]) == 0
    # Free tokens: all that have any chance, but not the hopeless.
    assert CostTable([1, 8], [1.0, 2.0])([0.5, 0.5, 0.0, 1.0]) == 2
    assert CostTable([1, 8], [1.0, 2.0])([0.5, 1e-7, 1.0]) == 1


def test_the_walk_stops_at_the_first_rise_that_fails():
    stairs = CostTable([1, 2], [1.0, 2.0])
    assert stairs([0.9, 0.9, 0.9]) == 0  # 1.9 tokens in 2 s are fewer a second than 1 in 1 s, though 3.4 are more
    assert stairs([1.0, 1.0]) == 0  # no fewer, but no more either
    assert CostTable([1, 2, 3], [1.0, 1.5, 2.0])([0.8, 1.0]) == 2


def test_cost_table_is_a_step_function():
    table = CostTable([2, 4, 8], [1.0, 2.0, 4.0])
    assert [table.round_seconds(n) for n in (1, 2, 3, 4, 7, 8, 100)] == [1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert CostTable([4], [1.0])([0.0, 0.0]) == 2  # no profile: everything


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"tokens": [], "seconds": []}, "at least one"),
        ({"tokens": [1, 2], "seconds": [1.0]}, "2 and 1 entries"),
        ({"tokens": [2, 2], "seconds": [1.0, 1.0]}, "strictly increasing"),
        ({"tokens": [0, 2], "seconds": [1.0, 1.0]}, "positive"),
        ({"tokens": [1, 2], "seconds": [1.0, 0.0]}, "`seconds`"),
        ({"tokens": [1, 2], "seconds": [1.0, math.nan]}, "`seconds`"),
    ],
)
def test_impossible_tables_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        CostTable(**settings)


def test_measured_table_covers_every_length_and_is_monotone():
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    draft = build_dspark_draft(target, block_size=3)
    table = measure_cost_table(target, draft, input_ids, max_new_tokens=24, rounds=3)
    assert table.tokens == [1, 2, 3, 4]
    assert all(0 < a <= b for a, b in zip(table.seconds, table.seconds[1:], strict=False))
    settings = {"do_sample": False, "max_new_tokens": 16}
    output = block_decode(target, input_ids, draft=draft, confidence_schedule=table, **settings)
    assert torch.equal(output, target.generate(input_ids, **settings))


def test_a_length_costs_the_time_of_the_rounds_that_verify_it(monkeypatch):
    """A clock that only the target's forward moves, by the square of its tokens; 7 for the draft."""
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    draft, now = build_dspark_draft(target, block_size=3), [0.0]
    monkeypatch.setattr(cost_table.time, "perf_counter", lambda: now[0])
    target.register_forward_hook(
        lambda module, args, kwargs, _: now.append(now.pop() + _tokens(kwargs) ** 2), with_kwargs=True
    )
    draft.register_forward_hook(lambda *_: now.append(now.pop() + 7))
    table = measure_cost_table(target, draft, input_ids, max_new_tokens=24, rounds=3)
    assert table.seconds == [8, 11, 16, 23]


def _tokens(kwargs: dict) -> int:
    return kwargs["input_ids"].shape[1]


@pytest.mark.parametrize("block_size", [3, 5])
def test_every_length_is_timed_in_the_shortest_answers(block_size):
    """With a draft that is always right, whose longest round all but fills an answer, and a stop token inside."""
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    answer = target.generate(input_ids, do_sample=False, max_new_tokens=24)
    target.generation_config.eos_token_id = answer[0, input_ids.shape[1] + 3].item()
    draft = reveal(build_dspark_draft(target, block_size=block_size), target, answer, fault_every=1000)
    table = measure_cost_table(target, draft, input_ids, max_new_tokens=block_size + 4, rounds=1)
    assert table.tokens == list(range(1, block_size + 2))
    with pytest.raises(ValueError, match=f"`max_new_tokens` is {block_size + 3}.*at least {block_size + 4}"):
        measure_cost_table(target, draft, input_ids, max_new_tokens=block_size + 3)


def test_the_commands_rounds_cost_what_served_ones_do(monkeypatch):
    """No processor that looks at each row by itself."""
    target = build_target("qwen3")
    monkeypatch.setattr(DecodedSequence, "_process_row", None)
    target.generation_config.eos_token_id = 62
    table = cost_table_of_a_run(target, build_dspark_draft(target, block_size=3), prompts(1)[0][0].tolist(), 16)
    assert table.tokens == [1, 2, 3, 4]


def test_measuring_needs_a_confidence_head():
    target, input_ids = build_target("qwen3"), prompts(1)[0]
    with pytest.raises(ValueError, match="confidence head"):
        measure_cost_table(target, build_draft(target), input_ids)
