"""The report folder."""

import json

import pytest
from decoding_reports import TEXT, make_answer, make_report

from blockdraft.trainer.evaluation.report_folder import _labels, remove_reports, write_report

HISTORY = [
    {"loss": 3.0, "step": 10},
    {"loss": 2.0, "step": 20},
    {"eval_loss": 2.2, "eval_tau": float("nan"), "step": 20},
    {"train_runtime": 1.0, "step": 20},
]
PLOTS = ["acceptance_by_slot.png", "accepted_lengths.png", "loss.png", "round_time.png"]


def measured(*block_sizes: int) -> dict:
    return {size: make_report([make_answer(TEXT, [1, size, 2])], block_size=size) for size in block_sizes}


def test_writes_numbers_command_and_plots(tmp_path):
    path = write_report(tmp_path / "report", HISTORY, measured(2, 4), command="blockdraft evaluate T D")
    assert sorted(file.name for file in path.parent.iterdir()) == sorted([*PLOTS, "report.json", "report.md"])
    assert all((path.parent / name).read_bytes().startswith(b"\x89PNG") for name in PLOTS)
    text = path.read_text()
    assert "blockdraft evaluate T D" in text and "| tau (tokens a round)" in text
    assert all(f"({name})" in text for name in PLOTS)
    values = json.loads((path.parent / "report.json").read_text(), parse_constant=pytest.fail)
    assert values["log_history"][2]["eval_tau"] is None
    assert [entry["metrics"]["tau"] for entry in values["reports"]] == [5 / 3, 7 / 3]


def test_a_draft_that_was_not_trained_here_has_no_loss_curve(tmp_path):
    text = write_report(tmp_path, [], measured(4)).read_text()
    assert not (tmp_path / "loss.png").exists() and "loss.png" not in text and "Measured by" not in text


def test_no_plot_of_an_earlier_report_stays(tmp_path):
    (tmp_path / "picture.png").touch()
    write_report(tmp_path, HISTORY, measured(4))
    text = write_report(tmp_path, [], measured(4)).read_text()
    assert not (tmp_path / "loss.png").exists() and "loss.png" not in text
    remove_reports(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["picture.png"]


def test_what_the_training_logged_is_drawn(tmp_path):
    logged = {"acceptance_slot_0": 0.5, "acceptance_slot_1": 0.3, "busiest_expert": 2.0, "least_used_expert": 0.4}
    history = [entry | logged if "loss" in entry else entry for entry in HISTORY]
    text = write_report(tmp_path, history, measured(4)).read_text()
    for name in ("acceptance_in_training.png", "expert_load.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and f"({name})" in text


def test_schedules_side_by_side(tmp_path):
    names = ("off", "threshold 0.3")
    reports = {name: make_report([make_answer(TEXT, [1, 2])], confidence_schedule=name) for name in names}
    assert "| confidence schedule" in write_report(tmp_path, [], reports).read_text()
    assert _labels([*reports.values()]) == [*names] and _labels([*measured(2, 4).values()])[0] == "block size 2"


def test_reports_without_plain_decoding_or_rounds(tmp_path):
    bare = make_answer([7], [])
    bare.plain, bare.plain_step_seconds = {}, None
    write_report(tmp_path, HISTORY[:1], {4: make_report([bare], checks_equality=False)})
    assert (tmp_path / "round_time.png").exists()


def test_a_report_shows_something(tmp_path):
    with pytest.raises(ValueError, match="reports"):
        write_report(tmp_path, HISTORY, {})
