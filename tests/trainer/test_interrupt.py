"""Ctrl-C or a scheduler's signal in training: the step is finished and saved, and the same call goes on from it."""

import signal

import pytest
import torch
from draft_trainers import LOAD_BEST, make_trainer, weights
from transformers import TrainerCallback

from blockdraft.trainer.interrupt import SIGNALS, SaveOnInterrupt
from blockdraft.trainer.runs import train_draft


@pytest.fixture(autouse=True)
def ctrl_c_interrupts():
    """A shell starts background jobs with Ctrl-C ignored, and the tests may be one."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


class Signalled(TrainerCallback):
    """In the middle of a step."""

    def __init__(self, step: int, *signals: int):
        self.step, self.signals = step, signals or (signal.SIGINT,)

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            for number in self.signals:
                signal.raise_signal(number)


class InterruptedInEvaluation(TrainerCallback):
    def on_evaluate(self, args, state, control, **kwargs):
        signal.raise_signal(signal.SIGINT)


def interruptible(output_dir, *callbacks, **settings):
    common = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 1e-3, "gradient_accumulation_steps": 2}
    trainer = make_trainer(output_dir, **common | settings)
    for callback in (SaveOnInterrupt(), *callbacks):
        trainer.add_callback(callback)
    return trainer


def test_the_step_is_saved_and_the_same_call_goes_on(tmp_path, capsys):
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(KeyboardInterrupt, match="after step 2"):
        train_draft(interruptible(tmp_path / "a", Signalled(2)))
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert [path.name for path in (tmp_path / "a").glob("checkpoint-*")] == ["checkpoint-2"]

    resumed = interruptible(tmp_path / "a")
    train_draft(resumed)
    assert "2 of 4 steps to go" in capsys.readouterr().out
    straight = interruptible(tmp_path / "b")
    train_draft(straight)
    for name, tensor in weights(straight).items():
        torch.testing.assert_close(weights(resumed)[name], tensor, rtol=0, atol=0)


def test_a_second_press_stops_at_once(tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train_draft(interruptible(tmp_path, Signalled(1, signal.SIGINT, signal.SIGINT)))
    assert signal.getsignal(signal.SIGINT) is handler
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_schedulers_signal_saves_the_step_however_often_it_comes(tmp_path, number, caplog):
    """A scheduler's comes to a process twice, from itself and through the launcher."""
    with pytest.raises(KeyboardInterrupt, match="after step 1, and step 1 is saved"):
        train_draft(interruptible(tmp_path, Signalled(1, number, number, number)))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert caplog.text.count("saving a checkpoint") == 1 and number.name in caplog.text


@pytest.mark.parametrize("strategy", [{"save_strategy": "steps", "save_steps": 1}, {"save_strategy": "best"}])
def test_the_step_is_kept_beside_the_best_one(tmp_path, strategy):
    """Where one checkpoint is kept, and where only the best step would be saved."""
    settings = LOAD_BEST | strategy | {"save_total_limit": 1}
    with pytest.raises(KeyboardInterrupt, match="step 3 is saved"):
        train_draft(interruptible(tmp_path / "a", Signalled(3), **settings))
    assert sorted(path.name for path in (tmp_path / "a").glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-3"]

    resumed, straight = (interruptible(tmp_path / name, **settings) for name in "ab")
    for trainer in (resumed, straight):
        train_draft(trainer)
        assert trainer.state.best_global_step == 1
    torch.testing.assert_close(weights(resumed), weights(straight), rtol=0, atol=0)


def test_the_last_step_is_saved_after_an_evaluation_that_was_interrupted(tmp_path):
    trainer = interruptible(tmp_path, InterruptedInEvaluation(), eval_strategy="steps", eval_steps=4)
    with pytest.raises(KeyboardInterrupt, match="step 4 is saved"):
        train_draft(trainer)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
