"""What makes `AutoConfig`, `AutoModel` and `AutoModelForCausalLM` know the classes of this package.

Transformers keeps tables of class names by model type, and imports a model's module when its class is first looked up.
The names of our classes are added to these tables, with this package as their module, which imports a class when asked
for it. So nothing of ours is imported before it is used.

The modules that hold the tables import torch, which takes seconds. They are not imported here: a finder in front of
Python's own adds the names as soon as anybody has imported them, in whatever order. Where they are imported already,
the names are added at once.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple


class ClassNames(NamedTuple):
    """The classes of a model type, under their names in this package: configuration, `AutoModel`'s and
    `AutoModelForCausalLM`'s. The last is `None` for a draft, which has no head of its own."""

    config: str
    model: str
    causal_lm: str | None = None


# By `model_type`. A multimodal checkpoint opens as its text model.
CLASS_NAMES = {
    "deepseek_v41": ClassNames("DeepseekV41Config", "DeepseekV41Model", "DeepseekV41ForCausalLM"),
    "deepseek_v41_text": ClassNames("DeepseekV41TextConfig", "DeepseekV41Model", "DeepseekV41ForCausalLM"),
    "deepseek_v41_dspark": ClassNames("DeepseekV41DSparkConfig", "DeepseekV41DSparkModel"),
    "kimi_k3": ClassNames("KimiK3Config", "KimiK3Model", "KimiK3ForCausalLM"),
    "kimi_k3_text": ClassNames("KimiK3TextConfig", "KimiK3Model", "KimiK3ForCausalLM"),
    "kimi_k3_dflash": ClassNames("KimiK3DFlashConfig", "KimiK3DFlashDraftModel"),
}


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


TABLES = {
    "transformers.models.auto.configuration_auto": add_configurations,
    "transformers.models.auto.modeling_auto": add_models,
}


def add_names(module: ModuleType) -> None:
    """Adds our names to the tables of a module of transformers, if it holds any.

    Raises:
        ImportError: if this version of transformers keeps them elsewhere.
    """
    if module.__name__ not in TABLES:
        return
    try:
        TABLES[module.__name__](module)
    except AttributeError as error:
        raise ImportError(
            f"transformers {version('transformers')} keeps the names of the Auto classes in another way than "
            f"{__package__} expects: {error}. Install transformers 5.24."
        ) from error


class NamesAfterImport(MetaPathFinder):
    """Lets the other finders find a module that holds tables, and has it add our names as the last step of its own
    import. Python's lock on that import keeps other threads waiting until then."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in TABLES:
            return None
        found = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, found), None)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                add_names(module)

            spec.loader.exec_module = exec_module
        return spec


def register() -> None:
    """Makes the Auto classes know the classes of this package, now or when they are imported."""
    sys.meta_path.insert(0, NamesAfterImport())
    for name in TABLES:
        if name in sys.modules:
            add_names(import_module(name))  # complete, even if another thread is importing it
