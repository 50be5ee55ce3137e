"""Training from features on disk: the numbers of training online, and no forward of the target."""

import json
import shutil

import pytest
import torch
from datasets import concatenate_datasets
from decoding_models import build_draft, build_target
from draft_trainers import BLOCK, arguments, make_rows, make_trainer, weights
from dspark_trainers import dspark_draft, dspark_trainer
from served_rows import (
    FILES,
    LAYER_IDS,
    MASK,
    SERVED_IDS,
    TARGET,
    copy_files,
    served_draft,
    served_rows,
    served_target,
)

from blockdraft.modeling.target.embedding_and_head import load_embedding_and_head
from blockdraft.modeling.target.target_features import decoder_layers
from blockdraft.trainer.data.packing import pack_rows
from blockdraft.trainer.draft_trainer import DraftTrainer
from blockdraft.trainer.dspark_trainer import DSparkTrainer


def losses(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def forwards(trainer) -> list:
    """Grows with each forward of the target's first layer."""
    ran = []
    decoder_layers(trainer.target)[0].register_forward_hook(lambda *_: ran.append(1))
    return ran


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    build_target("qwen3").save_pretrained(folder)
    return folder


def offline(saved_target, output_dir, kind="dflash", rows=None, **settings):
    """A trainer on the features in `output_dir`, of a target without layers."""
    target = load_embedding_and_head(str(saved_target))
    torch.manual_seed(1)
    rows = make_rows() if rows is None else rows
    sets = {"train_dataset": rows, "eval_dataset": rows}
    args = arguments(output_dir, features=str(output_dir / "features"), **settings)
    if kind == "dflash":
        return DraftTrainer(build_draft(target, block_size=BLOCK), target, args, **sets)
    return DSparkTrainer(dspark_draft(target), target, args, **sets)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_training_without_the_targets_layers_is_training_with_it(tmp_path, saved_target, kind):
    """In fp32, with rows written in batches as they are trained in: bit for bit."""
    make = {"dflash": lambda *a, **k: make_trainer(*a, target_name="qwen3", **k), "dspark": dspark_trainer}[kind]
    settings = {"max_steps": 4, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    online = make(tmp_path, **settings)
    expected = losses(online), online.evaluate(), weights(online)
    make(tmp_path, cache_features=True, **settings).cache_features()
    trainer = offline(saved_target, tmp_path, kind, **settings)
    assert losses(trainer) == expected[0]
    assert trainer.evaluate()["eval_loss"] == expected[1]["eval_loss"]
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor, expected[2][name]), name
    assert trainer.draft_config.target == online.draft_config.target  # also of the weights that were not loaded


@pytest.mark.parametrize("make", [make_trainer, dspark_trainer])
def test_no_step_runs_the_target(tmp_path, make):
    """Two joined data sets with the same row ids, twice through."""
    rows = concatenate_datasets([make_rows(4), make_rows(4, seed=1)])
    settings = {"max_steps": 8, "learning_rate": 1e-3}
    expected = losses(make(tmp_path, rows, **settings))
    trainer = make(tmp_path, rows, cache_features=True, **settings)
    trainer.cache_features()
    collator = trainer.data_collator
    ran = forwards(trainer)
    assert losses(trainer) == pytest.approx(expected, rel=1e-5)
    assert not ran and trainer.data_collator.collator is collator.collator
    trainer.evaluate(make_rows(2, seed=2))  # rows that are not on disk
    assert ran


def test_packed_rows_read_the_features_of_their_documents(tmp_path, saved_target):
    """Written without packing, read with it."""
    rows = make_rows()
    packed = pack_rows(rows, 60)
    expected = losses(make_trainer(tmp_path, packed, target_name="qwen3"))
    make_trainer(tmp_path, rows, target_name="qwen3", cache_features=True).cache_features()
    assert losses(offline(saved_target, tmp_path, rows=packed)) == pytest.approx(expected, rel=1e-5)


def test_loader_processes_read_ahead(tmp_path, saved_target):
    make_trainer(tmp_path, target_name="qwen3", cache_features=True).cache_features()
    expected = losses(offline(saved_target, tmp_path))
    assert losses(offline(saved_target, tmp_path, dataloader_num_workers=1)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layer_ids": [0, 2]}, r"`target_layer_ids`: \[1, 3\] there, \[0, 2\] here"),
        ({"sliding_window": None}, "holds 4 positions before an answer, and the draft reads all"),
        ({"sliding_window": 5}, "holds 4 positions before an answer, and the draft reads 5"),
    ],
)
def test_features_for_another_draft_are_refused(tmp_path, change, message):
    shape = {"block_size": BLOCK, "num_draft_layers": 1, "sliding_window": 4, "target_layer_ids": [1, 3]}
    target = build_target("qwen3")
    make_trainer(
        tmp_path, draft=build_draft(target, **shape), target_name="qwen3", cache_features=True
    ).cache_features()
    other = build_draft(target, **(shape | change))
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, draft=other, target_name="qwen3", features=str(tmp_path / "features"))


