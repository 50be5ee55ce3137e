"""The line of a log, the bar under it, and where neither belongs."""

import io
import sys
from types import SimpleNamespace

import pytest
from draft_trainers import make_trainer
from transformers import PrinterCallback, ProgressCallback

from blockdraft.trainer.training_log import TrainingLog, log_line, minutes

WINDOW = {
    "rows_without_anchor": 0.0,
    "loss": 2.34567,
    "estimated_tau": 2.314,
    "supervised_tokens_per_second": 5210.4,
    "accuracy": 0.4121,
    "acceptance_slot_1": 0.5,
    "learning_rate": 5.8e-4,
    "grad_norm": 1.0,
    "epoch": 0.5,
}


def test_a_line_has_what_one_watches():
    assert log_line(WINDOW, 120, 500) == (
        "step 120/500 | loss 2.3457 | accuracy 0.412 | estimated tau 2.31 | 5,210 tokens/s | lr 5.80e-04"
    )
    evaluation = {f"eval_code_{name}": value for name, value in WINDOW.items()} | {"eval_code_tau": 2.2}
    assert log_line(evaluation | {"epoch": 1.0}, 120, 500) == (
        "step 120/500 | eval_code | loss 2.3457 | accuracy 0.412 | estimated tau 2.31 | tau 2.20 | 5,210 tokens/s "
        "| lr 5.80e-04"
    )
    # No block, no figures.
    assert log_line({"rows_without_anchor": 1.0, "loss": 0.0}, 3, 0) == "step 3 | loss 0.0000"
    assert log_line({"train_runtime": 125.0, "train_loss": 1.5, "total_flos": 0.0}, 5, 5) == (
        "step 5/5 | trained in 2 min 5 s | mean loss 1.5000"
    )
    assert log_line({"mine": 0.123456, "epoch": 2}, 5, 5) == "step 5/5 | mine 0.1235 | epoch 2"


def test_durations_are_readable():
    assert [minutes(seconds) for seconds in (0.4, 61, 3725)] == ["0 min 0 s", "1 min 1 s", "1 h 2 min"]


def terminal(monkeypatch) -> io.StringIO:
    """What is written to the error output, which is a terminal."""
    error_output = io.StringIO()
    error_output.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", error_output)
    return error_output


def test_training_prints_a_line_a_log_above_a_bar(tmp_path, monkeypatch, capsys):
    trainer = make_trainer(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2, disable_tqdm=False)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds.count(TrainingLog) == 1 and not {ProgressCallback, PrinterCallback} & set(kinds)
    error_output = terminal(monkeypatch)
    trainer.train()
    *steps, evaluation, end = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.split(" | ")[0] for line in steps] == ["step 1/2", "step 2/2"]
    assert all(" | loss " in line and line.endswith(" | lr 5.00e-02") for line in steps)
    assert evaluation.startswith("step 2/2 | eval | loss ") and end.startswith("step 2/2 | trained in ")
    assert "acceptance" not in " ".join(steps) and "acceptance_slot_1" in trainer.state.log_history[0]
    assert "training: 100%" in error_output.getvalue() and "2/2" in error_output.getvalue()


@pytest.mark.parametrize(("is_terminal", "disable_tqdm"), [(False, False), (True, True)])
def test_there_are_plain_lines_where_a_bar_does_not_belong(is_terminal, disable_tqdm, monkeypatch, capsys):
    if is_terminal:
        error_output = terminal(monkeypatch)
    args = SimpleNamespace(disable_tqdm=disable_tqdm)
    state = SimpleNamespace(is_world_process_zero=True, global_step=3, max_steps=4)
    log = TrainingLog()
    log.on_train_begin(args, state, None)
    state.global_step = 4
    log.on_step_end(args, state, None)
    log.on_log(args, state, None, logs=WINDOW)
    log.on_train_end(args, state, None)
    out, err = capsys.readouterr()
    assert out == log_line(WINDOW, 4, 4) + "\n" and err == ""
    if is_terminal:
        assert error_output.getvalue() == ""


def test_other_processes_print_nothing(capsys):
    state = SimpleNamespace(is_world_process_zero=False, global_step=3, max_steps=4)
    log = TrainingLog()
    for event in (log.on_train_begin, log.on_step_end, log.on_log, log.on_train_end):
        event(SimpleNamespace(disable_tqdm=False), state, None)
    assert capsys.readouterr() == ("", "")
