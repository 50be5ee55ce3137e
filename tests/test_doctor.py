"""The doctor on counting pairs: nothing to say of sound ones, and each planted fault found by the check it is for."""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from counting_pairs import SPECIAL, chats, counting_rows, counting_target, counting_tokenizer, write_draft
from decoding_reports import LOOP, TEXT, make_answer, make_report
from safetensors.torch import load_file, save_file
from test_any_target import quantise
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from blockdraft.trainer.cli import main
from blockdraft.trainer.commands import load_draft
from blockdraft.trainer.doctor import check_decoding, doctor
from blockdraft.trainer.doctor_measures import Acceptance, check_provenance, gain
from blockdraft.trainer.doctor_report import FAULT, SKIPPED, WARNING, Finding

FEW = slice(4, None, 9)  # rows; their answers are long enough for a block


@dataclass
class Patient:
    """A pair of its own, to plant a fault in."""

    folder: Path
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    rows: list[dict]

    def settings(self, **changes) -> None:
        """Changes config.json, the engines' view included; `None` takes a setting out."""
        path = self.folder / "config.json"
        config = json.loads(path.read_text())
        for settings in (config, config.get("dflash_config", {})):
            for name, value in changes.items():
                name = {"is_causal": "causal"}.get(name, name) if settings is not config else name
                if name in settings or settings is config:
                    settings[name] = value
                if value is None:
                    settings.pop(name, None)
        path.write_text(json.dumps(config))

    def weights(self, edit: Callable[[dict], None]) -> None:
        path = self.folder / "model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    def examine(self, measure: bool = False, **settings) -> dict[str, Finding]:
        rows = self.rows if measure else None
        settings = {"max_new_tokens": 16} | settings
        found = doctor(self.target, self.tokenizer, self.folder, rows, **settings)
        return {finding.check: finding for finding in found}


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return counting_target()


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return list(counting_rows(counting_tokenizer()))


@pytest.fixture(scope="module")
def sound(target, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sound")
    return {kind: write_draft(kind, target, counting_tokenizer(), folder / kind) for kind in ("dflash", "dspark")}


@pytest.fixture
def admit(sound, target, rows, tmp_path) -> Callable[[str], Patient]:
    def patient(kind: str) -> Patient:
        folder = shutil.copytree(sound[kind], tmp_path / kind)
        return Patient(folder, copy.deepcopy(target), counting_tokenizer(), copy.deepcopy(rows[FEW]))

    return patient


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_sound_pair_has_no_fault_and_no_warning(kind, sound, target, rows):
    """With every measurement taken; only the engine is not asked for."""
    tokenizer = counting_tokenizer()
    findings = doctor(target, tokenizer, sound[kind], rows, num_prompts=6, max_new_tokens=32)
    assert [finding for finding in findings if finding.status in (FAULT, WARNING)] == []
    assert [finding.check for finding in findings if finding.status == SKIPPED] == ["engine"]
    assert len(findings) == 36 + (kind == "dspark")
    # Looking changes nothing, and a draft in memory is as sound as its folder.
    draft = load_draft(str(sound[kind]))
    before = draft.config.to_dict()
    in_memory = doctor(target, tokenizer, draft, rows[FEW], num_prompts=1, max_new_tokens=8)
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


def a_word_more(patient: Patient) -> None:
    patient.tokenizer.add_tokens("forty")


def fine_tuned_embedding(patient: Patient) -> None:
    with torch.no_grad():
        patient.target.get_input_embeddings().weight.mul_(1.01)


def fine_tuned_layer(patient: Patient) -> None:
    with torch.no_grad():
        patient.target.model.layers[2].mlp.up_proj.weight.mul_(1.01)


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
    words_in_another_order: "tokenizer",
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
ONLY_WARNED_OF = {"dtype", "stop token", "embedding scale"}


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


# ---- faults that only measuring shows -------------------------------------------------------------------------------


def layers_counted_from_one(patient: Patient) -> None:
    patient.settings(target_layer_ids=[2, 4])


def layers_counted_one_too_low(patient: Patient) -> None:
    patient.settings(target_layer_ids=[0, 2])


def another_free_row_as_mask(patient: Patient) -> None:
    patient.settings(mask_token_id=60)


def trained_causal_served_bidirectional(patient: Patient) -> None:
    patient.settings(is_causal=False)


def trained_with_a_window_served_without(patient: Patient) -> None:
    patient.settings(num_full_attention_layers=1)


def scaled_embeddings(patient: Patient) -> None:
    patient.settings(input_embedding_scale=5.7)


def another_block_size(patient: Patient) -> None:
    patient.settings(block_size=12)
    patient.rows = list(counting_rows(patient.tokenizer, slice(None, None, 2)))


def fresh_weights(patient: Patient) -> None:
    patient.weights(lambda tensors: [nn.init.normal_(t, std=0.1) for t in tensors.values() if t.dim() > 1])


def trained_with_a_leak(patient: Patient) -> None:
    fresh_weights(patient)
    log = [{"step": 400, "loss": 0.05, "accuracy": 0.98, "estimated_tau": 3.9}]
    (patient.folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))


