"""LoRA and DoRA adapters of both drafts: training, checkpoints, bases, merging, the command line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decoding_models import build_draft, build_target
from draft_trainers import BLOCK, make_rows
from draft_trainers import arguments as draft_arguments
from dspark_trainers import dspark_draft
from peft import AutoPeftModelForFeatureExtraction, IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

from blockdraft.hub_cards.card import THIS_REPOSITORY
from blockdraft.hub_cards.repository_files import published_files
from blockdraft.modeling.decoding.block_decoding import block_decode
from blockdraft.trainer.adapters import load_merged, read_record, save_adapter
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.dspark_trainer import DSparkTrainer
from blockdraft.trainer.evaluation.calibration import save_temperatures
from blockdraft.trainer.loading import load_draft
from blockdraft.trainer.runs import train_draft
from blockdraft.trainer.saving_trainer import UNFINISHED_CHECKPOINTS
from blockdraft.trainer.training_args import DraftTrainingArguments

FILES = {"README.md", "adapter_config.json", "adapter_model.safetensors", "training_args.json"}
RESUME = {"optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"}
PUSH = {"hub_model_id": "user/adapter", "hub_strategy": "end"}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
FAMILIES = {"dflash": (DraftTrainer, build_draft), "dspark": (DSparkTrainer, dspark_draft)}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """A saved draft of each family, for the Qwen3 target."""
    folders = {}
    for family, (_, new) in FAMILIES.items():
        torch.manual_seed(1)
        folders[family] = tmp_path_factory.mktemp(family)
        new(build_target("qwen3"), block_size=BLOCK).save_pretrained(folders[family])
    return folders


def trainer_of(base: Path, output_dir, lora: dict | None = None, draft=None, **arguments):
    """A trainer of the family that the base belongs to, with an adapter of rank 2."""
    draft = draft or AutoModel.from_pretrained(base)
    trainer, _ = FAMILIES["dspark" if draft.config.model_type == "deepseek_v41_dspark" else "dflash"]
    args = draft_arguments(output_dir, **({"optim": "adamw_torch", "learning_rate": 0.02} | arguments))
    rows, target = make_rows(), build_target("qwen3")
    config = None if isinstance(draft, PeftModel) else LoraConfig(**({"r": 2} | (lora or {})))
    torch.manual_seed(2)
    return trainer(draft, target, args, train_dataset=rows, eval_dataset=rows, peft_config=config)


def inputs_of(draft) -> dict[str, torch.Tensor]:
    config = draft.config
    width = len(config.target_layer_ids) * config.hidden_size
    generator = torch.Generator().manual_seed(3)
    return {
        "noise_embeds": torch.randn(1, config.block_size, config.hidden_size, generator=generator),
        "context_hidden_states": torch.randn(1, 7, width, generator=generator),
    }


@torch.no_grad()
def output_of(draft) -> torch.Tensor:
    return draft.eval()(**inputs_of(draft)).last_hidden_state


def trained(trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("dflash", {}),
        ("dflash", {"use_dora": True, "modules_to_save": ["norm"], "target_modules": ["fc", "kv_b_proj"]}),
        ("dspark", {"use_dora": True, "modules_to_save": ["markov_head", "confidence_head"]}),
        ("dspark", {"target_modules": ["wo_b"], "target_parameters": EXPERTS}),
    ],
)
def test_an_adapter_is_trained_saved_loaded_and_merged(tmp_path, bases, family, lora):
    trainer = trainer_of(bases[family], tmp_path / "run", lora)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    changed = {name for name, t in trainer.model.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == set(trained(trainer))
    trainer.save_model()
    assert {file.name for file in (tmp_path / "run").iterdir()} == FILES

    expected = output_of(trainer.draft)
    assert (expected - output_of(AutoModel.from_pretrained(bases[family]))).abs().max() > 1e-3
    loaded = AutoPeftModelForFeatureExtraction.from_pretrained(tmp_path / "run")
    assert torch.equal(output_of(loaded), expected)
    merged = loaded.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(output_of(merged), expected, rtol=0, atol=1e-5)
    again = AutoModel.from_pretrained(tmp_path / "merged")
    assert again.state_dict().keys() == AutoModel.from_pretrained(bases[family]).state_dict().keys()
    assert torch.equal(output_of(again), output_of(merged))


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_resume_is_exact_and_decodes_what_it_trained(tmp_path, bases, family):
    """3 steps, a checkpoint and 3 more are 6 steps, bit by bit; evaluation decodes the adapted draft."""
    common = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    common |= {"per_device_train_batch_size": 1}
    lora = {"lora_dropout": 0.1, "use_dora": True}
    straight = trainer_of(bases[family], tmp_path / "a", lora, **common | {"save_strategy": "no", "max_steps": 6})
    straight.train()
    trainer_of(bases[family], tmp_path / "b", lora, **common | {"max_steps": 3}).train()
    resumed = trainer_of(bases[family], tmp_path / "b", lora, **common | {"max_steps": 6})
    resumed.train(resume_from_checkpoint=True)
    for name, tensor in trained(straight).items():
        assert torch.equal(tensor, trained(resumed)[name]), name

    checkpoint = tmp_path / "b" / "checkpoint-6"
    assert {file.name for file in checkpoint.iterdir()} == FILES | RESUME
    assert not (tmp_path / "b" / UNFINISHED_CHECKPOINTS).exists()
    with safe_open(checkpoint / "adapter_model.safetensors", "pt") as file:
        assert len(list(file.keys())) == len(trained(resumed))
    resumed.args.eval_decode_prompts, resumed.args.eval_max_new_tokens = 2, 4
    assert resumed.evaluate()["eval_tau"] >= 1

    merged, prompt = load_merged(str(checkpoint)), torch.tensor([make_rows()[0]["input_ids"][:8]])
    settings = {"max_new_tokens": 12, "return_dict_in_generate": True}
    outputs = [
        block_decode(resumed.target, prompt, draft=draft.eval(), **settings)
        for draft in (resumed.model, resumed.draft, merged)
    ]
    assert len({tuple(output.accepted_lengths) for output in outputs}) == 1


def test_what_an_adapter_says_of_itself(tmp_path, bases):
    trainer = trainer_of(bases["dspark"], tmp_path, {"target_modules": ["wo_b", "main_proj"]})
    trainer.train()
    trainer.save_model()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["task_type"] == "FEATURE_EXTRACTION" and config["inference_mode"]
    assert config["base_model_name_or_path"] == str(bases["dspark"]) and config["revision"] is None
    assert config["target_modules"] == ["main_proj", "wo_b"]
    record = read_record(tmp_path / "adapter_model.safetensors")
    # Its routers' bias does not move: the adapter does not hold it.
    assert record["objective"]["expert_bias_step"] == 0 and record["training"]["global_step"] == 2
    assert record["training"]["adapter"] == {"peft_type": "LoRA", "r": 2, "lora_alpha": 8}

    save_temperatures(trainer.draft, [1.0, 2.0, 0.5, 1.5], tmp_path)
    # As the card says: a draft that describes itself, in memory and where it is saved.
    card = (tmp_path / "README.md").read_text().replace(THIS_REPOSITORY, str(tmp_path))
    [arguments] = re.findall(r'`blockdraft\.trainer\.\w+\.load_draft\("(.*?)", revision="(.*?)"\)`', card)
    draft = load_draft(arguments[0], revision=arguments[1])
    draft.save_pretrained(tmp_path / "kept")
    for config in (draft.config, AutoModel.from_pretrained(tmp_path / "kept").config):
        assert config.confidence_temperatures == [1.0, 2.0, 0.5, 1.5]
        assert all(getattr(config, name) == record[name] for name in ("target", "objective", "training"))
    assert not (tmp_path / "config.json").exists()
    torch.testing.assert_close(output_of(draft), output_of(trainer.draft), rtol=0, atol=1e-5)
    # The merged draft is not what lies where its base lies.
    with pytest.raises(ValueError, match="never saved"):
        trainer_of(bases["dspark"], tmp_path / "again", draft=draft)
    with pytest.raises(ValueError, match="names no repository"):
        published_files(tmp_path)


def test_a_model_with_an_adapter_is_taken(tmp_path, bases, monkeypatch):
    """The same adapter, given as a PeftModel without a task, from a relative directory."""
    monkeypatch.chdir(bases["dflash"].parent)
    given = trainer_of(bases["dflash"], tmp_path / "a")
    given.train()
    draft = AutoModel.from_pretrained(bases["dflash"].name)
    torch.manual_seed(2)
    model = get_peft_model(draft, LoraConfig(r=2, target_modules="all-linear"))
    trainer = trainer_of(None, tmp_path / "b", draft=model)
    trainer.train()
    trainer.save_model()
    for tensor, expected in zip(trained(trainer).values(), trained(given).values(), strict=True):
        assert torch.equal(tensor, expected)
    loaded = AutoPeftModelForFeatureExtraction.from_pretrained(tmp_path / "b")
    assert loaded.peft_config["default"].base_model_name_or_path == str(bases["dflash"])
    assert torch.equal(output_of(loaded), output_of(trainer.draft))
    # PEFT's own way to save finds no embedding that would have to go with it.
    trainer.adapter.save_pretrained(tmp_path / "own", save_embedding_layers=True)
    tensors = [load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("own", "b")]
    assert tensors[0].keys() == tensors[1].keys()
    with pytest.raises(ValueError, match="is_trainable=True"):
        trainer_of(None, tmp_path / "c", draft=loaded)


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_reentrant_checkpointing_changes_nothing(tmp_path, bases, family):
    """With adapters in the first layer alone, where the inputs of the layers have no gradient by themselves."""
    results, modules = [], {"dflash": r"layers\.0\.mlp\..*", "dspark": r"mtp\.0\.ffn\..*proj"}
    for checkpointing in (False, True):
        trainer = trainer_of(
            bases[family],
            tmp_path,
            {"target_modules": modules[family]},
            optim="sgd",
            max_steps=1,
            activation_checkpointing=checkpointing,
            activation_checkpointing_kwargs={"use_reentrant": True},
        )
        before = trained(trainer)
        trainer.train()
        results.append(trained(trainer))
    assert any(not torch.equal(before[name], results[0][name]) for name in before)
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("family", ["dflash", "dspark"])
def test_half_precision_bases_have_fp32_adapters(tmp_path, bases, family):
    """What is kept in fp32 stays so; the merged weights are the adapted ones up to bf16's rounding."""
    lora = {"target_parameters": EXPERTS, "target_modules": "all-linear"} if family == "dspark" else {}
    draft = AutoModel.from_pretrained(bases[family], dtype=torch.bfloat16)
    before = {name: tensor.dtype for name, tensor in draft.state_dict().items()}
    trainer = trainer_of(None, tmp_path, lora, draft=draft)
    trainer.train()
    assert all(p.dtype == torch.float32 for p in trained(trainer).values())
    trainer.save_model()
    assert output_of(trainer.draft).isfinite().all()
    merged = load_merged(str(tmp_path), torch.bfloat16).state_dict()
    assert {name: tensor.dtype for name, tensor in merged.items()} == before
    # Not their outputs: a router that rounds otherwise chooses other experts.
    for name, expected in load_merged(str(tmp_path), torch.float32).state_dict().items():
        assert (merged[name].float() - expected).abs().max() <= 2**-7 * expected.abs().max(), name


