"""The `blockdraft` command with target, draft and adapter in repositories whose branches move on."""

import json
import warnings
from pathlib import Path

import pytest
from decoding_models import LLAMA_LIKE
from deepseek_v41_dspark_models import tiny_dspark
from hub_server import Fault
from huggingface_hub import CommitOperationAdd, HfApi
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from blockdraft.modeling.target.target_identity import target_record
from blockdraft.trainer.adapters import read_record
from blockdraft.trainer.cli.main import main

TARGET, DRAFT, ADAPTER = "user/target", "user/draft", "user/adapter"
TRAINING = {
    "target": TARGET,
    "eval_fraction": 0.25,
    "max_steps": 1,
    "per_device_train_batch_size": 2,
    "num_anchors": 4,
    "save_strategy": "no",
    "eval_decode_prompts": 0,
    "use_cpu": True,
    "disable_tqdm": True,
}
SHAPE = {"num_draft_layers": 1, "block_size": 4, "target_layer_ids": [1, 3]}


@pytest.fixture
def data(tmp_path) -> Path:
    answers = ("it is fine", "hello there", "the weather is like the user", "it is what the assistant answers")
    chats = [[{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}] for text in answers]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"id": i, "messages": chat}) + "\n" for i, chat in enumerate(chats)))
    return path


@pytest.fixture
def target(hub, tmp_path, chat_tokenizer) -> Path:
    """A target whose repository is `TARGET`."""
    folder = tmp_path / "target"
    special = {"vocab_size": len(chat_tokenizer) + 2, "eos_token_id": chat_tokenizer.eos_token_id}
    Qwen3ForCausalLM(Qwen3Config(**(LLAMA_LIKE | special))).save_pretrained(folder)
    chat_tokenizer.save_pretrained(folder)
    upload(folder, TARGET)
    return folder


def upload(folder: Path, repo_id: str) -> str:
    """The commit."""
    HfApi().create_repo(repo_id, exist_ok=True)
    return HfApi().upload_folder(repo_id=repo_id, folder_path=folder).oid


def commit(repo_id: str, name: str, content: str) -> str:
    return HfApi().create_commit(repo_id, [CommitOperationAdd(name, content.encode())], commit_message="Later").oid


def training(data: Path, output_dir: Path, **settings) -> list[str]:
    """The command."""
    settings = TRAINING | {"train_data": data, "output_dir": output_dir} | settings
    argv = []
    for name, value in settings.items():
        argv += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return ["train", *argv]


def train(data: Path, output_dir: Path, **settings) -> Path:
    assert main(training(data, output_dir, **settings)) == 0
    return output_dir


def warned(argv: list) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main([str(word) for word in argv]) == 0
    return " ".join(str(warning.message) for warning in caught if "of the one the draft" in str(warning.message))


