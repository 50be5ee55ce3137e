"""Publishing through the real `huggingface_hub` client and a small Hub on loopback, with all that can go wrong."""

import json
import threading
from functools import partial
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from draft_models import tiny_draft
from hub_server import EXPIRED_TOKEN, READ_TOKEN, TOKEN, Fault
from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_download
from safetensors.torch import load
from transformers import AutoModel

from blockdraft.hub_cards import retries
from blockdraft.hub_cards.card import THIS_REPOSITORY, write_card
from blockdraft.hub_cards.repository_files import MEASURED, published_files
from blockdraft.hub_cards.retries import PublishError
from blockdraft.hub_cards.upload import publish
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel
from blockdraft.trainer.cli.main import main

REPO = "user/draft"


# ---- one push -------------------------------------------------------------------------------------------------------


def test_push_and_push_again(hub, saved):
    first = publish(saved, REPO, private=True)
    repo = hub.repos[REPO]
    assert repo.private and repo.refs["main"] == first.oid
    assert set(repo.tree()) == {*published_files(saved), ".gitattributes"}
    contents = {name: (saved / name).read_bytes() for name in published_files(saved)}
    contents["README.md"] = contents["README.md"].decode().replace(THIS_REPOSITORY, REPO).encode()
    assert {name: repo.tree()[name].content for name in contents} == contents
    assert REPO.encode() in contents["README.md"]
    assert publish(saved, REPO).oid == first.oid  # nothing has changed

    # Shards never lie beside a single file, the older would be loaded; nor old figures and plots beside a new card.
    figures = ("acceptance.png", "round_time.png", "eval_results.json", "all_results.json", "calibration.md")
    for name in figures:
        (saved / name).write_text("of these weights")
    kept = ("other/eval_results.json", "other/assets/logo.png", "other/notes.json", "logo.png")
    HfApi().create_commit(REPO, [CommitOperationAdd(name, b"") for name in kept], commit_message="By hand")
    publish(saved, REPO)
    assert set(figures) < set(repo.tree())
    for name in figures:
        (saved / name).unlink()
    tiny_draft().save_pretrained(saved, max_shard_size="20KB")
    publish(saved, REPO)
    assert "model.safetensors" not in repo.tree() and "model.safetensors.index.json" in repo.tree()
    assert not set(figures) & set(repo.tree()) and "report.json" in repo.tree()
    assert set(kept) < set(repo.tree())
    tiny_draft().save_pretrained(saved)
    publish(saved, REPO, commit_message="One file")
    assert [name for name in repo.tree() if "safetensors" in name] == ["model.safetensors"]
    assert repo.history()[0] == "One file"


ADAPTER_FILES = ["README.md", "adapter_config.json", "adapter_model.safetensors"]


def test_a_draft_and_an_adapter_do_not_meet_in_a_repository(hub, saved, adapter):
    """Who names the repository gets, by `AutoModel` too, what was pushed last: a draft that no adapter changes."""
    publish(saved, REPO)
    before = hub.repos[REPO].refs["main"]
    with pytest.raises(PublishError, match="user/draft was not published: it holds a whole model.*another repository"):
        publish(adapter, REPO)
    assert hub.repos[REPO].refs["main"] == before
    publish(adapter, "user/other")
    assert set(hub.repos["user/other"].tree()) == {*ADAPTER_FILES, ".gitattributes"}
    publish(saved, "user/other")
    assert hub.repos["user/other"].tree().keys() == hub.repos[REPO].tree().keys()
    assert type(AutoModel.from_pretrained("user/other")) is KimiK3DFlashDraftModel


def test_branches_pull_requests_and_private_repositories(hub, saved, capsys):
    assert main(["push", str(saved), REPO, "--private", "--revision", "v1", "--commit_message", "First"]) == 0
    repo = hub.repos[REPO]
    assert repo.private and repo.history("v1") == ["First", "initial commit"] and repo.history() == ["initial commit"]
    assert main(["push", str(saved), REPO, "--create_pr"]) == 0
    assert "discussions/1" in capsys.readouterr().out
    assert "model.safetensors" in repo.tree("refs/pr/1") and repo.history() == ["initial commit"]
    repo.private = False
    assert main(["push", str(saved), REPO, "--private"]) == 2
    assert "the repository is public" in capsys.readouterr().err
    assert repo.history() == ["initial commit"]


