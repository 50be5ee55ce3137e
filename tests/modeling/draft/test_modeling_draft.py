"""What all drafts share: target's embedding and head, initialisation, atomic saving."""

import json

import pytest
import torch
from deepseek_v41_dspark_models import dspark_inputs, tiny_dspark
from draft_models import draft_inputs, tiny_draft
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from blockdraft.hub_cards import upload as publishing
from blockdraft.modeling.draft.block_visibility import block_visibility
from blockdraft.modeling.draft.modeling_draft import DraftPreTrainedModel
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel


def test_logits_are_scaled_then_capped():
    draft = tiny_draft(output_multiplier=0.5, final_logit_softcapping=3.0)
    head, hidden = nn.Linear(32, 64, bias=False), torch.randn(1, 4, 32) * 10
    torch.testing.assert_close(draft.compute_logits(hidden, head), 3 * torch.tanh(head(hidden) * 0.5 / 3))
    assert torch.equal(tiny_draft().compute_logits(hidden, head), head(hidden))


def test_blocks_are_embedded_by_the_target():
    table, ids = nn.Embedding(64, 32), torch.tensor([[5, 63, 63, 63]])
    assert torch.equal(tiny_draft().embed_block(ids, table), table(ids))
    assert torch.equal(tiny_draft(input_embedding_scale=2.0).embed_block(ids, table), table(ids) * 2)


def test_owns_neither_embedding_nor_head(tmp_path):
    draft = tiny_draft()
    assert draft.get_input_embeddings() is None and draft.get_output_embeddings() is None
    draft.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if "embed" in name or "head" in name]


def test_initialisation_is_torchs_default():
    draft = tiny_draft(hidden_size=128, initializer_range=0.5)
    for name, parameter in draft.named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            bound = parameter.shape[1] ** -0.5
            assert 0.9 * bound < parameter.abs().max() <= bound, name
    fc = draft.fc.weight
    torch.testing.assert_close(fc.std().item(), fc.shape[1] ** -0.5 / 3**0.5, rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("make", "make_inputs"), [(tiny_draft, draft_inputs), (tiny_dspark, dspark_inputs)], ids=["k3", "dspark"]
)
def test_arguments_that_no_draft_has_are_refused(make, make_inputs):
    """A misspelt one would be lost without a word; what PEFT's wrapper adds to its own is no argument."""
    draft = make()
    inputs = make_inputs(draft)
    expected = draft(**inputs).last_hidden_state
    assert torch.equal(draft(**inputs, inputs_embeds=None, return_dict=None).last_hidden_state, expected)
    for name, value in (("document_idz", torch.zeros(1, 7)), ("anchors", None), ("output_attentions", True)):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            draft(**inputs, **{name: value})


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("targets", [None, "all-linear", ["kv_b_proj", "o_proj"]])
def test_gradient_checkpointing_keeps_gradients(targets, use_reentrant):
    def gradients(checkpointing):
        torch.manual_seed(0)
        draft = tiny_draft().train()
        inputs = draft_inputs(draft, batch=2)
        if checkpointing:
            draft.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        if targets is not None:
            config = LoraConfig(r=2, target_modules=targets, task_type="FEATURE_EXTRACTION", init_lora_weights=False)
            draft = get_peft_model(draft, config)
        draft(**inputs).last_hidden_state.square().sum().backward()
        return {name: p.grad for name, p in draft.named_parameters() if p.requires_grad}

    expected = gradients(checkpointing=False)
    actual = gradients(checkpointing=True)
    assert len(expected) > 0 and None not in expected.values()
    torch.testing.assert_close(actual, expected)


