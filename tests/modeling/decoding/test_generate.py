"""The form that a draft's repository ships."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decoding_models import build_draft, build_dspark_draft, build_target, left_padded, prompts
from hub_server import LFS_SUFFIXES, Commit, File, Repo, hub_server
from safetensors.torch import save_file

from blockdraft.modeling.decoding.generate import generate
from blockdraft.modeling.saving.remote_code import GENERATE_REQUIREMENTS

GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def pair():
    target = build_target("qwen3")
    return target, build_dspark_draft(target)


# Isolated mode and an empty code cache; the package is blocked even where it is installed.
FRESH_PROCESS = """
import sys
sys.modules["blockdraft"] = None
target_directory, inputs, commit, *drafts = sys.argv[1:]

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

torch.set_num_threads(1)
target = AutoModelForCausalLM.from_pretrained(target_directory)
batch = load_file(inputs)
expected, features, logits = (batch.pop(name) for name in ("expected", "features", "logits"))
settings = {"do_sample": False, "max_new_tokens": 12, "trust_remote_code": True}
for directory in drafts:
    by_name = target.generate(**batch, custom_generate=directory, draft=directory, **settings)
    assert torch.equal(by_name, expected), directory
    draft = AutoModel.from_pretrained(directory, trust_remote_code=True)
    assert type(draft).__module__.startswith("transformers_modules.")
    assert not draft.can_generate() and not hasattr(draft, "generate")
    direct = {"do_sample": False, "max_new_tokens": 12}
    assert torch.equal(draft.block_decode(target, **batch, **direct), expected)
    draft.save_pretrained(directory + "_again")
    details = {"return_dict_in_generate": True, "repetition_penalty": 1.0}
    output = target.generate(**batch, custom_generate=directory + "_again", draft=draft, **details, **settings)
    assert torch.equal(output.sequences, expected) and len(output.rows) == len(expected)
    assert all(row.accepted_lengths for row in output.rows)

class Recorder(BaseStreamer):
    tokens, ended = [], False
    def put(self, value):
        self.tokens += value.flatten().tolist()
    def end(self):
        self.ended = True

class Stop(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= batch["input_ids"].shape[1] + 3)

one = {name: tensor[-1:] for name, tensor in batch.items()}
streamer = Recorder()
own = {"streamer": streamer, "stopping_criteria": StoppingCriteriaList([Stop()]), "draft": drafts[0]}
answer = target.generate(**one, custom_generate=drafts[1], **own, **settings)
assert torch.equal(answer, expected[-1:, : batch["input_ids"].shape[1] + 3])
assert streamer.tokens == answer[0].tolist() and streamer.ended

# From a Hub, at a commit: what was uploaded later does not run, of code and draft, unless it is asked for
hub = {"custom_generate": "user/draft", "revision": commit, "draft": "user/draft"}
assert torch.equal(target.generate(**batch, **hub, **settings), expected)
try:
    target.generate(**batch, **hub, draft_revision="main", **settings)
except RuntimeError as error:
    assert str(error) == "uploaded later"
else:
    raise AssertionError("the draft of the commit was loaded")

# The reference's forward on token ids, of a DSpark draft that stands alone
dspark = AutoModel.from_pretrained(drafts[1], trust_remote_code=True)
dspark.initialize_embeddings_and_head(target.get_input_embeddings(), target.get_output_embeddings())
with torch.no_grad():
    inputs = {"input_ids": one["input_ids"], "loss_mask": one["attention_mask"], "target_hidden_states": features}
    output = dspark(**inputs, anchor_positions=torch.tensor([[2, 5]]))
torch.testing.assert_close(output.draft_logits, logits)
assert dspark(**inputs, num_anchors=3).draft_logits.shape[1] == 3

