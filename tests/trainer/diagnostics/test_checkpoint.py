"""The doctor's look at a saved draft: each planted fault of its files, configuration and weights is found."""

import json
from pathlib import Path

import huggingface_hub.constants
import pytest
from doctor_patients import LOG, Patient, assert_found, cut_off
from hub_server import Fault
from huggingface_hub import HfApi
from transformers import AutoConfig

from blockdraft.hub_cards.card import write_card
from blockdraft.hub_cards.upload import publish
from blockdraft.trainer.diagnostics.checkpoint import check_code, draft_folder, logged_training
from blockdraft.trainer.diagnostics.findings import FAULT, SKIPPED
from blockdraft.trainer.loading import load_draft


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


def mask_is_a_stop_token(patient: Patient) -> None:
    patient.settings(mask_token_id=patient.tokenizer.eos_token_id)


def mask_past_the_embedding(patient: Patient) -> None:
    patient.settings(mask_token_id=64)


def mask_that_is_no_number(patient: Patient) -> None:
    patient.settings(mask_token_id="<|reserved|>")


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


def code_left_behind(patient: Patient) -> None:
    (patient.folder / "modeling_kimi_k3_dflash.py").unlink()


def a_layers_code_left_behind(patient: Patient) -> None:
    (patient.folder / "kimi_k3_layers.py").unlink()


def no_auto_map(patient: Patient) -> None:
    patient.settings(auto_map=None)


def another_template(patient: Patient) -> None:
    patient.tokenizer.chat_template = patient.tokenizer.chat_template.replace("<|im_end|>", "<|im_end|> ")


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


# Each with the check that finds it, and what it has to name.
PLANTED = {
    no_layout_flag: ("configuration", "`slot_layout`"),
    engines_serve_another_block: ("configuration", "`dflash_config.block_size` is 8"),
    layers_beyond_the_target: ("configuration", "`target_layer_ids` is [1, 9]"),
    layers_in_reverse: ("configuration", "strictly increasing"),
    mask_is_a_stop_token: ("configuration", "bos or eos token"),
    mask_past_the_embedding: ("configuration", "`mask_token_id` is 64"),
    mask_that_is_no_number: ("configuration", "mask_token_id"),
    setting_of_another_type: ("configuration", "num_attention_heads"),
    head_in_the_checkpoint: ("weights", "unknown, so they are not used: lm_head.weight"),
    tensor_missing: ("weights", ""),
    tensors_of_another_shape: ("weights", ""),
    weights_cut_off: ("weights", ""),
    code_left_behind: ("code", ""),
    a_layers_code_left_behind: ("code", ""),
    no_auto_map: ("code", ""),
    another_template: ("chat template", ""),
    tokenizer_cut_off: ("chat template", ""),
    tokenizer_of_another_kind: ("chat template", ""),
    template_of_other_bytes: ("chat template", ""),
    log_cut_off: ("training log", ""),
    log_left_out: ("training log", ""),
    log_without_numbers: ("training log", ""),
    report_cut_off: ("training log", ""),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_fault_of_the_checkpoint_is_found(plant, admit):
    patient = admit("dflash")
    plant(patient)
    check, named = PLANTED[plant]
    finding = assert_found(patient.examine(), check)
    assert named in finding.found


def test_a_configuration_that_contradicts_itself_is_read_as_far_as_it_goes(admit):
    """Under the draft's own names, so that the rest can be looked at; one that cannot be built ends the look."""
    patient = admit("dflash")
    no_layout_flag(patient)
    engines_serve_another_block(patient)
    found = patient.examine()
    assert found["configuration"].status == FAULT and found["weights"].status == found["target"].status == "ok"
    setting_of_another_type(patient)
    found = patient.examine()
    assert not {"weights", "target"} & found.keys()
    assert found["measurements"].status == SKIPPED and found["code"].status == "ok"


def test_settings_of_another_type_are_named(admit):
    """Where settings should be and are not, the error names the place; a setting of another family is nobody's."""
    for kind in ("dflash", "dspark"):
        patient = admit(kind)
        path = patient.folder / "config.json"
        sound = json.loads(path.read_text())
        for name in ("auto_map", "target", "objective", "training", "dflash_config"):
            path.write_text(json.dumps(sound | {name: ["x"]}))
            if (kind, name) == ("dspark", "dflash_config"):
                assert patient.examine()["configuration"].status == "ok"
            else:
                with pytest.raises(ValueError, match=f"`{name}` is .*, not an object"):
                    patient.examine()
        path.write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
        with pytest.raises(ValueError, match="no draft of this library, but a model of the type 'qwen3'"):
            patient.examine()
        path.write_text(json.dumps(sound | {"model_type": "qwen3"}))
        with pytest.raises(ValueError, match="`model_type` 'qwen3'; a draft has kimi_k3_dflash"):
            patient.examine()


def test_one_of_several_templates(admit):
    patient = admit("dflash")
    patient.tokenizer.chat_template = {"default": patient.tokenizer.chat_template, "tool_use": "{{ tools }}"}
    assert patient.examine()["chat template"].status == "ok"


# ---- on the Hub -----------------------------------------------------------------------------------------------------

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
    assert logged_training(folder) == {"accuracy": 0.98, "estimated_tau": 3.9}


def test_code_that_is_not_in_the_cache_is_no_fault(published, hub, monkeypatch):
    """Only what is not on the Hub either, where that answers, is one."""
    load_draft(REPO)  # by the package's own classes
    hub.faults = [Fault("/api/", 503, times=100)]
    for offline in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
            assert check_code(draft_folder(REPO)).status == SKIPPED
    hub.faults = []
    assert check_code(draft_folder(REPO)).status == "ok"
    HfApi().delete_file("kimi_k3_layers.py", REPO)
    assert check_code(draft_folder(REPO)).status == FAULT