def test_trainer_checkpoints_are_complete_drafts(tmp_path):
    class HiddenStates(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(**inputs).last_hidden_state.square().mean()

    draft = tiny_draft()
    rows = [{name: value[0] for name, value in draft_inputs(draft).items()} for _ in range(4)]
    arguments = TrainingArguments(tmp_path, max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    HiddenStates(draft, arguments, train_dataset=rows).train()
    for name in ("checkpoint-1", "checkpoint-2"):
        assert "auto_map" in json.loads((tmp_path / name / "config.json").read_text())
        assert (tmp_path / name / "modeling_kimi_k3_dflash.py").exists()
        assert not list((tmp_path / name).glob(".saving-*"))
    again = KimiK3DFlashDraftModel.from_pretrained(tmp_path / "checkpoint-2")
    torch.testing.assert_close(again.state_dict(), draft.state_dict(), rtol=0, atol=0)


def test_a_failed_save_leaves_the_earlier_one(tmp_path, monkeypatch):
    draft = tiny_draft()
    draft.save_pretrained(tmp_path)

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = files()

    def fail_after_the_config(self, directory, **kwargs):
        self.config.save_pretrained(directory)
        raise OSError("No space left on device")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", fail_after_the_config)
    nn.init.zeros_(draft.fc.weight)
    draft.config.objective = {"name": "another"}
    with pytest.raises(OSError, match="No space"):
        draft.save_pretrained(tmp_path)
    assert files() == before


@pytest.mark.parametrize("shard_sizes", [("10KB", "1GB"), ("1GB", "10KB"), ("10KB", "20KB")])
def test_weights_of_an_earlier_save_are_not_read(tmp_path, shard_sizes):
    for size in shard_sizes:
        draft = tiny_draft()
        draft.save_pretrained(tmp_path, max_shard_size=size)
    again = KimiK3DFlashDraftModel.from_pretrained(tmp_path)
    torch.testing.assert_close(again.state_dict(), draft.state_dict(), rtol=0, atol=0)
    index = tmp_path / "model.safetensors.index.json"
    shards = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    assert {file.name for file in tmp_path.glob("*.safetensors")} == shards


def test_other_processes_write_nothing(tmp_path):
    tiny_draft().save_pretrained(tmp_path, is_main_process=False)
    assert list(tmp_path.iterdir()) == []


def test_pushing_uploads_a_whole_draft(tmp_path, monkeypatch):
    pushed = {}

    def push(self, repo_id, **kwargs):
        pushed.update(kwargs, repo_id=repo_id)

    monkeypatch.setattr(publishing, "publish_model", push)
    draft = tiny_draft()
    draft.save_pretrained(tmp_path / "my-draft", push_to_hub=True, commit_message="First", private=True)
    assert pushed == {"repo_id": "my-draft", "commit_message": "First", "private": True, "token": None}
    draft.save_pretrained(tmp_path / "my-draft", push_to_hub=True, repo_id="me/draft", token="t")
    assert pushed["repo_id"] == "me/draft" and pushed["token"] == "t"

    # Code that lies beside the weights pushes where the package is absent.
    monkeypatch.setattr(DraftPreTrainedModel, "publisher", None)
    monkeypatch.setattr(PreTrainedModel, "push_to_hub", push)
    draft.push_to_hub("me/again", private=True)
    assert pushed["repo_id"] == "me/again" and pushed["private"]


def test_a_class_made_by_fsdp_is_saved_as_the_draft(tmp_path):
    draft = tiny_draft()
    draft.__class__ = type(
        "FSDPKimiK3DFlashDraftModel", (KimiK3DFlashDraftModel,), {"__module__": "torch.distributed.fsdp"}
    )
    draft.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "modeling_kimi_k3_dflash.KimiK3DFlashDraftModel"
    assert config["architectures"] == ["KimiK3DFlashDraftModel"]


# Blocks that are planned before the forward are computed as those whose anchors it is given.

HYBRID = {"sliding_window": 5, "num_hidden_layers": 3, "num_full_attention_layers": 1, "is_causal": True}
ANCHORS = torch.tensor([[1, 3, 9, 16, 22], [0, 7, 20, 0, 0]])
KEEP = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
DOCUMENTS = torch.tensor([[1] * 6 + [2] * 15 + [0] * 6, [1] * 27])
DRAFTS = {"k3": (tiny_draft, draft_inputs, HYBRID), "dspark": (tiny_dspark, dspark_inputs, {})}


def make(name: str, implementation: str = "sdpa"):
    model, inputs, settings = DRAFTS[name]
    draft = model(implementation, **settings)
    return draft, inputs(draft, context_length=27, blocks=5, batch=2)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", DRAFTS)
def test_a_plan_takes_the_place_of_anchors(name, implementation):
    draft, inputs = make(name, implementation)
    given = {"anchor_positions": ANCHORS, "block_keep_mask": KEEP, "document_ids": DOCUMENTS}
    expected = draft(**inputs, **given).last_hidden_state
    plan = draft.plan_blocks(ANCHORS, KEEP, 27, DOCUMENTS)
    assert plan.visible.keys() == set(draft.config.context_windows)
    assert torch.equal(draft(**inputs, block_plan=plan).last_hidden_state, expected)


@pytest.mark.parametrize("name", DRAFTS)
def test_the_forward_reads_nothing_back_from_the_device(name):
    """Of tensors without numbers nothing can be read: so a plan that was moved there says all in itself."""
    draft, inputs = make(name)
    plan = draft.plan_blocks(ANCHORS, KEEP, 27, DOCUMENTS).to(torch.device("meta"))
    draft.to("meta").set_experts_implementation("batched_mm") if name == "dspark" else draft.to("meta")
    hidden = draft(**{key: value.to("meta") for key, value in inputs.items()}, block_plan=plan).last_hidden_state
    assert hidden.shape == inputs["noise_embeds"].shape


@pytest.mark.parametrize("name", DRAFTS)
def test_inputs_of_other_shapes_are_refused(name):
    """Each by one dimension more or less, one row more, one column more: torch would broadcast, cut or gather."""
    model, inputs, _ = DRAFTS[name]
    draft = model()
    inputs = inputs(draft, context_length=27, blocks=5, batch=2)
    length = inputs["noise_embeds"].shape[1]
    visible = block_visibility(ANCHORS, KEEP, 27, draft.config.block_size).dense_mask()
    by_anchors = {"anchor_positions": ANCHORS, "block_keep_mask": KEEP, "document_ids": DOCUMENTS}
    by_mask = {"attention_mask": visible, "position_ids": torch.zeros(2, 27 + length, dtype=torch.long)}
    for given in (by_anchors, by_mask):
        draft(**inputs, **given)
        for key, value in (inputs | given).items():
            if key == "position_ids" and name != "dspark":
                continue
            for wrong in (value[..., :-1], value[:, :-1], torch.cat([value, value[:1]]), value[0], value[None]):
                with pytest.raises(ValueError, match=r"has the shape \[.*\], not \[|4D `attention_mask`"):
                    draft(**inputs | given | {key: wrong})
    for dtype in (torch.int64, torch.uint8):
        with pytest.raises(ValueError, match="make it bool"):
            draft(**inputs, **by_mask | {"attention_mask": visible.to(dtype)})
    one = {key: value[:, : draft.config.block_size] for key, value in inputs.items()}
    for order in ((None, visible, one["noise_embeds"]), (by_mask["position_ids"], visible, one["noise_embeds"])):
        with pytest.raises(ValueError, match="by keyword, `noise_embeds=`"):  # the reference's order
            draft(*order, inputs["context_hidden_states"])


def test_faults_are_named():
    draft, inputs = make("k3")
    wrong = {
        "`block_keep_mask` has the shape": (ANCHORS, KEEP[:, 1:], 27),
        "`document_ids` has the shape": (ANCHORS, KEEP, 27, DOCUMENTS[:, 1:]),
        "come back to a document": (ANCHORS, KEEP, 27, DOCUMENTS.flip(0) + torch.eye(2, 27).long()[[0, 0]]),
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            draft.plan_blocks(*given)
    plan = draft.plan_blocks(ANCHORS, KEEP, 27)
    mask = torch.ones(2, 1, 20, 47, dtype=torch.bool)
    for message, given in {
        "`block_plan` and `anchor_positions` say the same": {"block_plan": plan, "anchor_positions": ANCHORS},
        "`attention_mask` and": {"block_plan": plan, "attention_mask": mask},
        "`cache` is for one block": {"block_plan": plan, "use_cache": True},
        "is for 26 context rows": {"block_plan": draft.plan_blocks(ANCHORS, KEEP, 26)},
        "make 16": {"block_plan": draft.plan_blocks(ANCHORS[:, 1:], None, 27)},
        r"`anchor_positions` has the shape \[1, 5\], not \[2, N\]": {
            "block_plan": draft.plan_blocks(ANCHORS[:1], None, 27)
        },
    }.items():
        with pytest.raises(ValueError, match=message):
            draft(**inputs, **given)
    draft.set_attn_implementation("eager")
    plan = draft.plan_blocks(ANCHORS, KEEP, 27)
    draft.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="make it anew"):
        draft(**inputs, block_plan=plan)
