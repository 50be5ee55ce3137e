"""What version 0.1.0 saved goes on as it was: drafts, an adapter, runs, and the code that shipped with the drafts.

`data/saved_by_0.1.0.tar.xz` holds a tiny target, draft and run of each family, an adapter, and what they gave then.
"""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from draft_trainers import make_rows
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

from blockdraft import DraftTrainer, DraftTrainingArguments, DSparkTrainer, block_decode
from blockdraft.trainer.adapters import load_merged

FAMILIES = {"dflash": DraftTrainer, "dspark": DSparkTrainer}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with tarfile.open(Path(__file__).parent / "data" / "saved_by_0.1.0.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    folder = folder / "saved_by_0.1.0"
    config = folder / "dflash_adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace("BASE", str(folder / "dflash_draft")))
    return folder


@pytest.fixture(scope="module")
def numbers(saved) -> dict:
    return json.loads((saved / "expected.json").read_text())


@pytest.fixture(scope="module")
def tensors(saved) -> dict[str, torch.Tensor]:
    return load_file(saved / "expected.safetensors")


def load_target(saved: Path, family: str):
    target = AutoModelForCausalLM.from_pretrained(saved / f"{family}_target").eval()
    if family == "dspark":
        target.model.engram_hash.set_token_map(torch.arange(target.config.vocab_size))  # it has no tokenizer
    return target


@torch.no_grad()
def output_of(draft, tensors: dict[str, torch.Tensor], family: str) -> torch.Tensor:
    inputs = {name: tensors[f"{family}_{name}"] for name in ("noise_embeds", "context_hidden_states")}
    return draft.eval()(**inputs).last_hidden_state


@pytest.mark.filterwarnings("ignore:No tokenizer")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_loads_and_decodes(saved, numbers, tensors, family):
    draft = AutoModel.from_pretrained(saved / f"{family}_draft").eval()
    torch.testing.assert_close(output_of(draft, tensors, family), tensors[f"{family}_output"], rtol=1e-4, atol=1e-4)
    target = load_target(saved, family)
    tokens = torch.tensor([numbers[f"{family}_tokens"]])
    settings = {"draft": draft, "max_new_tokens": 24, "return_dict_in_generate": True, "do_sample": False}
    output = block_decode(target, tokens[:, :-24], **settings)
    assert torch.equal(output.sequences, tokens)
    assert output.accepted_lengths == numbers[f"{family}_accepted_lengths"]


@pytest.mark.filterwarnings("ignore:No tokenizer")
@pytest.mark.parametrize(("family", "trainer_class"), FAMILIES.items())
def test_a_run_is_resumed(saved, numbers, family, trainer_class):
    run = saved / f"{family}_run"
    target = load_target(saved, family)
    args = DraftTrainingArguments(
        output_dir=str(run),
        per_device_train_batch_size=4,
        max_steps=6,
        num_anchors=4,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        eval_decode_prompts=0,
        use_cpu=True,
    )
    draft = AutoModel.from_pretrained(run / "checkpoint-3")
    trainer = trainer_class(draft, target, args, train_dataset=make_rows(24))
    trainer.train(resume_from_checkpoint=True)
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses == pytest.approx(numbers[f"{family}_losses"], rel=1e-4)


def test_an_adapter_is_merged(saved, tensors):
    draft = load_merged(str(saved / "dflash_adapter"))
    torch.testing.assert_close(output_of(draft, tensors, "dflash"), tensors["adapter_output"], rtol=1e-4, atol=1e-4)
    assert draft.config.training["adapter"]["r"] == 2


SHIPPED_CODE = """
import json, sys
sys.modules["blockdraft"] = None  # from here on, importing it fails
import torch
from safetensors.torch import load_file
from transformers import AutoModel, Qwen3Config, Qwen3ForCausalLM
from transformers.cache_utils import DFlashCache

[folder] = sys.argv[1:]
tensors = load_file(f"{folder}/expected.safetensors")
for family in ("dflash", "dspark"):
    name = f"{folder}/{family}_draft"
    new = AutoModel.from_pretrained(f"{folder}/{family}_saved_now", trust_remote_code=True).eval()
    draft = AutoModel.from_pretrained(name, trust_remote_code=True).eval()
    inputs = {name: tensors[f"{family}_{name}"] for name in ("noise_embeds", "context_hidden_states")}
    with torch.no_grad():
        output = draft(**inputs).last_hidden_state
    torch.testing.assert_close(output, tensors[f"{family}_output"], rtol=1e-4, atol=1e-4)
    draft.save_pretrained(f"{folder}/{family}_saved_again")
    torch.manual_seed(0)
    settings = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 8}
    depth = draft.config.num_target_layers
    config = Qwen3Config(**settings, num_key_value_heads=2, num_hidden_layers=depth, eos_token_id=None)
    target, prompt = Qwen3ForCausalLM(config).eval(), torch.arange(1, 8)[None]
    draft.config.target = None
    draft.config.capture_point = "layer_output"
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    draft.save_pretrained(f"{folder}/{family}_for_qwen")
    pairs = [(source, draft) for source in (name, f"{folder}/{family}_saved_again", f"{folder}/{family}_saved_now")]
    pairs.append((f"{folder}/{family}_saved_now", f"{folder}/{family}_for_qwen"))  # by its name
    for source, used in pairs:
        arguments = {"custom_generate": source, "draft": used, "trust_remote_code": True}
        assert torch.equal(plain, target.generate(prompt, max_new_tokens=12, do_sample=False, **arguments))
    # Beside the old code, which was loaded last, a new draft keeps its own cache.
    new.config.target, new.config.capture_point = None, "layer_output"
    assert torch.equal(plain, new.block_decode(target, prompt, max_new_tokens=12, do_sample=False))
    code = type(new).__module__.rpartition(".")[0]
    for layer in DFlashCache(config=new.config).layers:
        assert type(layer).__module__.startswith(("transformers.cache_utils", code)), type(layer)
print("fine")
"""


def test_the_code_that_shipped_still_runs(saved, tmp_path):
    """Also where `generate` comes from a draft that is saved now, and beside such a draft."""
    for family in FAMILIES:
        AutoModel.from_pretrained(saved / f"{family}_draft").save_pretrained(saved / f"{family}_saved_now")
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SHIPPED_CODE, str(saved)]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert process.stdout.endswith("fine\n"), process.stderr[-3000:]