# transformers' own path, for the DFlash draft
settings.pop("trust_remote_code")
dflash = AutoModel.from_pretrained(drafts[0], trust_remote_code=True)
native = target.generate(**one, assistant_model=dflash, speculation_type="dflash", **settings)
assert torch.equal(native, expected[-1:])
print("all equal")
"""


def test_repository_form_without_the_package(tmp_path):
    target = build_target("qwen3")
    dspark = build_dspark_draft(target)
    target.save_pretrained(tmp_path / "target")
    build_draft(target).save_pretrained(tmp_path / "dflash")
    dspark.save_pretrained(tmp_path / "dspark")
    rows = prompts(2)
    batch = left_padded(rows)
    expected = torch.cat([target.generate(row, **GREEDY)[:, row.shape[1] :] for row in rows])
    batch["expected"] = torch.cat([batch["input_ids"], expected], dim=1)
    batch["features"] = torch.randn(1, batch["input_ids"].shape[1], dspark.config.features_width)
    dspark.initialize_embeddings_and_head(target.get_input_embeddings(), target.get_output_embeddings())
    with torch.no_grad():
        batch["logits"] = dspark(
            input_ids=rows[-1],
            loss_mask=torch.ones_like(rows[-1]),
            target_hidden_states=batch["features"],
            anchor_positions=torch.tensor([[2, 5]]),
        ).draft_logits
    save_file(batch, tmp_path / "batch.safetensors")

    published = [path for path in (tmp_path / "dspark").rglob("*") if path.is_file()]
    tree = {
        path.relative_to(tmp_path / "dspark").as_posix(): File(path.read_bytes(), path.suffix in LFS_SUFFIXES)
        for path in published
    }
    with hub_server() as hub:
        hub.objects = {file.oid: file.content for file in tree.values() if file.lfs}
        repo = hub.repos["user/draft"] = Repo(private=False)
        commit = repo.add("main", Commit(None, "a draft", tree))
        later = File(b'raise RuntimeError("uploaded later")', False)
        repo.add("main", Commit(commit, "Later", tree | {"modeling_deepseek_v41_dspark.py": later}))
        files = [str(tmp_path / name) for name in ("target", "batch.safetensors", "dflash", "dspark")]
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "hf_home"),
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-I", "-c", FRESH_PROCESS, *files[:2], commit, *files[2:]]
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.split("\n")[-2] == "all equal", result.stderr


def test_a_draft_by_name_is_read_once_for_each_save(tmp_path, pair, monkeypatch):
    target, draft = pair
    input_ids, loads = prompts(1)[0], []
    draft.save_pretrained(tmp_path)

    def load(name, **settings):
        loads.append((name, settings))
        return build_draft(target)

    monkeypatch.setattr("blockdraft.modeling.decoding.generate.AutoModel.from_pretrained", load)
    settings = GREEDY | {"draft": str(tmp_path), "draft_revision": "v1", "revision": "v2", "local_files_only": True}
    expected = target.generate(input_ids, **GREEDY)
    for _ in range(2):
        assert torch.equal(generate(target, input_ids, **settings), expected)
    known = {"revision": "v1", "trust_remote_code": True, "local_files_only": True}
    assert loads == [(str(tmp_path), known)]
    draft.save_pretrained(tmp_path)
    generate(target, input_ids, **settings)
    assert len(loads) == 2
    del settings["draft_revision"]
    generate(target, input_ids, **settings)
    assert loads[2:] == [(str(tmp_path), known | {"revision": "v2"})]
    with pytest.raises(ValueError, match="`draft_revision` is for a `draft` given by name"):
        generate(target, input_ids, draft=draft, draft_revision="v1")
    with pytest.raises(ValueError, match="needs `draft`"):
        generate(target, input_ids)


def test_requirements_are_those_of_the_package():
    with open(Path(__file__).parents[3] / "pyproject.toml", encoding="utf-8") as file:
        project = file.read()
    for requirement in GENERATE_REQUIREMENTS.split():
        assert f'"{requirement}' in project