def test_no_place_on_this_machine_is_uploaded(hub, saved):
    config = json.loads((saved / "config.json").read_text())
    config["target"] = {"name_or_path": f"{saved.parent}/my-target", "model_type": "qwen3"}
    (saved / "config.json").write_text(json.dumps(config))
    (saved / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": str(saved / "checkpoint-1")}))
    publish(saved, REPO, checkpoints={"last-checkpoint": saved})
    tree = hub.repos[REPO].tree()
    assert json.loads(tree["config.json"].content)["target"]["name_or_path"] == "my-target"
    assert json.loads(tree["last-checkpoint/trainer_state.json"].content)["best_model_checkpoint"] == "checkpoint-1"
    assert "last-checkpoint/optimizer.pt" in tree and "optimizer.pt" not in tree
    assert not [name for name in tree if "training_args" in name or ".env" in name]
    assert not [name for name, file in tree.items() if str(saved.parent).encode() in file.content]


def test_a_draft_pushes_itself(hub, tmp_path):
    draft = tiny_draft()
    commit = draft.push_to_hub(REPO, commit_message="Mine", tags=["tiny"])
    assert hub.repos[REPO].history()[0] == "Mine" and commit.oid == hub.repos[REPO].refs["main"]
    pushed = load(hub.repos[REPO].tree()["model.safetensors"].content)
    torch.testing.assert_close(pushed, draft.state_dict(), rtol=0, atol=0)
    assert "- tiny\n" in hub.repos[REPO].tree()["README.md"].content.decode()
    draft.save_pretrained(tmp_path / "x", push_to_hub=True, repo_id="user/other", create_pr=True)
    assert "model.safetensors" in hub.repos["user/other"].tree("refs/pr/1")


PROTOCOL = {"decoding": "greedy", "block_size": 4, "prompts": 8, "max_new_tokens": 64, "dtype": "float32"}
MEASUREMENT = {"chat": {"tau": 2.5, "protocol": PROTOCOL | {"hardware": "2 CPUs"}}}


@pytest.mark.parametrize("on_the_hub", [False, True])
def test_a_draft_takes_its_measurements_along_while_it_is_what_was_measured(hub, tmp_path, on_the_hub):
    draft = tiny_draft(target={"name_or_path": "org/target"})
    draft.save_pretrained(tmp_path)
    write_card(tmp_path, draft.config, MEASUREMENT)
    source = tmp_path
    if on_the_hub:
        source = "user/source"
        publish(tmp_path, source)

    def pushed(draft):
        draft.push_to_hub(REPO)
        tree = hub.repos[REPO].tree()
        assert ("metrics.json" in tree) == (b"2.50" in tree["README.md"].content)
        return "metrics.json" in tree and json.loads(tree["metrics.json"].content) == MEASUREMENT

    saved = partial(AutoModel.from_pretrained, source)
    assert not pushed(draft)  # made here: nothing says that it is the one that was measured
    assert pushed(saved())
    assert not pushed(saved(dtype=torch.bfloat16))
    trained, configured = saved(), saved()
    trained.norm.weight.data[0] += 1
    configured.config.block_size = 3
    assert not pushed(trained) and not pushed(configured)
    last = saved()
    assert pushed(last)
    if on_the_hub:
        del hub.repos[source]
        last.push_to_hub("user/copy")  # where it came from is gone
        assert "metrics.json" not in hub.repos["user/copy"].tree()


def by_another_version(repo_id, name):
    """The same settings, as an older release would have written them."""
    settings = json.loads(Path(hf_hub_download(repo_id, name)).read_text())
    settings |= {"transformers_version": "5.0.0"} if name == "config.json" else {"peft_version": "0.1"}
    HfApi().create_commit(
        repo_id, [CommitOperationAdd(name, json.dumps(settings).encode())], commit_message="By another version"
    )


def test_measurements_lie_there_as_long_as_their_draft(hub, saved):
    """A draft that comes back to its repository, from a directory or from there, with other tags."""
    measured = {"metrics.json", "report.json", "report.md", ".eval_results/tau.yaml"}
    draft = AutoModel.from_pretrained(saved)
    ranked = {"org/draft-bench": MEASUREMENT["chat"] | {"benchmark_task": "tau"}}
    write_card(saved, draft.config, MEASUREMENT | ranked)
    (saved / "report.md").write_text("of these weights")
    publish(saved, REPO)
    first = hub.repos[REPO].refs["main"]
    for again in (draft, *(AutoModel.from_pretrained(REPO, revision=revision) for revision in ("main", first))):
        again.push_to_hub(REPO, tags=["chat"])
        tree = hub.repos[REPO].tree()
        assert measured < set(tree) and b"2.50" in tree["README.md"].content and b"- chat" in tree["README.md"].content
        by_another_version(REPO, "config.json")
    again.norm.weight.data[0] += 1
    again.push_to_hub(REPO)
    assert not set(MEASURED) & set(hub.repos[REPO].tree())


def test_measurements_lie_there_as_long_as_their_adapter(hub, adapter):
    (adapter / "report.md").write_text("of these weights")
    publish(adapter, "user/other")
    (adapter / "report.md").unlink()
    by_another_version("user/other", "adapter_config.json")
    publish(adapter, "user/other")
    assert "report.md" in hub.repos["user/other"].tree()
    (adapter / "adapter_model.safetensors").write_text("trained on")
    publish(adapter, "user/other")
    assert "report.md" not in hub.repos["user/other"].tree()


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [503, "cut", "cut answer"])
def test_every_request_may_fail_once(hub, saved, monkeypatch, answer):
    """Server errors and broken connections, in the middle of an upload too: one commit, and nothing is missing."""
    steps = [
        "repos/create",
        "GET /api/models",
        "validate-yaml",
        "preupload",
        "objects/batch",
        "PUT",
        "verify",
        "/commit/",
    ]
    hub.faults = [Fault(step, answer) for step in steps]
    waits = []
    monkeypatch.setattr(retries, "WAITS", (1.0,) * len(steps))
    commit = publish(saved, REPO, sleep=waits.append)
    assert not [fault for fault in hub.faults if fault.times] and 0 < len(waits) <= len(steps)
    assert hub.repos[REPO].history() == ["Upload draft", "initial commit"]
    assert commit.oid == hub.repos[REPO].refs["main"]
    assert hub.repos[REPO].tree()["model.safetensors"].content == (saved / "model.safetensors").read_bytes()