def test_a_draft_knows_the_commit_of_its_target(hub, target, data, tmp_path):
    trained_for = hub.repos[TARGET].refs["main"]
    HfApi().create_branch(TARGET, branch="v1")
    for name, revision in (("default", {}), ("branch", {"target_revision": "v1"})):
        draft = train(data, tmp_path / name, **SHAPE, **revision)
        assert json.loads((draft / "config.json").read_text())["target"]["revision"] == trained_for
        assert f'revision="{trained_for}"' in (draft / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(TARGET, revision="v1")
    assert target_record(model, None, "v1")["revision"] == trained_for
    assert target_record(model, None)["revision"] is None  # a loaded model does not know
    (target / "README.md").write_text("---\nlicense: mit\n---\n")
    described = upload(target, TARGET)
    evaluation = ["evaluate", TARGET, draft, "--data", data, "--num_prompts", 1, "--max_new_tokens", 4]
    cast = ["--target_dtype", "bfloat16"]  # the weights cannot be compared
    for revision in ("v1", trained_for):
        assert warned([*evaluation, *cast, "--target_revision", revision]) == ""
    assert warned(evaluation) == ""  # another commit with the same weights
    assert "['revision']" in warned([*evaluation, *cast, "--target_revision", described])


def test_commands_take_a_draft_at_a_revision(hub, target, data, tmp_path, capsys):
    """What lies in the default branch meanwhile cannot be loaded."""
    draft = train(data, tmp_path / "draft", **SHAPE)
    assert main(["push", str(draft), DRAFT]) == 0
    sound = hub.repos[DRAFT].refs["main"]
    commit(DRAFT, "config.json", (draft / "config.json").read_text().replace('"block_size": 4', '"block_size": 1'))
    at = ["--draft_revision", sound]
    for command in (
        ["evaluate", TARGET, DRAFT, "--data", str(data), "--num_prompts", "1", "--max_new_tokens", "4"],
        ["generate", TARGET, DRAFT, "hello", "--max_new_tokens", "4"],
    ):
        assert main(command) == 2 and "`block_size` is 1" in capsys.readouterr().err
        assert main([*command, *at]) == 0
    assert main(["doctor", TARGET, DRAFT]) == 1 and "`block_size` is 1" in capsys.readouterr().out
    assert main(["doctor", TARGET, DRAFT, *at]) == 0

    adapter = train(data, tmp_path / "adapter", draft=DRAFT, draft_revision=sound, lora_r=2)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (DRAFT, sound)
    assert main(["push", str(adapter), ADAPTER]) == 0
    sound = hub.repos[ADAPTER].refs["main"]
    commit(ADAPTER, "adapter_config.json", json.dumps(config | {"revision": "no-such-branch"}))
    capsys.readouterr()
    for command in (
        ["generate", TARGET, ADAPTER, "hello", "--max_new_tokens", "4"],
        ["doctor", TARGET, ADAPTER],
    ):
        assert main(command) == 2 and "no-such-branch" in capsys.readouterr().err
        assert main([*command, "--draft_revision", sound]) == 0


def test_a_finished_draft_is_published_as_it_lies_there(hub, target, data, tmp_path, capsys):
    """By the command of its training with `push_to_hub`; where that fails, the error is the command's."""
    draft = train(data, tmp_path / "draft", **SHAPE)
    with open(draft / "README.md", "a") as card:
        card.write("\nMine.\n")
    before = {path.name: path.read_bytes() for path in draft.iterdir() if path.is_file()}
    command = training(data, draft, **SHAPE, push_to_hub=True, hub_model_id=DRAFT)
    hub.faults = [Fault("/commit/", 403, times=100)]
    assert main(command) == 2 and "no right to write" in capsys.readouterr().err
    hub.faults = []
    assert main(command) == 0
    tree = hub.repos[DRAFT].tree()
    assert tree["model.safetensors"].content == before["model.safetensors"] and b"Mine." in tree["README.md"].content
    assert {path.name: path.read_bytes() for path in draft.iterdir() if path.is_file()} == before


def test_the_doctor_looks_at_an_adapter_in_a_directory(hub, target, data, tmp_path, capsys):
    """As it is merged; and says where its base is missing."""
    base = train(data, tmp_path / "base", **SHAPE)
    adapter = train(data, tmp_path / "adapter", draft=base, lora_r=2)
    capsys.readouterr()
    output = tmp_path / "findings.json"
    assert main(["doctor", TARGET, str(adapter), "--output", str(output)]) == 0
    found = {finding["check"]: finding for finding in json.loads(output.read_text())}
    assert found["target"]["status"] == found["weight values"]["status"] == "ok"
    assert "1 steps" in found["training"]["found"]
    weights = load_file(adapter / "adapter_model.safetensors")
    name = next(name for name in weights if "lora_B" in name)
    metadata = {name: json.dumps(value) for name, value in read_record(adapter / "adapter_model.safetensors").items()}
    save_file(weights | {name: weights[name] * float("nan")}, adapter / "adapter_model.safetensors", metadata)
    assert main(["doctor", TARGET, str(adapter), "--output", str(output)]) == 1
    found = {finding["check"]: finding for finding in json.loads(output.read_text())}
    assert found["weight values"]["status"] == "fault"
    capsys.readouterr()
    base.rename(tmp_path / "moved")
    assert main(["doctor", TARGET, str(adapter)]) == 2
    assert f"belongs to the draft {base}, which is not there" in capsys.readouterr().err


def test_export_takes_a_draft_at_a_revision(hub, tmp_path, capsys):
    sound = tiny_dspark().push_to_hub(DRAFT).oid
    commit(DRAFT, "config.json", "{}")
    command = ["export", DRAFT, str(tmp_path / "exported")]
    assert main(command) == 2
    assert main([*command, "--draft_revision", sound]) == 0
    assert (tmp_path / "exported" / "mtp.safetensors").is_file()


def test_a_revision_without_a_repository(hub, target, data, tmp_path, caplog, capsys):
    argv = ["train", "--target", TARGET, "--train_data", str(data), "--draft_revision", "v1"]
    assert main(argv) == 2
    assert "`draft_revision` belongs to an existing draft" in capsys.readouterr().err
    draft = train(data, tmp_path / "draft", **SHAPE)
    for command in (["doctor", TARGET, str(draft)], ["generate", TARGET, str(draft), "hello"]):
        caplog.clear()
        with caplog.at_level("WARNING", logger="blockdraft"):
            assert main([*command, "--draft_revision", "v1"]) == 0
        assert caplog.text.count("`draft_revision` is ignored") == 1