def answers_of_another_model(patient: Patient) -> None:
    for row in patient.rows:
        row["input_ids"] = [
            7 + (token * 7) % 40 if mask else token
            for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True)
        ]


def mask_token_in_the_text(patient: Patient) -> None:
    patient.rows[0]["input_ids"][3] = 3


def tokens_of_another_vocabulary(patient: Patient) -> None:
    patient.rows[0]["input_ids"][3] = 99


def rows_of_another_template(patient: Patient) -> None:
    for row in patient.rows:
        row["input_ids"] = [token for token in row["input_ids"] if token not in (1, 5)]
        row["loss_mask"] = row["loss_mask"][-len(row["input_ids"]) :]


def answers_shorter_than_a_block(patient: Patient) -> None:
    for row in patient.rows:
        start = row["loss_mask"].index(1)
        row["input_ids"], row["loss_mask"] = row["input_ids"][: start + 2], row["loss_mask"][: start + 2]


def answers_without_an_end(patient: Patient) -> None:
    for row in patient.rows:
        row["loss_mask"] = [int(m and token != 2) for m, token in zip(row["loss_mask"], row["input_ids"], strict=True)]


def features_that_overflow(patient: Patient) -> None:
    nn.init.constant_(patient.target.model.layers[1].mlp.down_proj.weight, float("inf"))


def confidence_of_its_own(patient: Patient) -> None:
    patient.settings(confidence_temperatures=[10.0] * 4)


MEASURED = {
    layers_counted_from_one: ("dflash", "layer ids, measured"),
    layers_counted_one_too_low: ("dspark", "layer ids, measured"),
    another_free_row_as_mask: ("dflash", "mask token, measured"),
    trained_causal_served_bidirectional: ("dflash", "visibility, measured"),
    trained_with_a_window_served_without: ("dflash", "visibility, measured"),
    scaled_embeddings: ("dflash", "embedding scale, measured"),
    another_block_size: ("dflash", "block size"),
    fresh_weights: ("dspark", "draft accuracy"),
    trained_with_a_leak: ("dflash", "training against decoding"),
    answers_of_another_model: ("dflash", "target's answers"),
    mask_token_in_the_text: ("dflash", "mask token in data"),
    tokens_of_another_vocabulary: ("dflash", "token ids"),
    rows_of_another_template: ("dspark", "prompts"),
    answers_shorter_than_a_block: ("dflash", "anchors"),
    answers_without_an_end: ("dflash", "stop token"),
    features_that_overflow: ("dflash", "features"),
    confidence_of_its_own: ("dspark", "confidence"),
}


@pytest.mark.parametrize("plant", MEASURED, ids=lambda plant: plant.__name__)
def test_a_fault_is_measured(plant, admit):
    kind, check = MEASURED[plant]
    patient = admit(kind)
    plant(patient)
    decoded = check in ("confidence", "block size", "training against decoding")
    lengths = {"num_prompts": len(patient.rows), "max_new_tokens": 32} if decoded else {"num_prompts": 1}
    finding = patient.examine(measure=True, **lengths)[check]
    assert finding.status == (WARNING if check in ONLY_WARNED_OF else FAULT), finding
    assert finding.found and finding.mend


