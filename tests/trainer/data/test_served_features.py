"""Features that a serving engine wrote, beside those of our own forward; folders that are being written."""

import fcntl
import threading
import time

import pytest
import torch
from decoding_models import build_draft, build_target
from safetensors.torch import load_file, save_file
from served_rows import FILES, SERVED_IDS, copy_files, served_draft, served_rows, served_target
from torch.nn.utils.rnn import pad_sequence

from blockdraft.trainer.data.served_features import (
    ServedFeatures,
    ServedFolder,
    ServedLayers,
    read_served,
    row_digests,
)
from blockdraft.trainer.target_states import TargetStates
from blockdraft.trainer.training_settings import LAYER_OUTPUT

LAYERS = ServedLayers(tuple(SERVED_IDS))


@pytest.fixture(scope="module")
def target():
    return served_target()


def batch():
    rows = [torch.tensor(row) for row in served_rows()["input_ids"]]
    masks = [torch.ones_like(row) for row in rows]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence(masks, batch_first=True),
    }


def features(target, folder=FILES, layers=LAYERS, head_input=False, **settings):
    served = ServedFeatures(folder, layers, served_draft(target, **settings).config, target, head_input)
    served.folder.scan()
    return served


@pytest.mark.parametrize(
    "layers",
    [LAYERS, ServedLayers((4, 1, 3)), ServedLayers((3, 0, 2), LAYER_OUTPUT)],
    ids=["vllm", "order", "outputs"],
)
def test_vllms_features_are_our_own(target, layers):
    """Whatever order the engine was asked in, it writes ascending layers; its last state is not normed."""
    inputs = batch()
    ours = TargetStates(target, served_draft(target).config, torch.device("cpu")).read(inputs, head_input=True)
    served = features(target, layers=layers, head_input=True).read(inputs)
    keep = inputs["attention_mask"].bool()
    for mine, theirs in zip(ours, served, strict=True):
        assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
        assert (mine - theirs)[keep].abs().max() < 1e-3 < mine[keep].abs().max() / 100
        assert not theirs[~keep].any()


def test_conventions_decide_what_is_read(target):
    """The same files, told otherwise, are other features: what a manifest records matters."""
    inputs = batch()
    _, normed = features(target, head_input=True).read(inputs)
    _, raw = features(target, layers=ServedLayers((1, 3, 4), final_norm=True), head_input=True).read(inputs)
    torch.testing.assert_close(normed, target.model.norm(raw) * inputs["attention_mask"][..., None])
    (moved,) = features(target, layers=ServedLayers((1, 3, 4), LAYER_OUTPUT), target_layer_ids=[1]).read(inputs)
    (first,) = features(target, target_layer_ids=[0]).read(inputs)
    assert torch.equal(moved, first)


@pytest.mark.parametrize(
    ("layers", "head_input", "message"),
    [
        (ServedLayers((1, 4)), False, r"\[1, 4\] has no 3, which is layer 2 where `served_index` is 'after_layers'"),
        (ServedLayers((1, 3)), True, "has no 4, which is the state after the last layer"),
        (ServedLayers((0, 2), LAYER_OUTPUT), True, "has no 3, which is the state after the last layer"),
    ],
)
def test_layers_that_were_not_served_are_named(target, layers, head_input, message):
    with pytest.raises(ValueError, match=message):
        features(target, layers=layers, head_input=head_input)


def test_ids_are_named_once():
    for ids in ((), (1, 1, 3)):
        with pytest.raises(ValueError, match="name each layer that was served, once"):
            ServedLayers(ids)


def faults(name, layers, head_input, **settings):
    target = build_target(name)
    config = build_draft(target, **settings).config
    return layers.fault(target.config.get_text_config(), config, head_input)


def test_kimi_k3s_last_state_without_its_mix_is_refused_by_name():
    ids = tuple(range(7))
    fault = faults("k3", ServedLayers(ids), head_input=True)
    assert "Kimi K3" in fault and "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1" in fault and "vllm#50815" in fault
    assert "AMD" in fault and "vllm#56434" in fault
    assert faults("k3", ServedLayers(ids), head_input=False) is None  # the sums are what a draft reads
    stream = ServedLayers(ids, attn_res_stream=True)
    assert faults("k3", stream, head_input=True) is None
    assert "Serve this draft by vLLM with the same switch" in stream.warning(build_target("k3").config)
    assert stream.record()["attn_res_stream"] and "attn_res_stream" not in LAYERS.record()
    assert faults("qwen3", ServedLayers(ids), head_input=True) is None
    assert "the target is no Kimi K3" in stream.warning(build_target("qwen3").config)


