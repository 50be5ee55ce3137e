"""The doctor's checks of real decoding, and the faults that only decoding shows."""

import json

import pytest
import torch
from counting_pairs import counting_rows
from decoding_reports import LOOP, TEXT, make_answer, make_report
from doctor_patients import LOG, Patient, assert_found, fresh_weights

from blockdraft.trainer.diagnostics.decoded import check_decoding
from blockdraft.trainer.diagnostics.findings import FAULT, SKIPPED, WARNING
from blockdraft.trainer.diagnostics.measured import Acceptance


def another_block_size(patient: Patient) -> None:
    patient.settings(block_size=12)
    patient.rows = list(counting_rows(patient.tokenizer, slice(None, None, 2)))


def trained_with_a_leak(patient: Patient) -> None:
    fresh_weights(patient)
    (patient.folder / "trainer_state.json").write_text(json.dumps({"log_history": LOG}))


def confidence_of_its_own(patient: Patient) -> None:
    patient.settings(confidence_temperatures=[10.0] * 4)


# Each with the draft, the check that finds it, and prompts enough to judge by.
PLANTED = {
    another_block_size: ("dflash", "block size", 24),
    trained_with_a_leak: ("dflash", "training against decoding", 2),
    confidence_of_its_own: ("dspark", "confidence", 7),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_fault_shows_in_decoding(plant, admit):
    kind, check, prompts = PLANTED[plant]
    patient = admit(kind)
    plant(patient)
    assert_found(patient.examine(measure=True, num_prompts=prompts, max_new_tokens=32), check)


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
