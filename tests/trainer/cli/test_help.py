"""The text of `--help`: every setting, its group, its real default."""

from dataclasses import MISSING, fields

import pytest

from blockdraft.trainer.cli.evaluate import EvaluateArguments
from blockdraft.trainer.cli.help import TRAINING_GROUPS, help_text, settings_of, training_groups, transformers_settings
from blockdraft.trainer.cli.train import SETTINGS
from blockdraft.trainer.training_args import DraftTrainingArguments
from blockdraft.trainer.training_settings import TrainingSettings

REAL = {field.name: field for field in fields(DraftTrainingArguments) if field.init}


def test_settings_of_transformers_are_those_of_the_installed_version():
    own = {field.name for field in fields(TrainingSettings)}
    found = transformers_settings()
    assert found.keys() - own == REAL.keys() - own
    for name in found.keys() - own:
        default = REAL[name].default
        if default is MISSING:
            assert "(default:" not in found[name].text
        elif default in (None, ""):
            assert found[name].text == REAL[name].metadata["help"]
        else:
            shown = str(default).lower() if isinstance(default, bool) else default
            assert found[name].text == f"{REAL[name].metadata['help']} (default: {shown})"


def test_the_groups_have_every_training_setting_of_ours_once():
    names = " ".join(TRAINING_GROUPS.values()).split()
    assert len(names) == len(set(names)) and set(names) <= REAL.keys()
    # A setting that must keep its default is among the rest.
    assert {field.name for field in fields(TrainingSettings)} - set(names) == {"remove_unused_columns"}
    for group in training_groups().values():
        for setting in group:
            name = setting.options[0].removeprefix("--")
            default = REAL[name].default
            assert default in (None, "") or f"(default: {str(default).lower()})" in setting.text.lower()


@pytest.mark.parametrize("everything", [False, True])
def test_help_of_training_has_groups_and_says_where_the_rest_is(everything):
    text = help_text("blockdraft train", "Trains.", SETTINGS, everything)
    titles = [*TRAINING_GROUPS, *(title for title, dtype in SETTINGS.items() if dtype is not TrainingSettings)]
    assert all(f"\n{title}:\n" in text for title in titles)
    assert "--target STR Target model: a directory or a Hub id. (required) --target_revision" in " ".join(text.split())
    assert "(default: None)" not in text and "(default: )" not in text
    assert ("--help_all adds" in text) is not everything
    assert ("--adam_beta1 FLOAT" in text) is everything
    assert "--hub_token" not in text and "--neftune_noise_alpha" not in text  # refused


def test_a_line_shows_type_and_default():
    settings = settings_of(EvaluateArguments)
    assert settings["num_prompts"].text.endswith(" (default: 32)") and settings["num_prompts"].kind == "int"
    assert settings["data"].text.endswith(" (required)")
    text = " ".join(help_text("", "", {"Evaluation": EvaluateArguments}).split())
    assert "--data STR ... Held-out" in text and "--template_kwargs JSON " in text and "--card STR Name" in text
    assert "Evaluation: Held-out prompts to decode. --draft STR The draft" in text
