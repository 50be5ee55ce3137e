"""The package's face: every public name, each loaded when asked for."""

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import blockdraft

# One process each for what may be loaded after `import blockdraft`, and after its names have been used.
LIGHT = """
import sys, blockdraft
def loaded(*names):
    return [name for name in names if name in sys.modules]
assert loaded("torch", "transformers", "huggingface_hub") == [], "on import"
assert set(blockdraft.__all__) <= set(dir(blockdraft))
blockdraft.KimiK3DFlashConfig
assert loaded("transformers.modeling_utils", "blockdraft.modeling.draft.modeling_draft") == [], "for a configuration"
blockdraft.KimiK3DFlashDraftModel, blockdraft.DeepseekV41ForCausalLM, blockdraft.block_decode
heavy = ("datasets", "matplotlib", "peft", "transformers.trainer", "blockdraft.trainer.draft_trainer")
assert loaded(*heavy) == [], "for loading and decoding"
"""


def test_every_public_name_is_there():
    for name in blockdraft.__all__:
        assert getattr(blockdraft, name) is getattr(blockdraft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'KimiK4'"):
        _ = blockdraft.KimiK4
    assert blockdraft.__version__ == version("blockdraft")


def test_editors_see_the_names_that_are_loaded():
    """The imports for type checkers are those that `__getattr__` makes."""
    tree = ast.parse(Path(blockdraft.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {name.asname: node.module for node in block.body for name in node.names}
    assert seen == blockdraft._MODULES


def test_what_is_not_asked_for_is_not_loaded():
    result = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
