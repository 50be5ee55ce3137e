"""A saved draft carries its code: it loads, runs and saves again where the package does not exist."""

import json
from pathlib import Path

import pytest
import torch
from draft_models import draft_inputs, tiny_draft
from fresh_process import AUTO_MAP, code_files, run_fresh
from safetensors.torch import load_file, save_file

from blockdraft.modeling.decoding.generate import generate
from blockdraft.modeling.families import FAMILIES
from blockdraft.modeling.kimi_k3.modeling_kimi_k3_dflash import KimiK3DFlashDraftModel
from blockdraft.modeling.saving.remote_code import flatten_modules, write_remote_code


def test_loads_and_saves_again_without_the_package(tmp_path):
    draft = tiny_draft()
    save_file(draft_inputs(draft), tmp_path / "inputs.safetensors")
    # From the file here too: where a tensor lies in memory decides the last bits of a product on some processors.
    with torch.no_grad():
        expected = draft(**load_file(tmp_path / "inputs.safetensors")).last_hidden_state
    draft.save_pretrained(tmp_path / "made_here")
    (tmp_path / "made_here").rename(tmp_path / "moved")

    for source, saved_again in (("moved", "again"), ("again", "twice")):
        hidden = run_fresh(tmp_path / source, tmp_path / "inputs.safetensors", tmp_path / saved_again, tmp_path)
        assert torch.equal(hidden, expected)
        assert code_files(tmp_path / saved_again) == code_files(tmp_path / "moved")
        assert json.loads((tmp_path / saved_again / "config.json").read_text())["auto_map"] == AUTO_MAP


def test_shipped_files_import_each_other_and_public_libraries_only(tmp_path):
    assert write_remote_code(tmp_path, KimiK3DFlashDraftModel, generate) == AUTO_MAP
    files = code_files(tmp_path)
    assert {"modeling_kimi_k3_dflash.py", "configuration_kimi_k3_dflash.py"} < set(files)
    assert "modeling_kimi_k3.py" not in files  # a draft does not ship its target
    for name, source in files.items():
        imports = [line.split()[1] for line in source.splitlines() if line.startswith(("from ", "import "))]
        for module in imports:
            assert not module.startswith(("..", "blockdraft")), f"{name} imports {module}"
            beside = (Path(name).parent / f"{module[1:]}.py").as_posix()
            assert not module.startswith(".") or beside in files, f"{name} imports {module}"


# What every draft ships: what loads it and decodes with it. `generate.py` twice: transformers runs it from a folder of
# its own, and a draft that is loaded with this code is saved again from the modules beside it.
SHARED = {
    "atomic_save.py",
    "block_decoding.py",
    "block_visibility.py",
    "configuration_draft.py",
    "custom_generate/generate.py",
    "decoding_state.py",
    "elementwise.py",
    "generate.py",
    "generate_call.py",
    "modeling_draft.py",
    "remote_code.py",
    "rollback.py",
    "shapes.py",
    "target_features.py",
    "target_shapes.py",
    "transformers_internals.py",
    "validation.py",
    "verification.py",
    "visible_attention.py",
}
SHIPPED = {
    "dflash": {
        "configuration_kimi_k3_base.py",
        "configuration_kimi_k3_dflash.py",
        "flex_block_mask.py",
        "kimi_k3_layers.py",
        "modeling_kimi_k3_dflash.py",
    },
    "dspark": {
        "anchors.py",
        "block_targets.py",
        "cache_rounding.py",
        "configuration_deepseek_v41_base.py",
        "configuration_deepseek_v41_dspark.py",
        "configuration_dspark.py",
        "deepseek_v41_layers.py",
        "dspark_heads.py",
        "expert_products.py",
        "fp32.py",
        "hyper_connections.py",
        "modeling_deepseek_v41_dspark.py",
        "modeling_dspark.py",
    },
}
# 60% of the lines that version 0.1.0 shipped, and what it lacked: caches that cannot be cropped (`rollback.py`),
# checks of every input's shape (`shapes.py`), draws that are exact over large vocabularies.
MOST_LINES = {"dflash": 3577 + 201, "dspark": 4821 + 201}


@pytest.mark.parametrize("family", SHIPPED)
def test_what_ships_with_a_draft(family, tmp_path):
    write_remote_code(tmp_path, FAMILIES[family].model, generate)
    lines = {name: len(source.splitlines()) for name, source in code_files(tmp_path).items()}
    print(f"{family}: {len(lines)} modules, {sum(lines.values())} lines", *sorted(lines.items()), sep="\n")
    assert set(lines) == SHARED | SHIPPED[family]
    assert sum(lines.values()) <= MOST_LINES[family]


def make_files(root, files):
    for name, source in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(source)
    return root


def test_flattening_follows_imports_through_folders(tmp_path):
    root = make_files(
        tmp_path,
        {
            "a/first.py": "import os\nfrom ..b.second import (\n    X,\n)\n\ndef late():\n    from .third import Y\n",
            "a/third.py": "from .first import late\n",
            "b/second.py": "from ..a.third import Y\nfrom collections import abc\nX = '..b.second'\n",
            "b/unused.py": "",
        },
    )
    flat = flatten_modules([root / "a/first.py"])
    assert flat == {
        "first.py": "import os\nfrom .second import (\n    X,\n)\n\ndef late():\n    from .third import Y\n",
        "second.py": "from .third import Y\nfrom collections import abc\nX = '..b.second'\n",
        "third.py": "from .first import late\n",
    }
    assert flatten_modules([make_files(tmp_path / "flat", flat) / "first.py"]) == flat


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a/first.py": "from ..b.first import X\n", "b/first.py": ""}, "rename one"),
        ({"a/first.py": "from . import second\n", "a/second.py": ""}, "names no module"),
        ({"a/first.py": "from ..b import X\n", "b/__init__.py": ""}, "not a module file"),
    ],
)
def test_what_cannot_be_flattened_is_refused(tmp_path, files, message):
    root = make_files(tmp_path, files)
    with pytest.raises(AssertionError, match=message):
        flatten_modules([root / "a/first.py"])
