"""The doctor on counting pairs: nothing to say of sound ones, and each planted fault found by the check it is for."""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from any_targets import quantise
from counting_pairs import SPECIAL, chats, counting_tokenizer
from doctor_patients import (
    FEW,
    LOG,
    ONLY_WARNED_OF,
    Patient,
    cut_off,
    sound_rows,
    sound_target,
)
from hub_server import Fault
from huggingface_hub import HfApi
from peft import LoraConfig, get_peft_model
from tokenizers import pre_tokenizers, processors
from torch import nn
from transformers import AutoConfig

from blockdraft.hub_cards.card import write_card
from blockdraft.hub_cards.upload import publish
from blockdraft.modeling.target.target_identity import target_record
from blockdraft.trainer.cli.main import main
from blockdraft.trainer.diagnostics.checkpoint import check_code, draft_folder, logged_training, read_settings
from blockdraft.trainer.diagnostics.doctor import doctor
from blockdraft.trainer.diagnostics.findings import FAULT, SKIPPED, WARNING
from blockdraft.trainer.runs import load_draft


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_sound_pair_has_no_fault_and_no_warning(kind, sound_drafts):
    """With every measurement taken; only the engine is not asked for."""
    tokenizer = counting_tokenizer()
    findings = doctor(sound_target(), tokenizer, sound_drafts[kind], sound_rows(), num_prompts=6, max_new_tokens=32)
    assert [finding for finding in findings if finding.status in (FAULT, WARNING)] == []
    assert [finding.check for finding in findings if finding.status == SKIPPED] == ["engine"]
    assert len(findings) == 36 + (kind == "dspark")
    # Looking changes nothing, and a draft in memory is as sound as its folder.
    draft = load_draft(str(sound_drafts[kind]))
    before = draft.config.to_dict()
    in_memory = doctor(sound_target(), tokenizer, draft, sound_rows()[FEW], num_prompts=1, max_new_tokens=8)
    assert {finding.status for finding in in_memory} <= {"ok", SKIPPED}
    assert draft.config.to_dict() == before


# ---- faults that files and settings show ----------------------------------------------------------------------------


def no_layout_flag(patient: Patient) -> None:
    patient.settings(slot_layout=None)


def engines_serve_another_block(patient: Patient) -> None:
    path = patient.folder / "config.json"
    config = json.loads(path.read_text())
    config["dflash_config"]["block_size"] = 8
    path.write_text(json.dumps(config))


def layers_beyond_the_target(patient: Patient) -> None:
    patient.settings(target_layer_ids=[1, 9])


def layers_in_reverse(patient: Patient) -> None:
    patient.settings(target_layer_ids=[3, 1])


def another_capture_point(patient: Patient) -> None:
    patient.settings(capture_point="attention_input_mean")


def mask_is_a_stop_token(patient: Patient) -> None:
    patient.settings(mask_token_id=patient.tokenizer.eos_token_id)


def mask_past_the_embedding(patient: Patient) -> None:
    patient.settings(mask_token_id=64)


def mask_that_is_no_number(patient: Patient) -> None:
    patient.settings(mask_token_id="<|reserved|>")


def bidirectional_without_positions(patient: Patient) -> None:
    patient.settings(is_causal=False, sliding_window=None)


def setting_of_another_type(patient: Patient) -> None:
    patient.settings(num_attention_heads="four")


def head_in_the_checkpoint(patient: Patient) -> None:
    head = patient.target.get_output_embeddings().weight.detach().clone()
    patient.weights(lambda tensors: tensors.update({"lm_head.weight": head}))


def tensor_missing(patient: Patient) -> None:
    patient.weights(lambda tensors: tensors.pop("fc.weight"))


def tensors_of_another_shape(patient: Patient) -> None:
    patient.settings(kv_lora_rank=16)


def weights_cut_off(patient: Patient) -> None:
    path = patient.folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def weights_not_a_number(patient: Patient) -> None:
    patient.weights(lambda tensors: tensors["fc.weight"][3, 5].fill_(float("nan")))


def matrix_of_zeros(patient: Patient) -> None:
    patient.weights(lambda tensors: tensors["layers.0.self_attn.o_proj.weight"].zero_())


