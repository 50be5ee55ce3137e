"""Names that cards may give: repositories, licences, data sets; and the training's arguments for them."""

import re
from pathlib import Path

import pytest
from draft_models import TINY

from blockdraft.configuration.configuration_kimi_k3_dflash import KimiK3DFlashConfig
from blockdraft.hub_cards.card import make_card
from blockdraft.hub_cards.rules import LICENSES, check_datasets, check_license, is_hub_id
from blockdraft.trainer.data.rows import hub_datasets
from blockdraft.trainer.training_args import DraftTrainingArguments


def test_names_of_repositories():
    assert all(map(is_hub_id, ("Qwen/Qwen3-0.6B", "a/b_c.d-e")))
    assert not any(
        map(is_hub_id, ("", None, "a", "a/b/c", "/a/b", "./a", "a//b", "a/b--c", "a/b.git", "a b/c", "a/.."))
    )


OWN = {"license": "other", "license_name": "House licence", "license_link": "https://example.org/licence"}


def arguments(tmp_path, **given) -> DraftTrainingArguments:
    return DraftTrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)


def test_licences_that_the_hub_knows_or_that_are_one_s_own(tmp_path, caplog):
    for known in (None, "mit", "openrail++", "cc-by-nc-sa-4.0", "unknown"):
        check_license(known)
    for link in ("LICENSE", "LICENSE.md", "http://a.org/b?c=d#e"):
        check_license("other", "House licence", link)
    assert arguments(tmp_path, **OWN).license_link == OWN["license_link"]
    assert "other" not in LICENSES and not caplog.records


@pytest.mark.parametrize(
    "license, hint",
    [
        ("Apache-2.0", "did you mean apache-2.0?"),
        ("MIT", "see https://huggingface.co/docs/hub"),
        ("mine-1.0", "other"),
    ],
)
def test_an_unknown_licence_is_warned_of(license, hint, tmp_path, caplog):
    """The Hub decides: it may have taken it in since."""
    with caplog.at_level("WARNING", logger="blockdraft"):
        card = make_card(KimiK3DFlashConfig(**TINY, training={"license": license}))
    assert f"`license` is {license!r}, which is not in the Hub's list" in caplog.text and hint in caplog.text
    assert f"license: {license}\n" in card and arguments(tmp_path, license=license).license == license


@pytest.mark.parametrize(
    "given, message",
    [
        ({"license": "./LICENSE"}, "`license` is './LICENSE': give an identifier"),
        ({"license": ""}, "`license` is ''"),
        ({"license": "my licence"}, "or `other` with `license_name` and `license_link`"),
        ({"license": "other"}, "`license_name` is missing"),
        (OWN | {"license_name": " "}, "`license_name` is missing"),
        ({"license": "other", "license_name": "x"}, "`license_link` is missing"),
        (OWN | {"license_link": "/home/me/LICENSE"}, "`license_link` is '/home/me/LICENSE': give a URL"),
        (OWN | {"license_link": "https://a.org/)<b>"}, "`license_link` is"),
        (OWN | {"license": "mit"}, "`license_name` belongs to `license` other, and `license` is 'mit'"),
        ({"license_link": "LICENSE"}, "`license_link` belongs to `license` other, and `license` is None"),
    ],
)
def test_licences_that_cannot_be(given, message, tmp_path):
    for refuse in (lambda: check_license(**({"license": None} | given)), lambda: arguments(tmp_path, **given)):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            refuse()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["/data/rows", "rows.jsonl", "data/rows.jsonl", "chats", "a/b/c", "a b/c", "a/b\n- c"]
)
def test_datasets_that_are_no_hub_id_are_refused(name, tmp_path):
    for refuse in (
        lambda: check_datasets([name]),
        lambda: make_card(KimiK3DFlashConfig(**TINY, training={"datasets": ["org/chats", name]})),
        lambda: arguments(tmp_path, datasets=[name]),
    ):
        with pytest.raises(ValueError, match="`datasets` has .*no Hub dataset"):
            refuse()


def test_arguments_for_the_card(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"output_dir": "out", "use_cpu": True, "license": "mit", "datasets": ["org/chats"]}
    assert DraftTrainingArguments(**given).datasets == ["org/chats"]
    Path("org/chats").mkdir(parents=True)
    with pytest.raises(ValueError, match="'org/chats', which is a path here"):
        DraftTrainingArguments(**given)
    names = ["b/two@v1/config:test", "a/one", "a/one:train", "org/chats", "x/rows.jsonl", "rows.parquet"]
    assert hub_datasets(names) == ["a/one", "b/two"]
