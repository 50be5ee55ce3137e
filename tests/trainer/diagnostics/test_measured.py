"""The doctor's measurements on counting pairs, teacher-forced and in decoding: what only they find, and how."""

import copy
import json

import pytest
import torch
from counting_pairs import counting_rows, counting_tokenizer
from decoding_models import LLAMA_LIKE
from decoding_reports import LOOP, TEXT, make_answer, make_report
from doctor_patients import FEW, LOG, Patient, assert_found, fresh_weights, sound_rows, sound_target
from torch import nn
from transformers import Qwen3Config

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.trainer.diagnostics.doctor import doctor
from blockdraft.trainer.diagnostics.findings import FAULT, SKIPPED, WARNING
from blockdraft.trainer.diagnostics.measured import Acceptance, changed, check_decoding, gain, other_views
from blockdraft.trainer.loading import load_draft


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


def answers_of_another_model(patient: Patient) -> None:
    for row in patient.rows:
        row["input_ids"] = [
            7 + (token * 7) % 40 if mask else token
            for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True)
        ]


def answers_shorter_than_a_block(patient: Patient) -> None:
    for row in patient.rows:
        start = row["loss_mask"].index(1)
        row["input_ids"], row["loss_mask"] = row["input_ids"][: start + 2], row["loss_mask"][: start + 2]


def features_that_overflow(patient: Patient) -> None:
    nn.init.constant_(patient.target.model.layers[1].mlp.down_proj.weight, float("inf"))


PLANTED = {
    layers_counted_from_one: ("dflash", "layer ids, measured"),
    layers_counted_one_too_low: ("dspark", "layer ids, measured"),
    another_free_row_as_mask: ("dflash", "mask token, measured"),
    trained_causal_served_bidirectional: ("dflash", "visibility, measured"),
    trained_with_a_window_served_without: ("dflash", "visibility, measured"),
    scaled_embeddings: ("dflash", "embedding scale, measured"),
    fresh_weights: ("dspark", "draft accuracy"),
    answers_of_another_model: ("dflash", "target's answers"),
    answers_shorter_than_a_block: ("dflash", "anchors"),
    features_that_overflow: ("dflash", "features"),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_fault_is_measured(plant, admit):
    kind, check = PLANTED[plant]
    patient = admit(kind)
    plant(patient)
    assert_found(patient.examine(measure=True, num_prompts=1, max_new_tokens=4), check)


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
            config.check()
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
    found = doctor(sound_target(), counting_tokenizer(), draft, sound_rows()[FEW], num_prompts=1, max_new_tokens=4)
    [finding] = [finding for finding in found if finding.check == "labels, measured"]
    assert finding.status == FAULT and "`label_shift` 1" in finding.found


def test_chance_is_no_gain():
    base = Acceptance(torch.tensor([[20.0, 22, 18, 21, 19, 20]]).double().T, 60)
    better = base._replace(slots=base.slots + torch.tensor([[4.0, 5, 6, 5, 4, 6]]).T)
    lucky = base._replace(slots=base.slots + torch.tensor([[28.0, 0, 0, 0, 1, 1]]).T)
    assert gain(base, better) == pytest.approx(0.5)
    assert gain(base, lucky) == gain(base, base) == 0


# ---- real decoding --------------------------------------------------------------------------------------------------


def another_block_size(patient: Patient) -> None:
    patient.settings(block_size=12)
    patient.rows = list(counting_rows(patient.tokenizer, slice(None, None, 2)))


def trained_with_a_leak(patient: Patient) -> None:
    fresh_weights(patient)
    (patient.folder / "trainer_state.json").write_text(json.dumps({"log_history": LOG}))


def confidence_of_its_own(patient: Patient) -> None:
    patient.settings(confidence_temperatures=[10.0] * 4)


# Each with the draft, the check that finds it, and prompts enough to judge by.
PLANTED_IN_DECODING = {
    another_block_size: ("dflash", "block size", 24),
    trained_with_a_leak: ("dflash", "training against decoding", 2),
    confidence_of_its_own: ("dspark", "confidence", 7),
}


@pytest.mark.parametrize("plant", PLANTED_IN_DECODING, ids=lambda plant: plant.__name__)
def test_a_fault_shows_in_decoding(plant, admit):
    kind, check, prompts = PLANTED_IN_DECODING[plant]
    patient = admit(kind)
    plant(patient)
    assert_found(patient.examine(measure=True, num_prompts=prompts, max_new_tokens=32), check)


def test_decoding_is_held_against_teacher_forcing():
    report = make_report([make_answer(TEXT, [4, 1, 1, 1, 1, 1, 1, 1])] * 3)
    forced = Acceptance(torch.tensor([[10.0, 10, 10]]), 10)
    decoding, slots, loops = check_decoding(report, forced, {})
    assert (decoding.status, slots.status, loops.status) == (FAULT, "ok", "ok")
    assert "tau 1.38" in decoding.found and "4.00" in decoding.found
    assert [finding.status for finding in check_decoding(make_report(report.answers[:1]), forced, {})] == [SKIPPED]
    # One drafted token is at most a tau of 2, and 24 rounds say little of a last slot.
    pair = make_report([make_answer(TEXT, [2] * 9 + [1])] * 3, block_size=2)
    logged = {"accuracy": 0.95, "estimated_tau": 1.95}
    half = Acceptance(torch.tensor([[19.0]]), 20)
    assert {finding.status for finding in check_decoding(pair, half, logged)} == {"ok"}
    short = make_report([make_answer(TEXT, [2] * 8)] * 3)
    assert check_decoding(short, forced, {})[1].status == "ok"
    assert check_decoding(make_report(short.answers * 5), forced, {})[1].status == FAULT
    looping = make_report([make_answer(LOOP, [4] * 12), make_answer(TEXT, [4] * 12)])
    assert [finding.status for finding in check_decoding(looping, forced, {})] == ["ok", "ok", WARNING]