def code_left_behind(patient: Patient) -> None:
    (patient.folder / "modeling_kimi_k3_dflash.py").unlink()


def a_layers_code_left_behind(patient: Patient) -> None:
    (patient.folder / "kimi_k3_layers.py").unlink()


def no_auto_map(patient: Patient) -> None:
    patient.settings(auto_map=None)


def never_trained(patient: Patient) -> None:
    patient.settings(training={"global_step": 0, "epoch": 0.0, "batch_size": 8})


def another_template(patient: Patient) -> None:
    patient.tokenizer.chat_template = patient.tokenizer.chat_template.replace("<|im_end|>", "<|im_end|> ")


def words_in_another_order(patient: Patient) -> None:
    words = [*SPECIAL, "user", "assistant", "system", *map(str, reversed(range(40)))]
    patient.tokenizer = counting_tokenizer(words)


def digits_apart(patient: Patient) -> None:
    backend = patient.tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    )


def bos_in_front(patient: Patient) -> None:
    single = {"single": "<|im_start|> $A", "special_tokens": [("<|im_start|>", 1)]}
    patient.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**single)


def a_word_more(patient: Patient) -> None:
    patient.tokenizer.add_tokens("forty")


def fine_tuned_embedding(patient: Patient) -> None:
    with torch.no_grad():
        patient.target.get_input_embeddings().weight.mul_(1.01)


def fine_tuned_layer(patient: Patient) -> None:
    with torch.no_grad():
        patient.target.model.layers[2].mlp.up_proj.weight.mul_(1.01)


def tokenizer_cut_off(patient: Patient) -> None:
    cut_off(patient.folder / "tokenizer_config.json")


def tokenizer_of_another_kind(patient: Patient) -> None:
    (patient.folder / "tokenizer_config.json").write_text("[]")


def template_of_other_bytes(patient: Patient) -> None:
    (patient.folder / "chat_template.jinja").write_bytes(b"\xff\xfe")


def log_cut_off(patient: Patient) -> None:
    path = patient.folder / "trainer_state.json"
    path.write_text(json.dumps({"log_history": LOG}))
    cut_off(path)


def log_left_out(patient: Patient) -> None:
    (patient.folder / "trainer_state.json").write_text(json.dumps({"global_step": 400}))


def log_without_numbers(patient: Patient) -> None:
    logs = [{"accuracy": None, "estimated_tau": 2.0}]
    (patient.folder / "trainer_state.json").write_text(json.dumps({"log_history": logs}))


def report_cut_off(patient: Patient) -> None:
    path = patient.folder / "report.json"
    path.write_text(json.dumps({"log_history": LOG}))
    cut_off(path)


def padded_embedding(patient: Patient) -> None:
    patient.target.resize_token_embeddings(72)


def head_not_tied(patient: Patient) -> None:
    patient.target.config.tie_word_embeddings = True


def narrower_embedding(patient: Patient) -> None:
    rows = patient.target.get_input_embeddings().weight[:, :16]
    patient.target.set_input_embeddings(nn.Embedding.from_pretrained(rows.detach()))


def head_of_zeros(patient: Patient) -> None:
    nn.init.zeros_(patient.target.lm_head.weight)


def scaled_layer_input(patient: Patient) -> None:
    def scale(module, args, kwargs):
        return (2 * args[0], *args[1:]), kwargs

    patient.target.model.layers[0].register_forward_pre_hook(scale, with_kwargs=True)


def head_not_a_number(patient: Patient) -> None:
    patient.target.model.norm.register_forward_hook(lambda module, args, output: output * float("nan"))


def soft_cap_that_the_target_lacks(patient: Patient) -> None:
    patient.settings(final_logit_softcapping=5.0)


def another_multiplier(patient: Patient) -> None:
    patient.settings(output_multiplier=0.5)


def target_in_bfloat16(patient: Patient) -> None:
    patient.target.to(torch.bfloat16)


def quantised_target(patient: Patient) -> None:
    patient.target.config.quantization_config = {"quant_method": "fp8"}


