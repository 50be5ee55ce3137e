"""Which files of a directory are published, and which directories are refused."""

import json
import re

import pytest

from blockdraft.hub_cards.repository_files import MEASURED, is_one_of, published_files
from blockdraft.trainer.cli.main import main
from blockdraft.trainer.evaluation.report_folder import CAPTIONS, RELIABILITY, TEXTS

REPO = "user/draft"


def test_only_the_drafts_own_files_are_published(saved):
    code = {file.name for file in saved.glob("*.py")} - {"notes.py"}
    rest = {"config.json", "model.safetensors", "README.md", "tokenizer.json", "report.json", "acceptance.png"}
    assert {"modeling_kimi_k3_dflash.py", "configuration_kimi_k3_dflash.py"} < code
    written = {f"custom_generate/{file.name}" for file in (saved / "custom_generate").iterdir()}
    assert published_files(saved) == sorted(code | rest | written)


def remove(*names):
    return lambda directory: [(directory / name).unlink() for name in names]


def link(directory):
    (directory / "model.safetensors").rename(directory.parent / "elsewhere")
    (directory / "model.safetensors").symlink_to(directory.parent / "elsewhere")


def index_of_a_lost_shard(directory):
    index = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def adapter_beside_it(directory):
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "user/base"}))
    (directory / "adapter_model.safetensors").touch()


def adapter_of_a_local_base(directory):
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(directory)}))
    (directory / "adapter_model.safetensors").touch()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("config.json"), "training run without a final model.*checkpoint-1"),
        (lambda directory: directory.rename(directory.parent / "moved"), "There is no directory"),
        (remove("model.safetensors"), "no weights"),
        (remove("README.md"), "no model card"),
        (lambda directory: (directory / "README.md").write_text("---\nlicense: [mit\n---\n"), "metadata is not valid"),
        (remove("modeling_kimi_k3_dflash.py"), "lacks modeling_kimi_k3_dflash.py"),
        (remove("kimi_k3_layers.py"), "lacks kimi_k3_layers.py"),
        (lambda directory: (directory / "config.json").write_text("{}"), "names no code"),
        (index_of_a_lost_shard, "lacks model-00001-of-00002"),
        (adapter_beside_it, "a draft and an adapter: push each from a directory of its own"),
        (adapter_of_a_local_base, "base_model_name_or_path.*push the base draft first"),
        (link, "model.safetensors is a link"),
    ],
)
def test_wrong_directories_are_one_clear_line(saved, capsys, damage, message):
    damage(saved)
    assert main(["push", str(saved), REPO]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_of_an_adapter(adapter):
    assert published_files(adapter) == ["README.md", "adapter_config.json", "adapter_model.safetensors"]


def test_every_plot_and_text_of_a_report_is_known_as_a_measurement():
    assert {*CAPTIONS, *TEXTS, RELIABILITY} < set(MEASURED)


def test_only_files_beside_the_weights_are_measurements_but_for_the_hub_s_evaluation_file():
    measured = ("metrics.json", "loss.png", ".eval_results/tau.yaml")
    others = ("other/loss.png", ".eval_results/gsm8k.yaml", "a.png")
    assert all(is_one_of(name, MEASURED) for name in measured)
    assert not any(is_one_of(name, MEASURED) for name in others)
