"""The Auto classes know our classes, whatever is imported first, and nothing of ours is imported before it is used."""

import subprocess
import sys
import threading
from importlib import import_module, invalidate_caches, reload
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto import configuration_auto, modeling_auto

import blockdraft
from blockdraft import after_import
from blockdraft.after_import import AFTER_IMPORT, CLASS_NAMES, ImportWatcher, finish_import
from blockdraft.modeling.families import FAMILIES

CHECK = """
def check(AutoConfig, AutoModel, AutoModelForCausalLM):
    import blockdraft
    from blockdraft.after_import import CLASS_NAMES
    for model_type, names in CLASS_NAMES.items():
        config = getattr(blockdraft, names.config)
        assert AutoModel._model_mapping[config] is getattr(blockdraft, names.model)
        if names.causal_lm:
            assert AutoModelForCausalLM._model_mapping[config] is getattr(blockdraft, names.causal_lm)
        else:
            assert config not in AutoModelForCausalLM._model_mapping
    config = AutoConfig.for_model("kimi_k3_text", hidden_size=32, num_hidden_layers=1, vocab_size=8)
    assert type(config) is blockdraft.KimiK3TextConfig
"""
ORDERS = {
    "ours first": """
import sys, blockdraft
from transformers import AutoConfig
assert AutoConfig.for_model("deepseek_v41_text", num_hidden_layers=1).model_type == "deepseek_v41_text"
assert not [name for name in sys.modules if name.startswith("blockdraft.modeling.") and "families" not in name]
from transformers import AutoModel, AutoModelForCausalLM
assert not [name for name in sys.modules if name.startswith("blockdraft.modeling.") and "families" not in name]
assert "transformers.modeling_utils" not in sys.modules
check(AutoConfig, AutoModel, AutoModelForCausalLM)
""",
    "configurations first": """
from transformers import AutoConfig
import blockdraft
assert AutoConfig.for_model("kimi_k3").model_type == "kimi_k3"
from transformers import AutoModel, AutoModelForCausalLM
check(AutoConfig, AutoModel, AutoModelForCausalLM)
""",
    "transformers first": """
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
import blockdraft.modeling.ops.fp32  # any module of the package will do
check(AutoConfig, AutoModel, AutoModelForCausalLM)
""",
}


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_imports_does_not_matter(order):
    result = subprocess.run([sys.executable, "-c", CHECK + ORDERS[order]], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_family_is_known():
    for family in FAMILIES.values():
        names = CLASS_NAMES[family.model_type]
        assert family.model_type == family.config.model_type
        assert (names.config, names.model, names.causal_lm) == (family.config.__name__, family.model.__name__, None)
    assert {name for names in CLASS_NAMES.values() for name in names if name} <= set(blockdraft.__all__)


def test_every_model_type_has_its_classes():
    for model_type, names in CLASS_NAMES.items():
        config = getattr(blockdraft, names.config)
        assert config.model_type == model_type and configuration_auto.CONFIG_MAPPING[model_type] is config
        assert configuration_auto.config_class_to_model_type(names.config) == model_type
        assert AutoModel._model_mapping[config] is getattr(blockdraft, names.model)
        known = AutoModelForCausalLM._model_mapping.get(config, None)
        assert known is (names.causal_lm and getattr(blockdraft, names.causal_lm))


def test_a_multimodal_configuration_opens_as_the_text_model():
    config = AutoConfig.for_model("kimi_k3", text_config={"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 8})
    assert AutoModelForCausalLM._model_mapping[type(config)].config_class is type(config.get_text_config())


@pytest.fixture
def slow_tables(tmp_path, monkeypatch):
    """A module that takes a while to import, and holds a list for names."""
    (tmp_path / "slow_tables.py").write_text("import time\ntime.sleep(0.2)\nnames = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(AFTER_IMPORT, "slow_tables", lambda module: module.names.append("ours"))
    invalidate_caches()
    yield
    sys.modules.pop("slow_tables", None)


def test_no_thread_sees_tables_without_our_names(slow_tables):
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(import_module("slow_tables").names[:])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [["ours"]] * 4
    assert reload(sys.modules["slow_tables"]).names == ["ours"]


def test_other_modules_are_found_as_ever():
    assert ImportWatcher().find_spec("json") is None
    assert ImportWatcher().find_spec("transformers.models.auto.nothing") is None
    assert sum(isinstance(finder, ImportWatcher) for finder in sys.meta_path) == 1


def test_private_parts_of_transformers_that_the_names_need():
    """Where one of them is gone, the error names the version."""
    assert modeling_auto.MODEL_MAPPING._model_mapping is modeling_auto.MODEL_MAPPING_NAMES
    for mapping in (modeling_auto.MODEL_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        assert mapping._reverse_config_mapping["KimiK3TextConfig"] == "kimi_k3_text"
        assert mapping._modules["kimi_k3_text"] is configuration_auto.CONFIG_MAPPING._modules["kimi_k3_text"]
    changed = SimpleNamespace(__name__=configuration_auto.__name__, CONFIG_MAPPING_NAMES={}, CONFIG_MAPPING=object())
    with pytest.raises(ImportError, match=r"transformers 5\.\d+.* Auto classes .*'_modules'"):
        finish_import(changed)
    assert after_import.__package__ == "blockdraft"


def test_drafts_have_what_they_do_not_ship():
    for family in FAMILIES.values():
        assert family.model.publisher is not None and family.model.compare_target is not None