SEEN = {
    no_layout_flag: "slot layout",
    engines_serve_another_block: "engine view",
    layers_beyond_the_target: "layer ids",
    layers_in_reverse: "layer ids",
    another_capture_point: "capture point",
    mask_is_a_stop_token: "mask token",
    mask_past_the_embedding: "mask token",
    mask_that_is_no_number: "mask token",
    bidirectional_without_positions: "visibility",
    setting_of_another_type: "configuration",
    head_in_the_checkpoint: "stray head",
    tensor_missing: "weights",
    tensors_of_another_shape: "weights",
    weights_cut_off: "weights",
    weights_not_a_number: "weight values",
    matrix_of_zeros: "weight values",
    code_left_behind: "code",
    a_layers_code_left_behind: "code",
    no_auto_map: "code",
    never_trained: "training",
    another_template: "chat template",
    tokenizer_cut_off: "chat template",
    tokenizer_of_another_kind: "chat template",
    template_of_other_bytes: "chat template",
    log_cut_off: "training log",
    log_left_out: "training log",
    log_without_numbers: "training log",
    report_cut_off: "training log",
    words_in_another_order: "tokenizer",
    digits_apart: "tokenizer",
    bos_in_front: "tokenizer",
    a_word_more: "tokenizer",
    fine_tuned_embedding: "target",
    fine_tuned_layer: "target",
    padded_embedding: "target",
    head_not_tied: "heads",
    head_of_zeros: "heads",
    narrower_embedding: "heads",
    soft_cap_that_the_target_lacks: "logits",
    another_multiplier: "logits",
    head_not_a_number: "logits",
    scaled_layer_input: "embedding scale",
    target_in_bfloat16: "dtype",
    quantised_target: "dtype",
}


@pytest.mark.parametrize("plant", SEEN, ids=lambda plant: plant.__name__)
def test_a_fault_is_seen_without_data(plant, admit):
    patient = admit("dflash")
    plant(patient)
    finding = patient.examine()[SEEN[plant]]
    assert finding.status == (WARNING if finding.check in ONLY_WARNED_OF else FAULT), finding
    assert finding.found and finding.mend


# ---- what is no fault -----------------------------------------------------------------------------------------------


def test_a_quantised_target_is_looked_at_as_any_other(admit):
    """Its head has no weight to read; and of two configurations that say it is tied, one is right."""
    patient = admit("dspark")
    quantise(patient.target)
    found = patient.examine(measure=True, num_prompts=1)
    assert found["heads"].status == "ok" and "Int8Linear" in found["heads"].found
    assert found["draft accuracy"].status == found["logits"].status == "ok"
    tied = admit("dflash")
    tied.target.config.tie_word_embeddings = True
    tied.target.get_output_embeddings().weight = nn.Parameter(tied.target.get_input_embeddings().weight.detach())
    assert tied.examine()["heads"].status == "ok"


def test_tokens_that_the_target_hides_are_no_other_logits(admit):
    patient = admit("dflash")

    def hide(module, args, output):
        output.logits[..., 50:] = float("-inf")
        return output

    patient.target.register_forward_hook(hide)
    assert patient.examine()["logits"].status == "ok"


def test_a_record_of_the_vocabulary_alone(admit):
    """A draft that does not say how its tokenizer splits text."""
    patient = admit("dflash")
    patient.settings(target=target_record(patient.target, patient.tokenizer) | {"tokenization_sha256": None})
    digits_apart(patient)
    finding = patient.examine()["tokenizer"]
    assert finding.status == "ok" and "not recorded" in finding.found


def test_an_adapter_that_was_merged(admit):
    """The same function, though the kinds of adapters differ; another kind is another function."""
    patient = admit("dflash")
    lora = LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(patient.target, lora)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1e-3)
    record = target_record(adapted, patient.tokenizer)
    patient.settings(target=record)
    assert patient.examine()["target"].status == "ok"
    patient.settings(target=record | {"adapters": ["IA3"]})
    assert patient.examine()["target"].status == FAULT
    patient.settings(target=record | {"adapters": None})
    assert patient.examine()["target"].status == WARNING

    patient.settings(target=record)
    patient.target = adapted.merge_and_unload()
    found = patient.examine(measure=True)
    assert found["target"].status == WARNING and "merged" in found["target"].mend
    assert [finding for finding in found.values() if finding.status == FAULT] == []


