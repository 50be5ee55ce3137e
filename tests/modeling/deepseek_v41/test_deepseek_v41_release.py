import json

import pytest
import torch
from deepseek_v41_dspark_models import our_name, tiny_dspark
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from blockdraft.configuration.build_deepseek_v41_dspark import build_deepseek_v41_dspark_draft_config
from blockdraft.configuration.configuration_deepseek_v41 import DeepseekV41TextConfig
from blockdraft.modeling.deepseek_v41.deepseek_v41_release import (
    DRAFT_FILE,
    check_released,
    expected_shapes,
    export_deepseek,
    load_deepseek,
    native_tensors,
    read_weight_map,
    released_tensors,
)
from blockdraft.modeling.deepseek_v41.modeling_deepseek_v41_dspark import DeepseekV41DSparkModel

# Sizes that FP4 can hold.
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32}
TARGET_OWNED = {"embed.weight", "head.weight"}
INDEX = "model.safetensors.index.json"


def random_dspark(**settings) -> DeepseekV41DSparkModel:
    """Random numbers, also where a fresh draft has constants: a constant hides an exchange."""
    draft = tiny_dspark(**(WIDE | settings))
    for tensor in draft.state_dict().values():
        tensor.normal_(std=0.3)
    return draft


def golden_native(listing: dict) -> dict[str, torch.Tensor]:
    """The reference's state dict of the listed shapes, in random numbers."""
    return {our_name(name): torch.randn(entry["shape"]) for name, entry in listing["native"].items()}


def listed(tensors: dict[str, torch.Tensor]) -> dict[str, dict]:
    return {
        name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in tensors.items()
    }


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target", random_dspark())


def write_target(folder, draft: DeepseekV41DSparkModel, shards: int = 2, old: dict | None = None, **extra):
    """A made-up V4.1 directory that says of its draft what `draft` is."""
    config = draft.config
    text_config = {
        name: getattr(config, name)
        for name in DeepseekV41TextConfig().to_dict()
        if hasattr(config, name)
        and name not in ("model_type", "num_hidden_layers", "architectures", "transformers_version")
    }
    text_config |= {engine_name: getattr(config, name) for engine_name, name in config.engine_view.items()}
    text_config |= {
        "num_hidden_layers": config.num_target_layers,
        "compress_ratios": [0] * (config.num_target_layers + config.num_hidden_layers),
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "candidate_source_layer_id": -1,
        "engram_layer_ids": [],
        "index_head_dim": 16,
    }
    folder.mkdir(parents=True)
    outer = {"model_type": "deepseek_v41", "text_config": text_config} | extra
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = {
        "embed.weight": torch.ones(64, 64),
        "layers.0.attn_norm.weight": torch.ones(64),
        "norm.weight": torch.ones(64),
    }
    tensors |= old or {}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def same(actual: DeepseekV41DSparkModel, expected: dict[str, torch.Tensor]) -> bool:
    state = actual.state_dict()
    return state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in state)


# ---- names, shapes, dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["tiny", "aligned32"])
def test_names_shapes_and_dtypes_are_the_references(golden, case):
    listing = golden("v41_dspark_state_dict").meta[case]
    native = golden_native(listing)
    assert listed(released_tensors(native, torch.float32)) == listing["to_hf"]
    in_bf16 = released_tensors(native)
    assert list(in_bf16) == listing["hf_keys"]
    fp32 = sorted(name for name, tensor in in_bf16.items() if tensor.dtype == torch.float32)
    assert fp32 == listing["bf16_forced_fp32_hf_keys"]
    assert {tensor.dtype for tensor in in_bf16.values()} == {torch.float32, torch.bfloat16}
    for name, released in listing["native_to_hf"].items():
        assert list(released_tensors({our_name(name): native[our_name(name)]})) == released


def test_quantised_names_shapes_and_dtypes_are_the_references(golden):
    listing = golden("v41_dspark_state_dict").meta["aligned32"]
    quantised = released_tensors(golden_native(listing), torch.float32, quantize=True)
    assert listed(quantised) == listing["to_hf_quantized_load_targets"]


def test_a_draft_of_the_reference_configuration_has_these_names(golden, tmp_path):
    listing = golden("v41_dspark_state_dict").meta["aligned32"]
    config = build_deepseek_v41_dspark_draft_config(DeepseekV41TextConfig(**listing["config"]))
    draft = DeepseekV41DSparkModel(config)
    for quantize, column in ((False, "to_hf"), (True, "to_hf_quantized_load_targets")):
        export_deepseek(draft, tmp_path, quantize=quantize)
        stored = load_file(tmp_path / DRAFT_FILE)
        expected = {name: entry for name, entry in listing[column].items() if name not in TARGET_OWNED}
        for name, entry in expected.items():
            # The listing is that of an fp32 draft.
            if entry["dtype"] == "float32" and name not in listing["bf16_forced_fp32_hf_keys"]:
                entry["dtype"] = "bfloat16"
        assert listed(stored) == expected


