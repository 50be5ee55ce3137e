"""Writing features: what is there stays, what is missing or damaged is written, and how much is said first."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from draft_trainers import make_rows, make_trainer

from blockdraft.trainer.data import feature_writer
from blockdraft.trainer.data.feature_store import FeatureStore, documents


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(feature_writer, "SHARD_BYTES", 9000)


def write(tmp_path: Path, rows=None, **settings) -> tuple[Path, list[int]]:
    """The folder, and the lengths of the rows that the target read."""
    trainer = make_trainer(tmp_path, rows, target_name="qwen3", cache_features=True, **settings)
    read, lengths = trainer._target_states.read, []

    def note(inputs, **kwargs):
        lengths.extend(inputs["attention_mask"].sum(-1).tolist())
        return read(inputs, **kwargs)

    trainer._target_states.read = note
    trainer.cache_features()
    return tmp_path / "features", lengths


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def test_the_same_command_writes_nothing_twice(tmp_path):
    folder, _ = write(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert len(before) == 6  # five shards and the manifest
    _, lengths = write(tmp_path)
    assert not lengths
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    """It ends as one that was not, and left folders of a killed process are removed."""
    whole = shards(write(tmp_path / "whole")[0])
    write_shard, written = feature_writer.write_shard, []

    def killed(path, *args):
        written.append(path)
        if len(written) == 3:
            raise KeyboardInterrupt
        write_shard(path, *args)

    monkeypatch.setattr(feature_writer, "write_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "cut")
    folder = tmp_path / "cut" / "features"
    with pytest.raises(ValueError, match="is not complete: `blockdraft cache-features` with the same settings"):
        FeatureStore(folder)
    assert len(shards(folder)) == 2
    (folder / ".saving-left").mkdir()
    _, lengths = write(tmp_path / "cut")
    assert shards(folder) == whole and len(lengths) < 8
    assert not (folder / ".saving-left").exists()


@pytest.mark.parametrize("damage", ["bit", "cut", "gone"])
def test_a_damaged_shard_is_written_again_alone(tmp_path, caplog, damage):
    folder, _ = write(tmp_path)
    before = shards(folder)
    path = folder / "features-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data if damage == "bit" else data[:-1])
    if damage != "bit":
        with pytest.raises(
            ValueError, match=r"features-00002.safetensors: the shard cannot be read .* cache-features"
        ):
            FeatureStore(folder)
    with caplog.at_level("WARNING", logger="blockdraft"):
        _, lengths = write(tmp_path)
    assert ("features-00002.safetensors: the shard" in caplog.text) is (damage != "gone")
    assert 0 < len(lengths) < 4
    after = shards(folder)
    assert {name: after[name] for name in before if name in after} == {
        name: data for name, data in before.items() if name != path.name
    }
    assert before[path.name] in after.values()
    FeatureStore(folder)


def test_damage_during_training_names_the_file_and_the_way_out(tmp_path):
    trainer = make_trainer(tmp_path, target_name="qwen3", cache_features=True)
    trainer.cache_features()
    for path in (tmp_path / "features").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"features-\d+.safetensors: the shard is damaged at its row .* cache-features"
    ):
        trainer.data_collator(list(make_rows()))


def test_rows_of_other_data_are_added(tmp_path):
    folder, _ = write(tmp_path, make_rows(4))
    before = shards(folder)
    more = concatenate_datasets([make_rows(4), make_rows(2, seed=1)])
    _, lengths = write(tmp_path, more)
    after = shards(folder)
    assert before.items() <= after.items() and len(lengths) == 2
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["rows"] == 6 and [shard["file"] for shard in manifest["shards"]] == sorted(after)


def test_one_row_twice_is_written_once_with_all_that_is_read(tmp_path):
    """The same tokens with two loss masks."""
    ids = list(range(1, 21))
    masks = ([0] * 5 + [1] * 5 + [0] * 10, [0] * 12 + [1] * 8)
    rows = Dataset.from_list([{"input_ids": ids, "loss_mask": mask, "row_id": i} for i, mask in enumerate(masks)])
    folder, lengths = write(tmp_path, rows)
    assert lengths == [20, 20]  # the first one shows what states look like
    store = FeatureStore(folder)
    assert store.manifest["rows"] == 1
    for row in rows:
        [document] = documents(row)
        assert store.find(document, feature_writer.columns_read(document.loss_mask, None)).columns == (0, 5, 19)


def test_the_size_is_said_before_a_byte_is_written(tmp_path, capsys, monkeypatch):
    folder, _ = write(tmp_path)
    out = capsys.readouterr().out
    said = float(re.search(r"features: (\S+) GB to write \(7 rows, \d+ tokens, 5 shards\); 0 rows are there", out)[1])
    assert said * 1e9 == pytest.approx(sum(map(len, shards(folder).values())), rel=0.2)  # and an index
    shutil.rmtree(folder)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(feature_writer.shutil, "disk_usage", lambda _: usage._replace(free=int(said * 1e9 / 2)))
    with pytest.raises(ValueError, match=r"GB are to be written, and .*features has .* GB free\. Free some"):
        write(tmp_path)
    assert not list(folder.iterdir())


def test_another_targets_folder_is_left_alone(tmp_path):
    folder, _ = write(tmp_path)
    before = shards(folder)
    with pytest.raises(ValueError, match="written with other settings .*`features_dtype`: auto there, bfloat16 here"):
        write(tmp_path, features_dtype="bfloat16")
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="has shards, but no manifest.json"):
        write(tmp_path)
    assert shards(folder) == before


@pytest.mark.parametrize(("dtype", "size", "most"), [("bfloat16", 2, 0.003), ("float8_e4m3fn", 1, 0.04)])
def test_narrower_dtypes_say_what_they_change(tmp_path, capsys, dtype, size, most):
    folder, _ = write(tmp_path, features_dtype=dtype)
    error = float(re.search(r"features: rounding changes the states by (\S+)%", capsys.readouterr().out)[1])
    assert 0 < error / 100 < most
    store = FeatureStore(folder)
    width = store.widths["features"]
    assert sum(map(len, shards(folder).values())) < store.manifest["positions"] * (width * size + 8) + 8000
    exact = FeatureStore(write(tmp_path / "exact")[0])
    for row in make_rows(3):
        [document] = documents(row)
        columns = feature_writer.columns_read(document.loss_mask, store.context_window)
        kept, expected = (found.find(document, columns).features for found in (store, exact))
        assert kept.dtype == torch.float32
        assert ((kept - expected).norm() / expected.norm()).item() < most


def test_states_that_are_no_numbers_are_told(tmp_path, caplog):
    trainer = make_trainer(tmp_path, target_name="qwen3", cache_features=True)
    with torch.no_grad():
        trainer.target.get_input_embeddings().weight[make_rows()[3]["input_ids"][0]] = float("nan")
    with caplog.at_level("WARNING", logger="blockdraft"):
        trainer.cache_features()
    assert "The target's states of 1 rows have NaN or Inf, among them the row 3." in caplog.text
