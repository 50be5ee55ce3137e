"""Writes a model's own code beside its weights, for `trust_remote_code=True` where no package is installed."""

import inspect
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from .atomic_save import staged_directory

# Where transformers looks for the `generate` of `target.generate(custom_generate=directory)`, and for what it needs.
GENERATE_FOLDER = "custom_generate"
GENERATE_REQUIREMENTS = "torch>=2.11\ntransformers>=5.24\n"
# As transformers finds them.
RELATIVE_IMPORT = re.compile(r"^(\s*from )(\.+)(\S*)( import)", flags=re.MULTILINE)


def write_remote_code(directory: str | os.PathLike, model_class: type, generate: Callable) -> dict[str, str]:
    """
    Writes the modules that define `model_class` and its `config_class`, and all they import relatively, flat into
    `directory`; and into its folder `custom_generate` the module of `generate`, which imports nothing relatively.

    Transformers copies only modules that sit beside one another, so `from ..configuration.configuration_x import X`
    is written as `from .configuration_x import X`. Flat modules are left as they are: a model loaded from such a
    directory can be saved again.

    Args:
        directory: of the saved model.
        model_class: what `AutoModel` is to find; `AutoConfig` is to find its `config_class`.
        generate: what `target.generate(..., custom_generate=directory)` is to call.

    Returns:
        The config's `auto_map`.
    """
    # Not the class of a config at hand: transformers loads that one from a copy of the modules of its own.
    classes = {"AutoConfig": model_class.config_class, "AutoModel": model_class}
    files = {name: Path(inspect.getfile(cls)) for name, cls in classes.items()}
    sources = flatten_modules(files.values())
    sources[f"{GENERATE_FOLDER}/generate.py"] = Path(inspect.getfile(generate)).read_text(encoding="utf-8")
    sources[f"{GENERATE_FOLDER}/requirements.txt"] = GENERATE_REQUIREMENTS
    with staged_directory(directory) as staging:
        (staging / GENERATE_FOLDER).mkdir()
        for name, source in sources.items():
            (staging / name).write_text(source, encoding="utf-8")
    return {name: f"{files[name].stem}.{cls.__name__}" for name, cls in classes.items()}


def flatten_modules(roots: Iterable[Path]) -> dict[str, str]:
    """Sources by file name of the Python files `roots` and of what they import relatively, directly or not, fit to
    stand in one directory."""
    paths: dict[str, Path] = {}
    sources: dict[str, str] = {}
    waiting = [path.absolute() for path in roots]

    def flatten(found: re.Match) -> str:
        start, dots, module, end = found.groups()
        assert module, f"{path}: `from . import` names no module: write `from .module import name`"
        file = path.parents[len(dots) - 1].joinpath(*module.split(".")).with_suffix(".py")
        assert file.is_file(), f"{path}: {file} is not a module file"
        waiting.append(file)
        return f"{start}.{file.stem}{end}"

    while waiting:
        path = waiting.pop()
        known = paths.setdefault(path.name, path)
        assert known == path, f"{known} and {path} would become the same file: rename one of them"
        if path.name not in sources:
            sources[path.name] = RELATIVE_IMPORT.sub(flatten, path.read_text(encoding="utf-8"))
    return dict(sorted(sources.items()))