def test_experts_split_and_merge_as_in_the_reference(golden):
    golden = golden("v41_dspark_state_dict")
    native = {our_name(name): tensor for name, tensor in golden.group("param").items()}
    expected = golden.group("out.hf")
    released = released_tensors(native, torch.float32)
    assert released.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in released.items())
    merged = native_tensors(expected, torch.float32)
    assert merged.keys() == native.keys()
    assert all(torch.equal(tensor, native[name]) for name, tensor in merged.items())


# ---- a file of its own --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"markov_rank": None}, {"confidence_head": False, "confidence_input": "pre_norm"}]
)
def test_a_bf16_draft_is_read_back_bit_equal(tmp_path, settings):
    draft = random_dspark(**settings).to(torch.bfloat16)
    assert export_deepseek(draft, tmp_path) == []
    assert [file.name for file in tmp_path.iterdir()] == [DRAFT_FILE]
    loaded = load_deepseek(tmp_path)
    assert same(loaded, draft.state_dict()) and not loaded.training
    assert {name: tensor.dtype for name, tensor in loaded.state_dict().items()} == {
        name: tensor.dtype for name, tensor in draft.state_dict().items()
    }
    for name in ("target_layer_ids", "markov_rank", "confidence_head", "confidence_input", "slot_layout", "target"):
        assert getattr(loaded.config, name) == getattr(draft.config, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_draft_is_close_and_quantises_to_the_same_again(tmp_path, dtype):
    draft = random_dspark()
    export_deepseek(draft, tmp_path, quantize=True)
    loaded = load_deepseek(tmp_path, dtype)
    for name, tensor in loaded.state_dict().items():
        # FP4 leaves out 5, FP8 has three bits behind the leading one.
        tolerance = 0.2 if ".ffn.experts." in name else 1 / 14
        original = draft.state_dict()[name]
        assert (tensor.float() - original).abs().max() <= tolerance * original.abs().max(), name
    export_deepseek(loaded, tmp_path / "again", quantize=True)
    again = load_deepseek(tmp_path / "again", dtype)
    assert same(again, loaded.state_dict())


def test_copies_of_embedding_and_head_stay_out(tmp_path):
    draft = random_dspark()
    embed = torch.nn.Embedding(draft.config.vocab_size, draft.config.hidden_size)
    head = torch.nn.Linear(draft.config.hidden_size, draft.config.vocab_size, bias=False)
    draft.initialize_embeddings_and_head(embed, head)
    export_deepseek(draft, tmp_path)
    assert all(name.startswith("mtp.") for name in load_file(tmp_path / DRAFT_FILE))


def test_sizes_that_fp4_cannot_hold_are_refused(tmp_path):
    draft = tiny_dspark(hidden_size=64, moe_intermediate_size=24)
    with pytest.raises(ValueError, match="`mtp.0.ffn.experts.0.w2.weight` has 24 columns"):
        export_deepseek(draft, tmp_path, quantize=True)
    assert not (tmp_path / DRAFT_FILE).exists()


def test_what_is_missing_unexpected_or_of_another_shape_is_named(tmp_path):
    draft = random_dspark()
    export_deepseek(draft, tmp_path)
    with safe_open(tmp_path / DRAFT_FILE, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(tmp_path / DRAFT_FILE)
    del tensors["mtp.1.attn.attn_sink"], tensors["mtp.0.ffn.experts.3.w2.weight"]
    tensors["mtp.3.attn_norm.weight"] = torch.ones(64)
    tensors["mtp.0.main_proj.weight"] = torch.ones(64, 64)
    save_file(tensors, tmp_path / DRAFT_FILE, metadata)
    with pytest.raises(ValueError) as error:
        load_deepseek(tmp_path)
    for part in (
        "missing: mtp.0.ffn.experts.3.w2.weight, mtp.1.attn.attn_sink",
        "unexpected: mtp.3.attn_norm.weight",
        "of another shape: mtp.0.main_proj.weight (64, 64), not (64, 128)",
    ):
        assert part in str(error.value)


def test_halves_of_quantised_pairs_are_named():
    draft = random_dspark()
    released = released_tensors(draft.state_dict(), quantize=True)
    check_released(released, draft.config)
    del released["mtp.0.attn.wq_a.scale"], released["mtp.2.ffn.experts.1.w3.weight"]
    released["mtp.1.attn.wkv.weight"] = released["mtp.1.attn.wkv.weight"].float()
    released["mtp.0.ffn.experts.0.w1.scale"] = torch.ones(32, 1).to(torch.float8_e8m0fnu)
    with pytest.raises(ValueError) as error:
        check_released(released, draft.config)
    for part in (
        "missing: mtp.2.ffn.experts.1.w3.weight",
        "without the scale that its numbers need: mtp.0.attn.wq_a.weight",
        "a scale without a quantised weight: mtp.1.attn.wkv.scale, mtp.2.ffn.experts.1.w3.scale",
        "of another shape: mtp.0.ffn.experts.0.w1.scale (32, 1), not (32, 2)",
    ):
        assert part in str(error.value)


def test_a_directory_without_a_draft_is_refused(tmp_path, target):
    with pytest.raises(ValueError, match="no safetensors files"):
        load_deepseek(tmp_path)
    with pytest.raises(ValueError, match="hold no `mtp.\\*` tensors"):
        load_deepseek(target)


def test_a_place_and_a_dspark_draft_are_needed(tmp_path):
    with pytest.raises(ValueError, match="`directory`.*`into`"):
        export_deepseek(random_dspark())
    with pytest.raises(ValueError, match="`draft` is a Linear"):
        export_deepseek(torch.nn.Linear(2, 2), tmp_path)


# ---- beside the target --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("quantize", [False, True])
def test_a_draft_goes_beside_its_target(tmp_path, shards, quantize):
    draft = random_dspark().to(torch.bfloat16)
    target = write_target(tmp_path / "target", draft, shards)
    before = {file.name: file.read_bytes() for file in target.iterdir() if file.name != INDEX}
    old_map = read_weight_map(target)
    assert export_deepseek(draft, quantize=quantize, into=target) == []
    assert all((target / name).read_bytes() == content for name, content in before.items())
    assert {file.name for file in target.iterdir()} == before.keys() | {DRAFT_FILE, INDEX}
    index = json.loads((target / INDEX).read_text())
    stored = load_file(target / DRAFT_FILE)
    assert index["weight_map"] == old_map | dict.fromkeys(stored, DRAFT_FILE)
    tensors = [tensor for file in set(index["weight_map"].values()) for tensor in load_file(target / file).values()]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors)
    loaded = load_deepseek(target)
    assert loaded.config.target_layer_ids == draft.config.target_layer_ids
    assert quantize or same(loaded, draft.state_dict())


def test_a_second_draft_takes_the_place_of_the_first(tmp_path):
    first, second = random_dspark().to(torch.bfloat16), random_dspark(confidence_head=False).to(torch.bfloat16)
    target = write_target(tmp_path / "target", first)
    export_deepseek(first, into=target, quantize=True)
    assert export_deepseek(second, into=target) == []
    assert not any(name.endswith((".scale", "confidence_head.proj.weight")) for name in read_weight_map(target))
    assert same(load_deepseek(target), second.state_dict())


def test_a_released_draft_stays_in_its_files_and_leaves_the_index(tmp_path):
    released, trained = random_dspark(), random_dspark(confidence_head=False).to(torch.bfloat16)
    old = released_tensors(released.state_dict(), quantize=True)
    target = write_target(tmp_path / "target", trained, 3, old)
    # DeepSeek's own: no metadata, and a confidence head that reads the state before the norm.
    loaded = load_deepseek(target, torch.float32)
    assert loaded.config.confidence_input == "pre_norm" and loaded.config.confidence_head
    assert same(loaded, native_tensors(old, torch.float32))

    before = {file.name: file.read_bytes() for file in target.glob("model-*")}
    with pytest.warns(UserWarning, match="tensors of another draft") as record:
        (warning,) = export_deepseek(trained, into=target)
    assert str(record[0].message) == warning
    assert f"{len(old)} `mtp.*`" in warning and "mtp.0.attn.wq_a.scale" in warning
    assert all((target / name).read_bytes() == content for name, content in before.items())
    assert {file for name, file in read_weight_map(target).items() if name.startswith("mtp.")} == {DRAFT_FILE}
    assert same(load_deepseek(target), trained.state_dict())


def test_a_target_that_says_otherwise_is_refused(tmp_path):
    draft = random_dspark()
    other = random_dspark(target_layer_ids=[2, 4], rope_theta=5e4)
    target = write_target(tmp_path / "target", other)
    with pytest.raises(ValueError, match="`dspark_target_layer_ids` is .3, 5. in the draft and .2, 4.*`rope_theta`"):
        export_deepseek(draft, into=target)
    assert not (target / DRAFT_FILE).exists()


def test_other_targets_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="not a DeepSeek V4.1 target"):
        export_deepseek(random_dspark(), into=tmp_path)


def test_a_failed_index_leaves_the_target_as_it_was(tmp_path, monkeypatch):
    draft = random_dspark()
    target = write_target(tmp_path / "target", draft)
    index = (target / INDEX).read_text()
    (target / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        export_deepseek(draft, into=target)
    assert (target / INDEX).read_text() == index


def test_engines_warnings_are_returned_and_issued(tmp_path):
    draft = random_dspark()
    with pytest.warns(UserWarning) as record:
        misfits = export_deepseek(draft, tmp_path, engine="vllm")
    assert [str(warning.message) for warning in record] == misfits
    assert any("pre_norm" in misfit for misfit in misfits)


def test_expected_shapes_are_those_of_a_model():
    draft = random_dspark()
    released = released_tensors(draft.state_dict())
    assert expected_shapes(draft.config) == {name: tensor.shape for name, tensor in released.items()}
