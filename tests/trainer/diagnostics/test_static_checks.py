"""The doctor's checks that measure nothing: each planted fault is found, and what is none is not."""

import copy

import pytest
import torch
from any_targets import quantise
from counting_pairs import SPECIAL, counting_tokenizer
from doctor_patients import Patient, assert_found, sound_target
from peft import LoraConfig, get_peft_model
from tokenizers import pre_tokenizers, processors
from torch import nn

from blockdraft.modeling.target.target_identity import target_record
from blockdraft.trainer.data.provenance import chat_template_digest
from blockdraft.trainer.diagnostics.findings import FAULT, SKIPPED, WARNING, Finding, run_checks
from blockdraft.trainer.diagnostics.static_checks import ROWS, check_provenance


def another_capture_point(patient: Patient) -> None:
    patient.settings(capture_point="attention_input_mean")


def layers_past_the_target(patient: Patient) -> None:
    """Of a draft that does not say how deep its target was."""
    patient.settings(target_layer_ids=[1, 9], num_target_layers=None)


def mask_that_ends_answers(patient: Patient) -> None:
    """A stop token that only the target's generation settings name."""
    patient.target.generation_config.eos_token_id = [2, 3]


def mask_past_the_rows(patient: Patient) -> None:
    patient.settings(mask_token_id=60)
    rows = patient.target.get_input_embeddings().weight[:50]
    patient.target.set_input_embeddings(nn.Embedding.from_pretrained(rows.detach(), freeze=False))


def bidirectional_without_positions(patient: Patient) -> None:
    patient.settings(is_causal=False, sliding_window=None)


def weights_not_a_number(patient: Patient) -> None:
    patient.weights(lambda tensors: tensors["fc.weight"][3, 5].fill_(float("nan")))


def matrix_of_zeros(patient: Patient) -> None:
    patient.weights(lambda tensors: tensors["layers.0.self_attn.o_proj.weight"].zero_())


def never_trained(patient: Patient) -> None:
    patient.settings(training={"global_step": 0, "epoch": 0.0, "batch_size": 8})


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


PLANTED = {
    another_capture_point: "target layers",
    layers_past_the_target: "target layers",
    mask_that_ends_answers: "mask token",
    mask_past_the_rows: "mask token",
    bidirectional_without_positions: "visibility",
    weights_not_a_number: "weight values",
    matrix_of_zeros: "weight values",
    never_trained: "training",
    words_in_another_order: "tokenizer",
    digits_apart: "tokenizer",
    bos_in_front: "tokenizer",
    a_word_more: "tokenizer",
    fine_tuned_embedding: "target",
    fine_tuned_layer: "target",
    padded_embedding: "target",
    head_not_tied: "heads",
    narrower_embedding: "heads",
    head_of_zeros: "heads",
    scaled_layer_input: "embedding scale",
    head_not_a_number: "logits",
    soft_cap_that_the_target_lacks: "logits",
    another_multiplier: "logits",
    target_in_bfloat16: "dtype",
    quantised_target: "dtype",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_fault_of_the_pair_is_found(plant, admit):
    patient = admit("dflash")
    plant(patient)
    assert_found(patient.examine(), PLANTED[plant])


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
    assert found["target"].status == WARNING and "merged" in found["target"].fix
    assert [finding for finding in found.values() if finding.status == FAULT] == []


def test_an_engine_is_looked_at_when_named(admit):
    patient = admit("dspark")
    finding = patient.examine(engine="vllm")["engine"]
    assert finding.status == WARNING and "capture_point" in finding.found
    assert "takes its target's quantisation" not in finding.found  # the target is there to be looked at
    with pytest.raises(ValueError, match="`engine` is 'tgi'"):
        patient.examine(engine="tgi")


# ---- rows -----------------------------------------------------------------------------------------------------------


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


PLANTED_IN_ROWS = {
    mask_token_in_the_text: "mask token in data",
    tokens_of_another_vocabulary: "token ids",
    rows_of_another_template: "prompts",
    answers_without_an_end: "stop token",
}


def examine_rows(patient: Patient) -> dict[str, Finding]:
    """The checks of the rows alone."""
    parts = {"rows": patient.rows, "target": patient.target, "tokenizer": patient.tokenizer, "config": patient.config}
    return {finding.check: finding for finding in run_checks(ROWS, parts)}


@pytest.mark.parametrize("plant", PLANTED_IN_ROWS, ids=lambda plant: plant.__name__)
def test_a_fault_of_the_rows_is_found(plant, admit):
    patient = admit("dflash")
    assert {finding.status for finding in examine_rows(patient).values()} == {"ok"}
    plant(patient)
    assert_found(examine_rows(patient), PLANTED_IN_ROWS[plant])


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
    finding = examine_rows(patient)["prompts"]
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