def test_one_of_several_templates(admit):
    patient = admit("dflash")
    patient.tokenizer.chat_template = {"default": patient.tokenizer.chat_template, "tool_use": "{{ tools }}"}
    assert patient.examine()["chat template"].status == "ok"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('system first') }}", "system first"),
        ("{% if add_generation_prompt %}{{ messages[0]['content'] }} 1{% else %}<|im_end|>{% endif %}", "not show"),
    ],
)
def test_templates_that_do_not_show_what_precedes_an_answer(template, found, admit):
    patient = admit("dflash")
    patient.tokenizer.chat_template = template
    finding = patient.examine(measure=True, num_prompts=1)["prompts"]
    assert finding.status == SKIPPED and found in finding.found


def test_an_engine_is_looked_at_when_named(admit):
    patient = admit("dspark")
    finding = patient.examine(engine="vllm")["engine"]
    assert finding.status == WARNING and "capture_point" in finding.found
    assert "takes its target's quantisation" not in finding.found  # the target is there to be looked at
    with pytest.raises(ValueError, match="`engine` is 'tgi'"):
        patient.examine(engine="tgi")


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
@pytest.mark.parametrize("name", ["auto_map", "target", "objective", "training", "dflash_config"])
@pytest.mark.parametrize("value", ["x", ["y"]])
def test_settings_of_another_type_are_named(kind, name, value, admit):
    """What holds settings and does not is refused by name; what the family does not have is nobody's."""
    patient = admit(kind)
    path = patient.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    if (kind, name) == ("dspark", "dflash_config"):
        assert patient.examine()["engine view"].status == "ok"
    else:
        with pytest.raises(ValueError, match=f"`{name}` is .*, not an object"):
            patient.examine()


REPO = "user/draft"


@pytest.fixture
def published(hub, admit) -> Path:
    """The directory of a draft that is on the Hub, with a checkpoint of its training."""
    folder = admit("dflash").folder
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": LOG}))
    write_card(folder, AutoConfig.from_pretrained(folder))
    publish(folder, REPO, checkpoints={"checkpoint-1": folder})
    return folder


def test_of_the_hub_s_checkpoints_no_weights_are_read(published):
    folder = draft_folder(REPO)
    assert [path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors")] == ["model.safetensors"]
    assert logged_training(folder)[0] == {"accuracy": 0.98, "estimated_tau": 3.9}


@pytest.mark.parametrize("offline", [True, False])
def test_code_that_is_not_in_the_cache_is_no_fault(published, hub, monkeypatch, offline):
    """Only what the Hub, where it answers, has not either."""

    def check():
        folder = draft_folder(REPO)
        return check_code(folder, read_settings(folder)).status

    load_draft(REPO)  # by the package's own classes
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
        hub.faults = [Fault("/api/", 503, times=100)]
        assert check() == SKIPPED
    hub.faults = []
    assert check() == "ok"
    HfApi().delete_file("kimi_k3_layers.py", REPO)
    assert check() == FAULT


def test_command(admit, tmp_path, capsys):
    """A sound pair: 0. A fault: 1, with what was found and how to mend it. No draft: 2."""
    patient = admit("dflash")
    folder = tmp_path / "target"
    patient.target.save_pretrained(folder)
    patient.tokenizer.save_pretrained(folder)
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chats()[FEW]))
    command = ["doctor", str(folder), str(patient.folder), str(data), "--num_prompts", "2", "--max_new_tokens", "16"]
    assert main(command) == 0
    assert "0 faults, 0 warnings" in capsys.readouterr().out

    no_layout_flag(patient)
    output = tmp_path / "findings.json"
    assert main([*command[:3], "--output", str(output)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("fault    slot layout") and '"slot_layout": "1+N"' in text
    assert json.loads(output.read_text())[0].keys() == {"check", "status", "found", "mend"}

    (patient.folder / "config.json").write_text("[]")
    assert main(command) == 2
    assert "holds no settings" in capsys.readouterr().err
    (patient.folder / "config.json").unlink()
    assert main(command) == 2
    assert "no config.json" in capsys.readouterr().err
