"""The doctor as a whole: nothing to say of sound pairs, a draft of a family of its own, the command."""

import json

import pytest
import torch
from counting_pairs import chats, counting_tokenizer
from doctor_patients import FEW, sound_rows, sound_target
from kimi_k3_dspark import KimiK3DSparkConfig, KimiK3DSparkModel, add_kimi_k3_dspark

from blockdraft.modeling.target.target_identity import target_record
from blockdraft.trainer.cli.main import main
from blockdraft.trainer.diagnostics.doctor import doctor
from blockdraft.trainer.diagnostics.findings import FAULT, SKIPPED, WARNING
from blockdraft.trainer.loading import load_draft


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_sound_pair_has_no_fault_and_no_warning(kind, sound_drafts):
    """With every measurement taken; only the engine is not asked for."""
    tokenizer = counting_tokenizer()
    findings = doctor(sound_target(), tokenizer, sound_drafts[kind], sound_rows(), num_prompts=6, max_new_tokens=32)
    assert [finding for finding in findings if finding.status in (FAULT, WARNING)] == []
    assert [finding.check for finding in findings if finding.status == SKIPPED] == ["engine"]
    assert len(findings) == 32 + (kind == "dspark")
    # Looking changes nothing, and a draft in memory is as sound as its folder.
    draft = load_draft(str(sound_drafts[kind]))
    before = draft.config.to_dict()
    in_memory = doctor(sound_target(), tokenizer, draft, sound_rows()[FEW], num_prompts=1, max_new_tokens=4)
    assert {finding.status for finding in in_memory} <= {"ok", SKIPPED}
    assert draft.config.to_dict() == before


def test_a_draft_of_another_family(monkeypatch):
    """A line in the table of families is all that the doctor needs to know of it."""
    add_kimi_k3_dspark(monkeypatch)
    target, tokenizer = sound_target(), counting_tokenizer()
    record = {"target": target_record(target, tokenizer), "training": {"global_step": 1, "epoch": 1.0}}
    heads = {"markov_rank": target.config.vocab_size, "confidence_head": False}
    shape = {"target_layer_ids": [1, 3], "is_causal": False, "sliding_window": None}
    config = KimiK3DSparkConfig.from_target_config(target.config, 60, 1, 4, **shape, **heads, **record)
    draft = KimiK3DSparkModel(config)
    # It proposes the number after the token before, whatever its layers say.
    draft.markov_head.embed.weight.data = torch.eye(config.vocab_size)
    draft.markov_head.head.weight.data = 100 * torch.eye(config.vocab_size).roll(1, 0)
    rows = sound_rows()[:20:3]  # they count in steps of one
    found = doctor(target, tokenizer, draft, rows, num_prompts=4, max_new_tokens=24, engine="vllm")
    status = {finding.check: finding.status for finding in found}
    assert (
        status["draft accuracy"] == status["decoding"] == status["visibility"] == "ok" and status["engine"] == SKIPPED
    )
    assert [finding for finding in found if finding.status in (FAULT, WARNING)] == []


def test_command(admit, tmp_path, capsys):
    """A sound pair: 0. A fault: 1, with what was found and what to do. No draft: 2."""
    patient = admit("dflash")
    folder = tmp_path / "target"
    patient.target.save_pretrained(folder)
    patient.tokenizer.save_pretrained(folder)
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chats()[FEW]))
    command = ["doctor", str(folder), str(patient.folder), str(data), "--num_prompts", "2", "--max_new_tokens", "16"]
    assert main(command) == 0
    assert "0 faults, 0 warnings" in capsys.readouterr().out
    # Of prompts without answers, what decoding shows.
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": row["messages"][:1]}) + "\n" for row in chats()[FEW]))
    assert main([*command[:3], str(prompts), "--num_prompts", "6", "--max_new_tokens", "24"]) == 0
    text = capsys.readouterr().out
    assert "no answer to learn from" in text and "no row has an answer" in text and "looping answers" in text

    patient.settings(slot_layout=None)
    output = tmp_path / "findings.json"
    assert main([*command[:3], "--output", str(output)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("fault    configuration") and '"slot_layout": "1+N"' in text
    assert json.loads(output.read_text())[0].keys() == {"check", "status", "found", "mend"}

    (patient.folder / "config.json").write_text("[]")
    assert main(command) == 2
    assert "holds no settings" in capsys.readouterr().err
    (patient.folder / "config.json").unlink()
    assert main(command) == 2
    assert "no config.json" in capsys.readouterr().err