def test_features_of_another_target_or_objective_are_refused(tmp_path, saved_target):
    make_trainer(tmp_path, target_name="qwen3", cache_features=True).cache_features()
    features = {"features": str(tmp_path / "features")}
    target = build_target("qwen3")
    with torch.no_grad():
        decoder_layers(target)[1].mlp.down_proj.weight.mul_(2)
    with pytest.raises(ValueError, match="the target's weights_sha256: .* there, .* here"):
        DraftTrainer(build_draft(target, block_size=BLOCK), target, arguments(tmp_path, **features))
    with pytest.raises(ValueError, match="does not hold what the target's head reads"):
        dspark_trainer(tmp_path, draft_settings={"sliding_window": 4}, **features)
    path = tmp_path / "features" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["target"]["tokenizer_sha256"] = "other"
    path.write_text(json.dumps(manifest))
    trainer = make_trainer(tmp_path, target_name="qwen3")
    trainer.draft_config.target["tokenizer_sha256"] = "this"
    with pytest.raises(ValueError, match="the target's tokenizer_sha256: other there, this here"):
        trainer.read_features()


def test_what_a_target_without_layers_cannot_do_is_refused(tmp_path, saved_target):
    make_trainer(tmp_path, target_name="qwen3", cache_features=True).cache_features()
    with pytest.raises(ValueError, match="`eval_decode_prompts` is 2: with `features` the target is not loaded"):
        offline(saved_target, tmp_path, eval_decode_prompts=2)
    with pytest.raises(ValueError, match="loaded without its layers, so its features must be on disk"):
        offline(saved_target, tmp_path, cache_features=True)
    others = concatenate_datasets([make_rows(2), make_rows(2, seed=3)])
    with pytest.raises(ValueError, match=r"has no states of the row 0 \(.* tokens\).* lacks 2 rows"):
        offline(saved_target, tmp_path, rows=others)
    with pytest.raises(ValueError, match=r"has no states of the row 0 \(.* tokens\)"):
        losses(offline(saved_target, tmp_path, rows=others.to_iterable_dataset()))
    trainer = offline(saved_target, tmp_path)
    batch = trainer.data_collator([make_rows()[0]]) | {"anchor_positions": torch.tensor([[9]])}
    with pytest.raises(ValueError, match="The batch has `anchor_positions`"):
        trainer.target_states(batch)


def test_streams_are_refused(tmp_path):
    stream = make_rows().to_iterable_dataset()
    with pytest.raises(ValueError, match="a stream has no last row"):
        make_trainer(tmp_path, stream, cache_features=True, max_steps=9).train()


def served_trainer(folder, output_dir, target=None, **settings):
    """A trainer on features that vLLM wrote, of a target without layers."""
    target = target or load_embedding_and_head(str(TARGET), dtype=torch.float32)
    served = {"served_features": str(folder), "served_layer_ids": SERVED_IDS} if folder else {}
    settings = {"features": str(output_dir / "features"), "cache_features": True} | served | settings
    rows = served_rows()
    args = arguments(output_dir, **settings)
    if settings.get("loss_type") == "dspark":
        torch.manual_seed(1)
        draft = dspark_draft(target, target_layer_ids=LAYER_IDS, mask_token_id=MASK)
        return DSparkTrainer(draft, target, args, train_dataset=rows, eval_dataset=rows)
    return DraftTrainer(served_draft(target), target, args, train_dataset=rows, eval_dataset=rows)


@pytest.mark.parametrize("loss_type", ["fixed_anchor", "dspark"])
def test_training_on_what_vllm_wrote_is_training_with_the_target(tmp_path, loss_type):
    online = served_trainer(None, tmp_path, served_target(), loss_type=loss_type, features=None, cache_features=False)
    trainer = served_trainer(FILES, tmp_path, loss_type=loss_type)
    expected = losses(online)
    assert losses(trainer) == pytest.approx(expected, rel=1e-3)
    manifest = json.loads((tmp_path / "features" / "manifest.json").read_text())
    conventions = {"layer_ids": [1, 3, 4], "index": "after_layers", "final_norm": False}
    assert manifest["served"] == conventions and manifest["rows"] == 4
    trainer.save_model(str(tmp_path / "draft"))
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["training"]["served_features"] == conventions


def test_rows_that_were_not_served_are_an_error_and_added_later(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"0 of 8 rows .* \(0 files\); 8 have none: rows 0, 1, 2, 3, 0, \.\.\.\.$"):
        served_trainer(tmp_path / "none", tmp_path).cache_features()
    folder = copy_files(tmp_path / "served", {1: "1", 2: "2", 3: "3"})
    with pytest.raises(ValueError, match=r"6 of 8 rows .* 2 have none: rows 0, 0. What is there has been written"):
        served_trainer(folder, tmp_path).cache_features()
    shutil.copy(FILES / "0.safetensors", folder)
    assert len(losses(served_trainer(folder, tmp_path))) == 2
    files = sorted((tmp_path / "features").glob("*.safetensors"))
    assert len(files) == 2  # what was there stayed


def test_states_of_an_engine_and_of_the_target_do_not_mix(tmp_path):
    served_trainer(FILES, tmp_path).cache_features()
    with pytest.raises(ValueError, match="`served_features`: {'layer_ids': .* there, none here"):
        served_trainer(None, tmp_path, served_target()).cache_features()
    with pytest.raises(ValueError, match="`served_features`: {.*'after_layers'.*} there, {.*'layer_output'.*} here"):
        ids = {"served_index": "layer_output", "served_layer_ids": [0, 2, 3]}
        served_trainer(FILES, tmp_path, **ids).cache_features()
    with pytest.raises(ValueError, match="`served_features` and `served_layer_ids` belong together"):
        served_trainer(FILES, tmp_path, served_layer_ids=None)
    with pytest.raises(ValueError, match="`served_index` is 'input'"):
        served_trainer(FILES, tmp_path, served_index="input")
