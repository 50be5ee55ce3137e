"""The numbers of a report, from answers made by hand."""

import json
import math

import numpy as np
import pytest
from decoding_reports import LOOP, TEXT, make_answer, make_report

from blockdraft.hub_cards.results import read_results
from blockdraft.trainer.evaluation.decoding_report import decoding_table


def test_loops_are_counted_apart():
    both = make_report([make_answer(LOOP, [4, 4, 4, 3]), make_answer(TEXT, [2, 3, 1, 1, 1, 2, 2, 3])])
    assert both.tau == 30 / 12
    assert both.tau_without_loops == 15 / 8
    assert both.metrics()["looping_answers"] == 1 and both.looping_share == 0.5
    assert math.isnan(make_report([make_answer(LOOP, [4])]).tau_without_loops)


def test_slots_of_both_layouts():
    lengths = [1, 4, 4, 5]
    apart = make_report([make_answer(TEXT, lengths[:3])], block_size=4)
    first = make_report([make_answer(TEXT, lengths)], block_size=4, drafted=4)
    assert apart.histogram == {1: 1, 2: 0, 3: 0, 4: 2} and apart.acceptance_by_slot == [2 / 3] * 3
    assert first.histogram == {1: 1, 2: 0, 3: 0, 4: 2, 5: 1} and first.acceptance_by_slot == [0.75] * 3 + [0.25]
    assert sum(first.acceptance_by_slot) == first.tau - 1


def test_rows_through_the_target():
    report = make_report([make_answer(TEXT, [2, 3], rows=4), make_answer(TEXT, [1], rows=2)])
    assert report.rows_per_token == report.metrics()["rows_per_token"] == 10 / 6
    assert math.isnan(make_report([make_answer(TEXT, [])]).rows_per_token)


def test_speed():
    measured = make_report([make_answer(TEXT, [4, 4, 4, 3])])
    metrics = measured.metrics()
    assert metrics["tokens_per_second"] == 8
    assert metrics["baseline_tokens_per_second"] == pytest.approx(16 / 3)  # the faster of both
    assert metrics["speedup"] == 1.5
    assert measured.round_seconds == pytest.approx({"target": 0.6, "draft": 0.3, "rest": 0.1})
    assert [metrics[f"{part}_share"] for part in ("target", "draft", "rest")] == pytest.approx([0.6, 0.3, 0.1])
    assert metrics["verification_steps"] == pytest.approx(1.5) and metrics["draft_steps"] == pytest.approx(0.75)


def test_differences_are_allowed_at_ties_of_one_answer_in_a_hundred():
    equal = [make_answer(TEXT, [1])] * 99
    assert make_report(equal).equal_to_greedy is True
    assert make_report([*equal, make_answer(TEXT, [1], gap=5e-5)]).equal_to_greedy is True
    assert make_report([*equal, make_answer(TEXT, [1], gap=2e-4)]).equal_to_greedy is False
    assert make_report([*equal[:98], *[make_answer(TEXT, [1], gap=5e-5)] * 2]).equal_to_greedy is False
    unjudged = make_report([make_answer(TEXT, [1], gap=1.0)], checks_equality=False)
    assert unjudged.equal_to_greedy is None
    assert unjudged.metrics()["differences"] == 1 and unjudged.metrics()["differences_at_ties"] == 0
    assert unjudged.differences == [{"prompt": 0, "position": 3, "gap": 1.0}]


