"""What happens as soon as certain modules are imported, by whomever: nothing of them is imported for it.

- `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` come to know the classes of this package. Transformers keeps
  tables of class names by model type, and imports a model's module when its class is first looked up. The names of our
  classes are added to these tables, with this package as their module, which imports a class when asked for it. The
  modules that hold the tables import torch, which takes seconds, so they are not imported here.
- Drafts get what they have where this package is installed and do not ship.

A finder in front of Python's own does both. Where the modules are imported already, it is done at once.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple

from .modeling.families import FAMILIES


class ClassNames(NamedTuple):
    """The classes of a model type, under their names in this package: configuration, `AutoModel`'s and
    `AutoModelForCausalLM`'s. The last is `None` for a draft, which has no head of its own."""

    config: str
    model: str
    causal_lm: str | None = None


def class_name(path: str) -> str:
    return path.rpartition(":")[-1]


# By `model_type`. A multimodal checkpoint opens as its text model.
CLASS_NAMES = {
    "deepseek_v41": ClassNames("DeepseekV41Config", "DeepseekV41Model", "DeepseekV41ForCausalLM"),
    "deepseek_v41_text": ClassNames("DeepseekV41TextConfig", "DeepseekV41Model", "DeepseekV41ForCausalLM"),
    "kimi_k3": ClassNames("KimiK3Config", "KimiK3Model", "KimiK3ForCausalLM"),
    "kimi_k3_text": ClassNames("KimiK3TextConfig", "KimiK3Model", "KimiK3ForCausalLM"),
}
for family in FAMILIES.values():
    CLASS_NAMES[family.model_type] = ClassNames(class_name(family.config_path), class_name(family.model_path))


def add_configurations(auto: ModuleType) -> None:
    """Adds our configurations to the tables of `transformers.models.auto.configuration_auto`."""
    for model_type, names in CLASS_NAMES.items():
        auto.CONFIG_MAPPING_NAMES[model_type] = names.config
        auto.CONFIG_MAPPING._modules[model_type] = import_module(__package__)


def add_models(auto: ModuleType) -> None:
    """Adds our models to the tables of `transformers.models.auto.modeling_auto`."""
    for model_type, names in CLASS_NAMES.items():
        for mapping, name in (
            (auto.MODEL_MAPPING, names.model),
            (auto.MODEL_FOR_CAUSAL_LM_MAPPING, names.causal_lm),
        ):
            if name is not None:
                mapping._model_mapping[model_type] = name
                mapping._reverse_config_mapping[names.config] = model_type
                mapping._modules[model_type] = import_module(__package__)


def equip_drafts(modeling_draft: ModuleType) -> None:
    """Drafts are published with a card, and compared with the target that they were trained for."""

    def publisher(draft, repo_id: str, **kwargs):
        return import_module(f"{__package__}.hub_cards.upload").publish_model(draft, repo_id, **kwargs)

    def compare_target(draft, target) -> None:
        import_module(f"{__package__}.modeling.target.pairing").compare_target(draft, target)

    modeling_draft.DraftPreTrainedModel.publisher = publisher
    modeling_draft.DraftPreTrainedModel.compare_target = compare_target


AFTER_IMPORT = {
    "transformers.models.auto.configuration_auto": add_configurations,
    "transformers.models.auto.modeling_auto": add_models,
    f"{__package__}.modeling.draft.modeling_draft": equip_drafts,
}


def finish_import(module: ModuleType) -> None:
    """Does what is to be done once this module is imported.

    Raises:
        ImportError: if this version of transformers keeps its tables elsewhere.
    """
    try:
        AFTER_IMPORT[module.__name__](module)
    except AttributeError as error:
        raise ImportError(
            f"transformers {version('transformers')} keeps the names of the Auto classes in another way than "
            f"{__package__} expects: {error}. Install transformers 5.24."
        ) from error


class ImportWatcher(MetaPathFinder):
    """Lets the other finders find a module of [`AFTER_IMPORT`], and makes what is to be done the last step of its own
    import. Python's lock on that import keeps other threads waiting until then."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in AFTER_IMPORT:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                finish_import(module)

            spec.loader.exec_module = exec_module
        return spec


def watch_imports() -> None:
    """Does what is to be done, now or when the modules are imported."""
    sys.meta_path.insert(0, ImportWatcher())
    for name in AFTER_IMPORT:
        if name in sys.modules:
            finish_import(import_module(name))  # complete, even if another thread is importing it