def test_waits_grow_and_end(hub, saved, monkeypatch):
    monkeypatch.setattr(retries, "WAITS", (2.0, 4.0, 8.0))
    hub.faults = [Fault("/commit/", 502, times=100)]
    waits = []
    with pytest.raises(PublishError, match=r"user/draft was not published, tried 4 times.*502.*later") as caught:
        publish(saved, REPO, sleep=waits.append)
    assert waits == [2.0, 4.0, 8.0] and caught.value.temporary
    assert hub.repos[REPO].history() == ["initial commit"]
    with pytest.raises(PublishError, match="the connection to the Hub broke"):
        hub.faults = [Fault("/commit/", "cut", times=100)]
        publish(saved, REPO, sleep=waits.append)


@pytest.mark.parametrize(
    ("token", "repo", "fault", "message"),
    [
        (EXPIRED_TOKEN, REPO, None, "user/draft.*expired.*hf auth login.*HF_TOKEN"),
        (None, REPO, None, "user/draft.*nobody is logged in.*hf auth login"),
        (READ_TOKEN, REPO, None, "user/draft.*no right to write.*write access"),
        (TOKEN, REPO, Fault("preupload", 404), "user/draft.*does not find it.*Check its name"),
        (TOKEN, "user/my draft", None, "`repo_id` is 'user/my draft'"),
    ],
)
def test_refusals_are_not_tried_again(hub, saved, monkeypatch, caplog, token, repo, fault, message):
    publish(saved, REPO)
    before, asked = hub.repos[REPO].history(), len(hub.requests)
    (saved / "report.json").write_text("[]")
    monkeypatch.setenv("HF_TOKEN", token or "")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(saved / "no-token"))
    hub.faults = [fault] if fault else []
    with pytest.raises((PublishError, ValueError), match=message) as caught:
        publish(saved, repo, sleep=lambda seconds: pytest.fail("tried again"))
    assert "hf_" not in str(caught.value) + caplog.text and "\n" not in str(caught.value)
    assert hub.repos[REPO].history() == before and len(hub.requests) - asked <= 5


def test_offline_and_secrets_in_what_the_server_says(hub, saved, monkeypatch):
    hub.users[TOKEN] = f"user of {TOKEN} and hf_anotherSecret"  # a proxy that echoes
    with pytest.raises(PublishError, match=r"403") as caught:
        publish(saved, "team/draft")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PublishError, match="offline mode is on. Unset HF_HUB_OFFLINE"):
        publish(saved, REPO, sleep=lambda seconds: pytest.fail("tried again"))
    assert "hf_" not in str(caught.value)


def test_two_pushes_at_once(hub, saved, tmp_path):
    """Both start from the same commit: one is refused and starts over, and the other one's commit stays."""
    publish(saved, REPO)
    together, commits = threading.Barrier(2, timeout=20), []

    def meet():
        if len(commits) < 2:
            commits.append(1)
            together.wait()

    hub.before_commit = meet
    results = {}

    def push(name):
        draft = tiny_draft()
        torch.nn.init.constant_(draft.fc.weight, float(len(name)))
        draft.save_pretrained(tmp_path / name)
        write_card(tmp_path / name, draft.config)
        results[name] = publish(tmp_path / name, REPO, commit_message=name)

    threads = [threading.Thread(target=push, args=(name,)) for name in ("a", "bb")]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    repo = hub.repos[REPO]
    assert sorted(repo.history()[:2]) == ["a", "bb"] and len(repo.history()) == 4
    for name, commit in results.items():
        pushed = load(repo.tree(commit.oid)["model.safetensors"].content)
        assert (pushed["fc.weight"] == len(name)).all()