def test_intervals_come_from_resampled_prompts():
    """Two kinds of answers, 8 tokens a second with the draft in one and 4 in the other; a plain decoder makes 4."""
    slow = make_answer(TEXT, [2] * 8)
    slow.seconds["wall"], slow.plain = 4.0, {"generate()": (16, 4.0), "plain loop": (16, 4.0)}
    fast = make_answer(TEXT, [4] * 4)
    fast.plain = slow.plain
    report = make_report([slow, fast] * 50)
    low, high = report.interval("tau")
    assert 2 < low < report.tau == 8 / 3 < high < 4
    # Rounds are known to be 8 - 4x of prompts of which a share x is fast, so tau is 4 / (2 - x).
    shares = np.random.default_rng(1).binomial(100, 0.5, size=100_000) / 100
    assert [low, high] == pytest.approx(np.percentile(4 / (2 - shares), (2.5, 97.5)).tolist(), abs=0.02)
    expected = np.percentile(16 / (4 - 2 * shares) / 4, (2.5, 97.5)).tolist()
    assert report.interval("speedup") == pytest.approx(expected, abs=0.02)
    metrics = report.metrics()
    assert (metrics["tau_low"], metrics["tau_high"]) == (low, high)
    assert metrics["tau_without_loops_low"] == low
    assert f"{report.tau:.2f} ({low:.2f} to {high:.2f})" in report.table()
    assert report.headline()["intervals"]["speedup"] == [metrics["speedup_low"], metrics["speedup_high"]]
    assert all(math.isnan(limit) for limit in make_report([slow]).interval("tau"))
    assert all(math.isnan(limit) for limit in make_report([make_answer(TEXT, [])] * 3).interval("tau"))
    assert make_report([slow] * 3).interval("tau") == (2, 2)


def test_few_prompts_are_called_a_rough_measure():
    assert "16 (few: a rough measure); 16 tokens" in make_report([make_answer(TEXT, [2])] * 16).table()
    assert "few" not in make_report([make_answer(TEXT, [2])] * 32).table()


def test_json_has_no_nan():
    values = make_report([make_answer(LOOP, [4])]).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False))["metrics"]["tau_without_loops"] is None
    assert values["answers"][0]["accepted_lengths"] == [4]


def test_table_has_a_column_for_each_block_size():
    lines = decoding_table([make_report([make_answer(TEXT, [2, 2])], block_size=size) for size in (2, 4)]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["block size", "2", "4"]
    assert ["tau (tokens a round)", "2.00", "2.00"] in cells
    assert ["speed-up over plain loop", "1.50x", "1.50x"] in cells
    assert len({len(line) for line in lines}) == 1


def test_table_of_schedules():
    answers = [make_answer(TEXT, [2, 2])]
    reports = [make_report(answers, confidence_schedule=name) for name in ("off", "threshold 0.3")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in decoding_table(reports).splitlines()]
    assert cells[0] == ["confidence schedule", "off", "threshold 0.3"]
    assert sum("confidence schedule" in line for line in cells) == 1
    one = decoding_table(reports[1:])
    assert "| block size" in one and "| confidence schedule" in one and "threshold 0.3" in one


def test_headline_has_what_was_measured_and_how():
    report = make_report([make_answer(TEXT, [1, 4, 4]), make_answer(LOOP, [3, 4])])
    headline = report.headline()
    assert set(headline.pop("intervals")) == {"tau", "speedup"}
    assert headline == {
        "tau": 3.2,
        "tau_without_loops": 3.0,
        "looping_share": 0.5,
        "speedup": 1.5,
        "acceptance_by_slot": [0.8, 0.8, 0.6],
        "protocol": {
            "decoding": "greedy",
            "block_size": 4,
            "prompts": 2,
            "max_new_tokens": 16,
            "batch_size": 1,
            "dtype": "float32",
            "draft_dtype": "bfloat16",
            "hardware": "CPU (2 threads)",
        },
    }
    cut = make_report([make_answer(TEXT, [2])], confidence_schedule="threshold 0.3")
    assert cut.headline()["protocol"]["confidence_schedule"] == "threshold 0.3"
    bare = make_answer([7], [])
    bare.plain, bare.plain_step_seconds = {}, None
    assert set(make_report([bare]).headline()) == {"looping_share", "protocol"}
    [result] = read_results({"chat": report.headline()})
    assert result.acceptance == (0.8, 0.8, 0.6) and json.loads(json.dumps(report.headline(), allow_nan=False))
