"""Settings from a YAML file and the command line."""

import pytest

from blockdraft.trainer.cli.arguments import TargetArguments
from blockdraft.trainer.cli.parser import SettingsParser
from blockdraft.trainer.training_args import DraftTrainingArguments
from blockdraft.trainer.training_settings import TrainingSettings


def parse(*argv):
    return SettingsParser([TargetArguments, TrainingSettings], ["target"]).parse(argv)


def test_command_line_wins_over_yaml(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text("target: a\nlearning_rate: 1e-3\nnum_anchors: 7\ntrust_remote_code: true\nuse_cpu: true\n")
    target, args = parse(str(path), "--num_anchors", "9")
    assert (target.target, target.trust_remote_code) == ("a", True)
    assert (args.learning_rate, args.num_anchors) == (1e-3, 9)
    target, args = parse(str(path), "b", "--trust-remote-code", "false")
    assert (target.target, target.trust_remote_code, args.num_anchors) == ("b", False, 7)


def test_training_settings_are_parsed_with_those_of_transformers():
    _, args = parse("a", "--no_muon", "--use_cpu", "--max_steps", "3")
    assert isinstance(args, DraftTrainingArguments)
    assert (args.muon, args.max_steps, args.learning_rate) == (False, 3, TrainingSettings.learning_rate)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "must hold `key: value` lines"),
        ("target: [", "is not valid YAML"),
        ("target:", "`target` in .* has no value; leave the line out"),
        ("targt: a", "`targt` in .* is not a setting; the nearest one is `target`"),
        ("target: a\nnum_anchors: many", "argument --num_anchors/--num-anchors: invalid int value: 'many'"),
    ],
)
def test_errors_of_a_yaml_file_name_the_setting(text, message, tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse(str(path))


def test_a_stray_word_is_refused():
    with pytest.raises(ValueError, match="'c' belongs to no setting"):
        parse("a", "--use_cpu", "true", "c")