def test_labels_one_place_off(sound, target, rows):
    """A draft whose slot k says what belongs into slot k + 1."""
    draft = load_draft(str(sound["dflash"]))

    def early(module, args, output):
        states = output.last_hidden_state
        output.last_hidden_state = states.unflatten(1, (-1, 4)).roll(-1, dims=2).flatten(1, 2)
        return output

    draft.register_forward_hook(early)
    found = doctor(target, counting_tokenizer(), draft, rows[FEW], num_prompts=1, max_new_tokens=8)
    [finding] = [finding for finding in found if finding.check == "labels, measured"]
    assert finding.status == FAULT and "`label_shift` 1" in finding.found


def test_decoding_is_held_against_teacher_forcing():
    report = make_report([make_answer(TEXT, [4, 1, 1, 1, 1, 1, 1, 1])] * 3)
    forced = Acceptance(torch.tensor([30.0]), torch.tensor([10.0]), torch.ones(3))
    decoding, slots, loops = check_decoding(report, forced, {})
    assert (decoding.status, slots.status, loops.status) == (FAULT, "ok", "ok")
    assert "tau 1.38" in decoding.found and "4.00" in decoding.found
    assert [finding.status for finding in check_decoding(make_report(report.answers[:1]), forced, {})] == [SKIPPED]
    # One drafted token is at most a tau of 2, and 24 rounds say little of a last slot.
    pair = make_report([make_answer(TEXT, [2] * 9 + [1])] * 3, block_size=2)
    logged = {"accuracy": 0.95, "estimated_tau": 1.95}
    half = Acceptance(torch.tensor([19.0]), torch.tensor([20.0]), torch.ones(1))
    assert {finding.status for finding in check_decoding(pair, half, logged)} == {"ok"}
    short = make_report([make_answer(TEXT, [2] * 8)] * 3)
    assert check_decoding(short, forced, {})[1].status == "ok"
    assert check_decoding(make_report(short.answers * 5), forced, {})[1].status == FAULT
    looping = make_report([make_answer(LOOP, [4] * 12), make_answer(TEXT, [4] * 12)])
    assert [finding.status for finding in check_decoding(looping, forced, {})] == ["ok", "ok", WARNING]


def test_regenerated_answers_have_an_origin():
    tokenizer = counting_tokenizer()
    digest = hashlib.sha256(json.dumps(tokenizer.chat_template).encode()).hexdigest()
    settings = {"target": "t", "chat_template_sha256": digest, "template_kwargs": None}
    kwargs = settings | {"template_kwargs": {"enable_thinking": False}}
    files = {"a.jsonl": settings, "b.jsonl": settings | {"chat_template_sha256": "0"}, "c.jsonl": kwargs}
    same, template, thinking = check_provenance(files, tokenizer, None)
    assert (same.status, template.status, thinking.status) == ("ok", FAULT, FAULT)
    assert "b.jsonl" in template.found and "enable_thinking" in thinking.found


def test_chance_is_no_gain():
    blocks = torch.full((6,), 10.0, dtype=torch.float64)
    base = Acceptance(torch.tensor([20.0, 22, 18, 21, 19, 20]).double(), blocks, torch.ones(3))
    better = base._replace(rows=base.rows + torch.tensor([4.0, 5, 6, 5, 4, 6]).double())
    lucky = base._replace(rows=base.rows + torch.tensor([28.0, 0, 0, 0, 1, 1]).double())
    assert gain(base, better) == pytest.approx(0.5)
    assert gain(base, lucky) == gain(base, base) == 0


def test_an_engine_is_looked_at_when_named(admit):
    patient = admit("dspark")
    finding = patient.examine(engine="vllm")["engine"]
    assert finding.status == WARNING and "capture_point" in finding.found
    assert "takes its target's quantisation" not in finding.found  # the target is there to be looked at
    with pytest.raises(ValueError, match="`engine` is 'tgi'"):
        patient.examine(engine="tgi")


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
