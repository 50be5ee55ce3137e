"""Writes a model's own code beside its weights, for `trust_remote_code=True` where no package is installed."""

import ast
import inspect
import os
from collections.abc import Iterable
from pathlib import Path

from ..decoding.generate import generate
from .atomic_save import staged_directory

# Where `generate(custom_generate=directory)` looks for a function of this name, and for what that function needs.
GENERATE_FOLDER = "custom_generate"
GENERATE_REQUIREMENTS = "torch>=2.11\ntransformers>=5.24\n"


def write_remote_code(directory: str | os.PathLike, model_class: type) -> dict[str, str]:
    """
    Writes the modules that define `model_class` and its `config_class`, and all they import relatively, flat into
    `directory`. Beside them, in a folder `custom_generate`, the function that decodes with the model as a draft, again
    with all that it imports: `target.generate(..., custom_generate=directory, draft=model)`.

    Transformers copies only modules that sit beside one another, so `from ..configuration.configuration_x import X`
    is written as `from .configuration_x import X`. Flat modules are left as they are: a model loaded from such a
    directory can be saved again.

    Args:
        directory (`str` or `os.PathLike`):
            The saved model's directory.
        model_class (`type`):
            The class that `AutoModel` is to find; `AutoConfig` is to find its `config_class`.

    Returns:
        `dict[str, str]`: the config's `auto_map`.
    """
    # Not the class of a config at hand: transformers loads that one from a copy of the modules of its own.
    classes = {"AutoConfig": model_class.config_class, "AutoModel": model_class}
    files = {name: Path(inspect.getfile(cls)) for name, cls in classes.items()}
    sources = flatten_modules(files.values())
    with staged_directory(directory) as staging:
        _write(staging, sources)
        _write(staging / GENERATE_FOLDER, flatten_modules([Path(inspect.getfile(generate))]))
        (staging / GENERATE_FOLDER / "requirements.txt").write_text(GENERATE_REQUIREMENTS, encoding="utf-8")
    return {name: f"{files[name].stem}.{cls.__name__}" for name, cls in classes.items()}


def _write(directory: Path, sources: dict[str, str]) -> None:
    directory.mkdir(exist_ok=True)
    for name, source in sources.items():
        (directory / name).write_text(source, encoding="utf-8")


def flatten_modules(roots: Iterable[Path]) -> dict[str, str]:
    """
    Sources of the files `roots` and of what they import relatively, directly or not, fit to stand in one directory.

    Args:
        roots (iterable of `Path`):
            Python files to start from.

    Returns:
        `dict[str, str]`: file name to source.
    """
    paths: dict[str, Path] = {}
    sources: dict[str, str] = {}
    waiting = [path.absolute() for path in roots]
    while waiting:
        path = waiting.pop()
        known = paths.setdefault(path.name, path)
        assert known == path, f"{known} and {path} would become the same file: rename one of them"
        if path.name in sources:
            continue
        sources[path.name], imported = _flatten(path)
        waiting += imported
    return dict(sorted(sources.items()))


def _flatten(path: Path) -> tuple[str, list[Path]]:
    """One file's source with flat relative imports, and the files that these name."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    imported = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or node.level == 0:
            continue
        assert node.module, f"{path}:{node.lineno}: `from . import` names no module: write `from .module import name`"
        file = path.parents[node.level - 1].joinpath(*node.module.split(".")).with_suffix(".py")
        assert file.is_file(), f"{path}:{node.lineno}: {file} is not a module file"
        old, new = f"from {'.' * node.level}{node.module} import", f"from .{file.stem} import"
        assert old in lines[node.lineno - 1], f"{path}:{node.lineno}: expected `{old}`"
        lines[node.lineno - 1] = lines[node.lineno - 1].replace(old, new)
        imported.append(file)
    return "".join(lines), imported
