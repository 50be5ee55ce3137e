"""The doctor's checks of rows: what can be seen in them without a draft, and where they come from."""

import copy

import pytest
from counting_pairs import counting_tokenizer
from doctor_patients import Patient, assert_found, sound_target

from blockdraft.trainer.data.provenance import chat_template_digest
from blockdraft.trainer.diagnostics.findings import FAULT, SKIPPED, WARNING, Finding, run_checks
from blockdraft.trainer.diagnostics.rows import ROWS, check_provenance


def mask_token_in_the_text(patient: Patient) -> None:
    patient.rows[0]["input_ids"][3] = 3


def tokens_of_another_vocabulary(patient: Patient) -> None:
    patient.rows[0]["input_ids"][3] = 99


def rows_of_another_template(patient: Patient) -> None:
    for row in patient.rows:
        row["input_ids"] = [token for token in row["input_ids"] if token not in (1, 5)]
        row["loss_mask"] = row["loss_mask"][-len(row["input_ids"]) :]


def answers_without_an_end(patient: Patient) -> None:
    for row in patient.rows:
        row["loss_mask"] = [int(m and token != 2) for m, token in zip(row["loss_mask"], row["input_ids"], strict=True)]


PLANTED = {
    mask_token_in_the_text: "mask token in data",
    tokens_of_another_vocabulary: "token ids",
    rows_of_another_template: "prompts",
    answers_without_an_end: "stop token",
}


def examine(patient: Patient) -> dict[str, Finding]:
    """The checks of the rows alone."""
    parts = {"rows": patient.rows, "target": patient.target, "tokenizer": patient.tokenizer, "config": patient.config}
    return {finding.check: finding for finding in run_checks(ROWS, parts)}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_fault_of_the_rows_is_found(plant, admit):
    patient = admit("dflash")
    assert {finding.status for finding in examine(patient).values()} == {"ok"}
    plant(patient)
    assert_found(examine(patient), PLANTED[plant])


def test_rows_that_the_target_cannot_read_are_not_measured(admit):
    patient = admit("dflash")
    tokens_of_another_vocabulary(patient)
    found = patient.examine(measure=True)
    assert found["token ids"].status == FAULT and "cannot read the rows" in found["measurements"].found


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
    finding = examine(patient)["prompts"]
    assert finding.status == SKIPPED and found in finding.found


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
        assert named is None or (named in finding.found and "regenerate" in finding.fix)