def test_what_engines_do_not_write_of_deepseek_v41_is_refused():
    target = build_target("v41")
    engram = target.config.engram_layers[0]
    config = build_draft(build_target("qwen3")).config
    config.capture_point, config.target_layer_ids = "attention_input_mean", [2, 3]
    assert LAYERS.fault(target.config, config, head_input=False) is None
    assert ServedLayers((2, 3)).places(config) == [0, 1]  # what enters a layer is the state after those before it
    assert "mean of its streams" in LAYERS.fault(target.config, config, head_input=True)
    config.target_layer_ids = [engram, 3]
    assert f"[{engram}], layers with an Engram" in LAYERS.fault(target.config, config, head_input=False)


def test_files_under_a_lock_wait(tmp_path):
    """A lock that nobody holds and no file: the engine died."""
    folder = copy_files(tmp_path / "served")
    (folder / "lost.safetensors.lock").touch()
    (folder / "1.safetensors.lock").touch()
    data = (folder / "2.safetensors").read_bytes()
    (folder / "2.safetensors").write_bytes(data[:-9])
    served = ServedFolder(folder)
    with open(folder / "0.safetensors.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert served.scan() == 2 and served.being_written == 1
        assert [path.name for path in served.lost] == ["lost.safetensors"]
        assert [path.name for path in served.unreadable] == ["2.safetensors"]
        ids = served_rows()["input_ids"]
        assert [bool(served.find(row_digests(row))) for row in ids] == [False, True, False, True]
    (folder / "2.safetensors").write_bytes(data)
    assert served.scan() == 2 and not served.being_written and not served.unreadable and len(served) == 4
    assert served.scan() == 0


@pytest.mark.parametrize("name", ["{}", "hs_{}", "cmpl-{}-0-1a2b3c4d", "{}-1a2b3c4d"])
def test_files_are_found_by_row_id(tmp_path, name):
    served = ServedFolder(copy_files(tmp_path / "served", {row: name.format(row + 17) for row in range(4)}))
    served.scan()
    assert served.of_row(19).stem == name.format(19) and served.of_row(0) is None
    assert read_served(served.of_row(19))["token_ids"].tolist() == served_rows()["input_ids"][2]


def test_missing_rows_are_counted_and_named(tmp_path, target):
    rows = served_rows()
    served = features(target, copy_files(tmp_path / "served", {1: "0", 2: "2", 3: "anything"}))
    (served.folder.directory / "gone.safetensors.lock").touch()
    found = served.wait_for([rows, rows.select([1])], 0.0, None)
    assert found.missing == [0] and found.kept == [[1, 2, 3], [0]]
    assert "4 of 5 rows have states in" in found.message and "; 1 have none: rows 0;" in found.message
    assert "1 that the engine began and never wrote, such as gone.safetensors" in found.message
    assert "0.safetensors is not of row 0: it has" in found.message
    with pytest.raises(ValueError, match="has no states of a row of 18 tokens"):
        served.read(batch())


def test_it_waits_as_long_as_files_come(tmp_path, target):
    folder, rest = copy_files(tmp_path / "served", {0: "0"}), [1, 2, 3]

    def engine():
        for row in rest:
            time.sleep(0.1)
            save_file(load_file(FILES / f"{row}.safetensors"), tmp_path / "part")
            (tmp_path / "part").rename(folder / f"{row}.safetensors")

    thread = threading.Thread(target=engine)
    thread.start()
    found = features(target, folder).wait_for([served_rows()], 0.25, None)
    thread.join()
    assert not found.missing and found.kept == [[0, 1, 2, 3]]


def test_a_row_without_its_last_token_is_that_row(tmp_path, target):
    """vLLM leaves it out where the answer is its own (`include_output_tokens`); nothing is read there."""
    folder, whole = copy_files(tmp_path / "served"), features(target).read(batch())[0]
    for path in folder.iterdir():
        save_file({name: tensor[:-1].clone() for name, tensor in load_file(path).items()}, path)
    (cut,) = features(target, folder).read(batch())
    last = batch()["attention_mask"].sum(-1) - 1
    whole[torch.arange(4), last] = 0
    assert torch.equal(cut, whole)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"token_ids": torch.arange(3)}, "0.safetensors has no hidden_states"),
        ({"token_ids": torch.arange(3), "hidden_states": torch.zeros(3, 48)}, r"`hidden_states` is \[3, 48\], not"),
        ({"token_ids": torch.arange(3), "hidden_states": torch.zeros(4, 3, 16)}, "4 positions of `hidden_states`"),
    ],
)
def test_files_of_something_else_are_named(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "0.safetensors")
    with pytest.raises(ValueError, match=message):
        ServedFolder(tmp_path).scan()


def test_files_of_other_layers_are_named(target):
    with pytest.raises(ValueError, match=r"0.safetensors: \[3, 16\] layers and width, where .* \[2, 16\]"):
        features(target, layers=ServedLayers((1, 3))).read(batch())
    with pytest.raises(ValueError, match="nowhere is no folder"):
        ServedFolder("nowhere")
