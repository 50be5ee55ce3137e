"""Cards of saved drafts that change: measurements, other weights, temperatures, edits by hand."""

import os
from fnmatch import fnmatch

from cards import ADAPTER, CHAT, METRICS, PROTOCOL, TARGET, config
from deepseek_v41_dspark_models import tiny_dspark
from huggingface_hub import ModelCard

from blockdraft.hub_cards.card import add_to_card, write_card
from blockdraft.hub_cards.repository_files import PUBLISHED
from blockdraft.trainer.evaluation.calibration import save_temperatures


def test_a_measurement_is_added_and_replaced(tmp_path):
    write_card(tmp_path, config(), METRICS)
    sampled = {"tau": 1.9, "protocol": PROTOCOL | {"decoding": "temperature 1"}}
    for headline in (CHAT | {"tau": 2.5, "protocol": PROTOCOL}, sampled):
        add_to_card(tmp_path, config(), "chat", headline)
    add_to_card(tmp_path, config(), "maths", sampled)
    [card] = ModelCard.load(tmp_path / "README.md").data.to_dict()["model-index"]
    found = {(r["dataset"]["name"], r["metrics"][0]["value"]) for r in card["results"] if "tau" in str(r["metrics"])}
    assert found == {("chat", 2.5), ("chat", 1.9), ("openai/openai_humaneval", 3.0), ("maths", 1.9)}


def test_figures_of_earlier_weights_do_not_stay(tmp_path):
    write_card(tmp_path, config(), METRICS, ADAPTER)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "acceptance.png", "metrics.json"]
    write_card(tmp_path, config(), {"code": {"tau": 2, "protocol": PROTOCOL}})
    assert sorted(os.listdir(tmp_path)) == ["README.md", "metrics.json"]
    assert "acceptance.png" not in (tmp_path / "README.md").read_text()
    write_card(tmp_path, config())
    assert os.listdir(tmp_path) == ["README.md"]


def test_a_calibrated_draft_says_so(tmp_path):
    draft = tiny_dspark(target=TARGET)
    draft.config.save_pretrained(tmp_path)
    write_card(tmp_path, draft.config, METRICS)
    assert "not calibrated" in (tmp_path / "README.md").read_text()
    save_temperatures(draft, [1.0, 1.5, 2.0, 2.5], tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "| 1, 1.5, 2, 2.5 |" in card and "not calibrated" not in card and "| chat | 2.35 (2.10 to 2.60) |" in card
    (tmp_path / "README.md").unlink()
    save_temperatures(draft, [1.0] * 4, tmp_path)
    assert not (tmp_path / "README.md").exists()  # only where there was one


def test_an_edited_card_is_kept_beside_the_one_that_replaces_it(tmp_path, caplog):
    draft = tiny_dspark(target=TARGET)
    draft.config.save_pretrained(tmp_path)
    write_card(tmp_path, draft.config, METRICS)
    card, kept = tmp_path / "README.md", tmp_path / "README.md.edited"
    for edit in ("", "\nMine.\n"):
        for change in (
            lambda: add_to_card(tmp_path, draft.config, "chat", CHAT | {"protocol": PROTOCOL}),
            lambda edit=edit: save_temperatures(draft, [1.0 + len(edit)] * 4, tmp_path),
        ):
            edited = card.read_text() + edit
            card.write_text(edited)
            caplog.clear()
            with caplog.at_level("WARNING", logger="blockdraft"):
                change()
            assert kept.exists() == bool(edit) == (f"as {kept}." in caplog.text)
            assert "Mine." not in card.read_text()
            if edit:
                assert kept.read_text() == edited
                kept.unlink()
    assert not any(fnmatch(kept.name, pattern) for pattern in PUBLISHED)
