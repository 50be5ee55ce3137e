"""What is recorded beside regenerated rows: read, compared, and whose the answers are."""

import json

import pytest
from chat_rows import chat, write
from decoding_models import build_target

from blockdraft.modeling.target.target_identity import weights_fingerprint
from blockdraft.trainer.data.dataset import prepare_dataset, prepare_stream
from blockdraft.trainer.data.provenance import OWN_ANSWERS, answers_of, chat_template_digest, provenance_path


def provenance(path, **changes):
    settings = {"target": "t", "revision": "r", "chat_template_sha256": "c", "template_kwargs": {}} | changes
    provenance_path(path).write_text(json.dumps({"settings": settings}))


def test_regenerated_sets_must_agree(tmp_path, chat_tokenizer):
    paths = [write(tmp_path / name, [chat("fine")]) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    provenance(paths[0])
    provenance(paths[1], template_kwargs={"enable_thinking": False})
    assert list(prepare_dataset([paths[0], paths[2]], chat_tokenizer, max_length=64)[1].provenance) == [str(paths[0])]
    with pytest.raises(
        ValueError, match=r"b\.jsonl was regenerated with template_kwargs=\{'enable_thinking': False\}"
    ):
        prepare_dataset(paths, chat_tokenizer, max_length=64)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"settings": []}', '{"settings": {"target": "t"}}'])
def test_damaged_provenance_is_named(tmp_path, chat_tokenizer, text):
    path = write(tmp_path / "a.jsonl", [chat("fine")])
    provenance_path(path).write_text(text)
    for prepare in (prepare_dataset, prepare_stream):
        with pytest.raises(ValueError, match=r"data: .*a\.jsonl\.provenance\.json is damaged .*delete it"):
            prepare(path, chat_tokenizer, max_length=64)


@pytest.mark.parametrize(
    ("changes", "answers"),
    [
        ({}, OWN_ANSWERS),
        ({"weights_sha256": None, "revision": None}, OWN_ANSWERS),  # nothing tells them apart
        ({"target": "org/other", "dtype": "bfloat16"}, "those of org/other"),
        ({"target": "/old/model", "weights_sha256": None}, "those of model"),
        ({"target": "/old/model"}, OWN_ANSWERS),  # moved: the weights are the same
        ({"target": "org/model", "weights_sha256": "0"}, "those of org/model"),
        ({"weights_sha256": "0"}, "those of model with other weights"),
        ({"revision": "b" * 40, "dtype": "bfloat16"}, f"those of model at revision {'b' * 40}"),
        ({"revision": "b" * 40}, OWN_ANSWERS),  # a commit that left the weights as they were
        ({"chat_template_sha256": "0"}, f"{OWN_ANSWERS} under another chat template"),
        ({"target": ""}, OWN_ANSWERS),
        ({"target": "", "weights_sha256": "0"}, "those of an unnamed model"),
    ],
)
def test_answers_are_their_writers(tmp_path, chat_tokenizer, caplog, monkeypatch, changes, answers):
    """Own or another model's, by name, on the card; what is not known to be the target's own is warned of."""
    monkeypatch.chdir(tmp_path)
    target, folder = build_target("qwen3"), tmp_path / "model"
    folder.mkdir()
    target.config.name_or_path, loaded = str(folder), (target, chat_tokenizer, "a" * 40)
    own = {
        "target": "model",  # the same folder by another path
        "revision": "a" * 40,
        "dtype": "float32",
        "weights_sha256": weights_fingerprint(target),
        "chat_template_sha256": chat_template_digest(chat_tokenizer),
    }
    provenance("own.jsonl", **(own | changes))
    with caplog.at_level("WARNING", logger="blockdraft"):
        assert answers_of(["own.jsonl"], *loaded) == answers
        assert answers_of(["own.jsonl", "a/one"], *loaded) == f"partly {answers}"
        assert ("The answers in own.jsonl are " + answers in caplog.text) == (answers != OWN_ANSWERS)
        assert answers_of(["a/one"], *loaded) == "those of the data"
