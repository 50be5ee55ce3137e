"""The fields of `TrainingArguments`: each is read by code that a draft's training runs, or refused by name."""

import ast
import inspect
from dataclasses import fields
from pathlib import Path

import pytest
import transformers
from accelerate.parallelism_config import ParallelismConfig
from draft_trainers import make_rows, make_trainer
from transformers import Trainer, TrainingArguments

from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.saving_trainer import SavingTrainer
from blockdraft.trainer.training_args import DraftTrainingArguments
from blockdraft.trainer.training_settings import NOT_TAKEN

ROOT = Path(__file__).parents[2]
# Other names of `activation_checkpointing`, what old launchers pass, and what a script that trains was asked to do.
NOT_READ = {"gradient_checkpointing", "gradient_checkpointing_kwargs", "local_rank", "do_train"}
# Reached only from methods of the Trainer that ours replace.
UNREACHED = {"evaluation_loop", "prediction_step", "_push_from_checkpoint", "hyperparameter_search", "_validate_args"}
REFUSED = {
    "include_num_input_tokens_seen": "all",
    "label_names": ["labels"],
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "eval_accumulation_steps": 2,
    "include_for_metrics": ["loss"],
    "liger_kernel_config": {"rope": True},
}


def replaced() -> set[str]:
    """Methods of the Trainer that ours replace without calling them."""
    ours = {name: method for cls in (SavingTrainer, DraftTrainer) for name, method in vars(cls).items()}
    methods = {name: m for name, m in ours.items() if inspect.isfunction(m) and hasattr(Trainer, name)}
    return {name for name, method in methods.items() if f"super().{name}(" not in inspect.getsource(method)}


def names_read(path: Path, skipped: set[str]) -> set[str]:
    """Attributes of `args`, wherever it is kept, that a file reads, but for functions of some names."""
    found, nodes = set(), [ast.parse(path.read_text(encoding="utf-8"))]
    owners = ("args", "training_args", "self") if path.name == "training_args.py" else ("args", "training_args")
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef) and node.name in skipped:
            continue
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
            found |= {node.attr} if name in owners else set()
        nodes += ast.iter_child_nodes(node)
    return found


def test_every_field_is_read_or_refused():
    folder = Path(transformers.__file__).parent
    setters = {name for name in vars(TrainingArguments) if name.startswith("set_")}
    skipped = replaced() | UNREACHED | setters
    assert {"evaluate", "_save_checkpoint"} < skipped and not {"train", "create_optimizer"} & skipped
    theirs = [*folder.glob("train*.py"), *(folder / "integrations").glob("*.py")]
    read = set().union(*(names_read(path, skipped) for path in theirs))
    ours = [*(ROOT / "trainer").rglob("*.py"), ROOT / "hub_cards/background.py"]
    read |= set().union(*(names_read(path, set()) for path in ours))
    every = {field.name for field in fields(TrainingArguments)}
    assert every - read - NOT_TAKEN.keys() - {"hub_token"} == NOT_READ
    assert NOT_TAKEN.keys() <= every


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_cannot_be_followed_is_refused_by_name(tmp_path, name):
    off, _ = NOT_TAKEN[name]
    value = REFUSED[name] if name in REFUSED else not off
    with pytest.raises(ValueError, match=f"`{name}` is not for drafts: .*Leave it out"):
        DraftTrainingArguments(str(tmp_path), use_cpu=True, **{name: value})


def test_no_row_is_split_over_devices(tmp_path):
    with pytest.raises(ValueError, match="`parallelism_config`.*`cp_size`"):
        DraftTrainingArguments(str(tmp_path), use_cpu=True, parallelism_config=ParallelismConfig(cp_size=2))


def test_a_trainer_wants_the_arguments_of_drafts(tmp_path):
    trainer = make_trainer(tmp_path)
    pair = trainer.model, trainer.target
    with pytest.raises(ValueError, match="`args` is a TrainingArguments: give `blockdraft.DraftTrainingArguments"):
        DraftTrainer(*pair, TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=make_rows())
    with pytest.raises(ValueError, match="`args` is missing: give `blockdraft.DraftTrainingArguments"):
        DraftTrainer(*pair, train_dataset=make_rows())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"eval_steps": 5}, "eval_steps"),
        ({"activation_checkpointing_kwargs": {"use_reentrant": False}}, "activation_checkpointing_kwargs"),
        ({"optim_target_modules": ["fc"]}, "optim_target_modules"),
    ],
)
def test_settings_without_effect_are_told(tmp_path, caplog, settings, name):
    with caplog.at_level("WARNING", logger="blockdraft"):
        make_trainer(tmp_path, **settings)
    assert caplog.text.count(f"`{name}` has no effect") == 1
    assert not make_trainer(tmp_path, eval_strategy="steps", eval_steps=5).args.without_effect(by_deepspeed=False)


def test_muon_under_deepspeed_is_told_and_not_recorded(tmp_path, monkeypatch, caplog):
    def shard(trainer):
        Trainer.create_accelerator_and_postprocess(trainer)
        trainer.is_deepspeed_enabled = True

    assert make_trainer(tmp_path, optim="adamw_torch").takes_muon
    monkeypatch.setattr(DraftTrainer, "create_accelerator_and_postprocess", shard)
    with caplog.at_level("WARNING", logger="blockdraft"):
        trainer = make_trainer(tmp_path, optim="adamw_torch")
    assert caplog.text.count("`muon` has no effect: DeepSpeed") == 1
    assert not trainer.takes_muon and not trainer._training_record(trainer.state)["muon"]


@pytest.mark.parametrize(("epochs", "told"), [(1, 1), (2, 0)])
def test_features_that_no_second_epoch_reads_are_told(tmp_path, caplog, epochs, told):
    with caplog.at_level("WARNING", logger="blockdraft"):
        make_trainer(tmp_path, cache_features=True, max_steps=-1, num_train_epochs=epochs).train()
    assert caplog.text.count("`cache_features` has no effect: training ends with its first epoch") == told
