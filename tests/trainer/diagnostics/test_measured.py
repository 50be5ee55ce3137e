"""The doctor's measurements on counting pairs: what only they find, and what they are judged by."""

import copy
import json

import pytest
import torch
from counting_pairs import counting_rows, counting_tokenizer
from decoding_models import LLAMA_LIKE
from decoding_reports import LOOP, TEXT, make_answer, make_report
from doctor_patients import (
    FEW,
    LOG,
    ONLY_WARNED_OF,
    Patient,
    sound_rows,
    sound_target,
)
from torch import nn
from transformers import Qwen3Config

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.trainer.data.dataset import chat_template_digest
from blockdraft.trainer.diagnostics.doctor import check_decoding, doctor
from blockdraft.trainer.diagnostics.findings import FAULT, SKIPPED, WARNING
from blockdraft.trainer.diagnostics.measured import Acceptance, changed, check_provenance, gain, other_views
from blockdraft.trainer.runs import load_draft

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
    patient.settings(sliding_window=None)


def scaled_embeddings(patient: Patient) -> None:
    patient.settings(input_embedding_scale=5.7)


def another_block_size(patient: Patient) -> None:
    patient.settings(block_size=12)
    patient.rows = list(counting_rows(patient.tokenizer, slice(None, None, 2)))


def fresh_weights(patient: Patient) -> None:
    patient.weights(lambda tensors: [nn.init.normal_(t, std=0.1) for t in tensors.values() if t.dim() > 1])


def trained_with_a_leak(patient: Patient) -> None:
    fresh_weights(patient)
    (patient.folder / "trainer_state.json").write_text(json.dumps({"log_history": LOG}))


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


@pytest.mark.parametrize("served", [(16, 0, True), (16, 1, False), (128, 1, True), (None, 0, True), (None, 0, False)])
def test_every_view_of_a_hybrid_draft_is_tried(served):
    """Served as such a one, a draft whose last layer learned with the whole context and the others with 16 tokens."""
    names = ("sliding_window", "num_full_attention_layers", "is_causal")
    shape = LLAMA_LIKE | {"num_key_value_heads": 4}
    config = KimiK3DFlashConfig.from_target_config(
        Qwen3Config(**shape), 60, 3, 16, **dict(zip(names, served, strict=True))
    )
    config = copy.deepcopy(config)
    before = config.to_dict()
    views = other_views(config)
    for view in views:
        with changed(config, **view):
            config.check_draft()
            view["seen"] = (config.context_windows, config.is_causal)
    seen = [view["seen"] for view in views]
    assert ([16, 16, None], True) in seen
    assert len(set(map(str, seen))) == len(seen) and (config.context_windows, config.is_causal) not in seen
    assert config.to_dict() == before
    alone = KimiK3DFlashConfig.from_target_config(Qwen3Config(**shape), 60, 1, 16)
    assert not any("num_full_attention_layers" in view for view in other_views(alone))


def test_labels_one_place_off(sound_drafts):
    """A draft whose slot k says what belongs into slot k + 1."""
    draft = load_draft(str(sound_drafts["dflash"]))

    def early(module, args, output):
        states = output.last_hidden_state
        output.last_hidden_state = states.unflatten(1, (-1, 4)).roll(-1, dims=2).flatten(1, 2)
        return output

    draft.register_forward_hook(early)
    found = doctor(sound_target(), counting_tokenizer(), draft, sound_rows()[FEW], num_prompts=1, max_new_tokens=8)
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


def test_regenerated_answers_have_an_origin(tmp_path):
    tokenizer = counting_tokenizer()
    here = {
        "target": sound_target().config.name_or_path,
        "revision": None,
        "dtype": "float32",
        "template_kwargs": None,
    }
    settings = here | {"chat_template_sha256": chat_template_digest(tokenizer)}
    kwargs = settings | {"template_kwargs": {"enable_thinking": False}}
    files = {"a.jsonl": settings, "b.jsonl": settings | {"chat_template_sha256": "0"}, "c.jsonl": kwargs}
    same, template, thinking = check_provenance(files, sound_target(), tokenizer, None)
    assert (same.status, template.status, thinking.status) == ("ok", FAULT, FAULT)
    assert "b.jsonl" in template.found and "enable_thinking" in thinking.found

    # Of another model, by its name; of the same name at another commit; the same folder by another path.
    (link := tmp_path / "moved").symlink_to(sound_target().config.name_or_path)
    published = copy.deepcopy(sound_target())
    published.config.name_or_path = "owner/counts"
    cases = (
        (sound_target(), {"target": "owner/other"}, "owner/other"),
        (sound_target(), {"target": "/gone/counting"}, "counting"),
        (published, {"target": "owner/counts", "revision": "a" * 40}, "a" * 40),
        (published, {"target": "owner/counts", "revision": "b" * 40}, None),
        (sound_target(), {"target": str(link)}, None),
    )
    for served, changes, named in cases:
        [finding] = check_provenance({"a.jsonl": settings | changes}, served, tokenizer, None, "b" * 40)
        assert finding.status == (WARNING if named else "ok"), finding
        assert named is None or (named in finding.found and "regenerate" in finding.mend)


def test_chance_is_no_gain():
    blocks = torch.full((6,), 10.0, dtype=torch.float64)
    base = Acceptance(torch.tensor([20.0, 22, 18, 21, 19, 20]).double(), blocks, torch.ones(3))
    better = base._replace(rows=base.rows + torch.tensor([4.0, 5, 6, 5, 4, 6]).double())
    lucky = base._replace(rows=base.rows + torch.tensor([28.0, 0, 0, 0, 1, 1]).double())
    assert gain(base, better) == pytest.approx(0.5)
    assert gain(base, lucky) == gain(base, base) == 0