def test_an_adapted_kv_projection_is_not_absorbed(bases):
    """The DFlash draft multiplies `kv_b_proj` into its queries where it can; not with an adapter beside it."""
    draft = AutoModel.from_pretrained(bases["dflash"])
    config = LoraConfig(r=2, target_modules=["kv_b_proj"], task_type="FEATURE_EXTRACTION", init_lora_weights=False)
    model = get_peft_model(draft, config).eval()
    with torch.no_grad():
        whole = model(**inputs_of(draft)).last_hidden_state
        cached = model(**inputs_of(draft), use_cache=True).last_hidden_state
        assert type(draft.layers[0].self_attn.kv_b_proj) is not nn.Linear
        merged = model.merge_and_unload()
        absorbed = merged(**inputs_of(draft), use_cache=True).last_hidden_state
    assert type(draft.layers[0].self_attn.kv_b_proj) is nn.Linear
    torch.testing.assert_close(cached, whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(absorbed, whole, rtol=0, atol=1e-5)


def test_a_save_that_dies_leaves_the_checkpoint_before(tmp_path, bases, monkeypatch):
    trainer = trainer_of(bases["dflash"], tmp_path, save_strategy="steps", save_steps=1)

    def full_disk(output_dir):
        if output_dir.endswith("checkpoint-2"):
            raise OSError("No space left on device")

    monkeypatch.setattr(trainer, "_save_rng_state", full_disk)
    with pytest.raises(OSError, match="No space"):
        trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    assert FILES < {file.name for file in (tmp_path / "checkpoint-1").iterdir()}


def test_checkpoints_of_other_runs_are_refused(tmp_path, bases):
    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer_of(bases["dflash"], tmp_path / "adapter", **saving).train()
    for lora, message in (({"r": 3}, "`r` is 3"), ({"target_modules": ["fc"]}, "`target_modules` is")):
        with pytest.raises(ValueError, match=message):
            train_draft(trainer_of(bases["dflash"], tmp_path / "adapter", lora))
    whole = DraftTrainer(
        AutoModel.from_pretrained(bases["dflash"]),
        build_target("qwen3"),
        DraftTrainingArguments(str(tmp_path / "whole"), max_steps=1, use_cpu=True, report_to="none", **saving),
        train_dataset=make_rows(),
    )
    with pytest.raises(ValueError, match="holds an adapter, this run trains a whole draft"):
        whole.train(resume_from_checkpoint=str(tmp_path / "adapter" / "checkpoint-2"))
    whole.save_model()
    with pytest.raises(ValueError, match="holds config.json"):
        train_draft(trainer_of(bases["dflash"], tmp_path / "whole"))


def test_settings_that_cannot_be_are_refused(tmp_path, bases):
    base = bases["dflash"]
    for settings, message in (
        ({"task_type": "CAUSAL_LM"}, "`task_type`"),
        ({"modules_to_save": ["norm", "markov_head"]}, "names markov_head"),
        ({"target_modules": ["o_proj", "nowhere"]}, "names nowhere"),
    ):
        with pytest.raises(ValueError, match=message):
            trainer_of(base, tmp_path, settings)
    arguments = DraftTrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    draft, target = AutoModel.from_pretrained(base), build_target("qwen3")
    with pytest.raises(ValueError, match="IA3Config"):
        DraftTrainer(draft, target, arguments, peft_config=IA3Config(task_type="FEATURE_EXTRACTION"))
    draft.name_or_path = "gone"
    with pytest.raises(ValueError, match="loaded from gone, which is not a directory"):
        DraftTrainer(draft, target, arguments, peft_config=LoraConfig())
    draft.name_or_path = str(base)
    with pytest.raises(ValueError, match="never saved"):
        DraftTrainer(build_draft(target, block_size=BLOCK), target, arguments, peft_config=LoraConfig())
    draft.norm.weight.data *= 2
    with pytest.raises(ValueError, match="`norm.weight` is not that of"):
        DraftTrainer(draft, target, arguments, peft_config=LoraConfig())


def test_an_adapter_of_a_local_base_is_not_pushed(tmp_path, bases, hub):
    """Said before training where it is asked for, else when it is; the Hub hears nothing of it."""
    mend = r"directory \S+dflash\S+, which others do not have. Push the base first .*load it by its repository name"
    with pytest.raises(ValueError, match=mend):
        trainer_of(bases["dflash"], tmp_path, push_to_hub=True, hub_model_id="user/adapter")
    trainer = trainer_of(bases["dflash"], tmp_path, hub_model_id="user/adapter")
    trainer.train()
    with pytest.raises(ValueError, match=mend):
        trainer.push_to_hub()
    assert not hub.repos and not hub.requests


def test_an_adapter_without_its_base_says_so(tmp_path, bases):
    trainer = trainer_of(bases["dflash"], tmp_path)
    [config] = trainer.model.peft_config.values()
    config.base_model_name_or_path = str(tmp_path / "gone")
    save_adapter(tmp_path, trainer.model)
    with pytest.raises(ValueError, match="belongs to the draft .*gone, which is not there"):
        load_draft(str(tmp_path))


FRESH_PROCESS = """
import sys, torch
sys.modules["blockdraft"] = None
from peft import AutoPeftModelForFeatureExtraction
from transformers import AutoModel

inputs = torch.load("inputs.pt")
draft = AutoPeftModelForFeatureExtraction.from_pretrained("user/adapter", trust_remote_code=True).eval()
assert type(draft.get_base_model()).__module__.startswith("transformers_modules.")
with torch.no_grad():
    outputs = [draft(**inputs).last_hidden_state]
    merged = draft.merge_and_unload()
    merged.save_pretrained("merged")
    again = AutoModel.from_pretrained("merged", trust_remote_code=True).eval()
    outputs += [model(**inputs).last_hidden_state for model in (merged, again)]
torch.save(outputs, "outputs.pt")
"""


def test_through_the_hub_into_a_process_without_the_package(tmp_path, bases, hub):
    """Base and adapter in repositories of their own; the base's has moved on, the adapter knows its commit."""
    base = AutoModel.from_pretrained(bases["dspark"])
    commit = base.push_to_hub("user/draft").oid
    draft = AutoModel.from_pretrained("user/draft")
    base.mtp[0].attn_norm.weight.data *= 2
    base.push_to_hub("user/draft")

    trainer = trainer_of(None, tmp_path / "run", {"use_dora": True}, draft=draft, push_to_hub=True, **PUSH)
    trainer.train()
    trainer.push_to_hub()
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("user/draft", commit)
    assert trainer.draft_config.training["adapter"]["base_revision"] == commit
    assert set(hub.repos["user/adapter"].tree()) - {".gitattributes"} == FILES
    with pytest.raises(ValueError, match="another commit, which `LoraConfig"):
        trainer_of(None, tmp_path / "other", draft=AutoModel.from_pretrained("user/draft"), lora={"revision": commit})
    its_repository = {"push_to_hub": True, "hub_model_id": "user/draft"}
    with pytest.raises(ValueError, match="`hub_model_id`: user/draft holds the adapter's base draft"):
        trainer_of(None, tmp_path / "other", draft=AutoModel.from_pretrained("user/draft"), **its_repository)

    expected = output_of(trainer.draft)
    torch.save(inputs_of(trainer.draft), tmp_path / "inputs.pt")
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    result = subprocess.run(
        [sys.executable, "-I", "-c", FRESH_PROCESS], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    adapted, merged, again = torch.load(tmp_path / "outputs.pt")
    assert torch.equal(adapted, expected)
    torch.testing.assert_close(merged, expected, rtol=0, atol=1e-5)
    assert torch.equal(merged, again)
