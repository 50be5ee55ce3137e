"""Reads a command's settings: a YAML file first, the command line over it, and errors that name the setting."""

import difflib
import json
from argparse import ArgumentTypeError
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from ..training_settings import TrainingSettings


class SettingsParser(HfArgumentParser):
    """[`~transformers.HfArgumentParser`] with a YAML file under the command line; errors are `ValueError`s. Among the
    dataclasses, [`TrainingSettings`] stands for [`DraftTrainingArguments`], which takes seconds to import. Settings in
    `positionals` may be given first, without their name."""

    def __init__(self, dataclass_types: Iterable[type], positionals: Sequence[str] = ()):
        dataclass_types = list(dataclass_types)
        if TrainingSettings in dataclass_types:
            from ..training_args import DraftTrainingArguments

            dataclass_types[dataclass_types.index(TrainingSettings)] = DraftTrainingArguments
        super().__init__(dataclass_types, allow_abbrev=False, add_help=False)
        self.register("type", dict, read_json)
        self.positionals = positionals
        known = [f for dtype in dataclass_types for f in fields(dtype) if f.init]
        self.settings = [f.name for f in known]
        self.settings += [alias.lstrip("-") for f in known for alias in f.metadata.get("aliases", ())]

    def error(self, message: str):
        raise ValueError(message)

    def parse(self, argv: Sequence[str]) -> tuple:
        """Instances of the dataclasses from `[CONFIG.yaml] [positionals] [--key value ...]`; the command line wins.
        Raises a `ValueError` for an unknown setting, with the nearest known one, or a value that cannot be."""
        *parsed, rest = self.parse_args_into_dataclasses(
            self._read(argv), return_remaining_strings=True, look_for_args_file=False
        )
        if rest:
            raise ValueError(f"{rest[0]!r} belongs to no setting; write --key value.")
        return tuple(parsed)

    def parse_one(self, dataclass_type: type, argv: Sequence[str]):
        """An instance of one of the dataclasses alone, as [`~SettingsParser.parse`] makes it. The others are not made:
        training arguments take hold of a device."""
        values, _ = self.parse_known_args(self._read(argv))
        return dataclass_type(**{f.name: getattr(values, f.name) for f in fields(dataclass_type)})

    def _read(self, argv: Sequence[str]) -> list[str]:
        """The settings as `--key value`, their names checked."""
        argv, given = list(argv), []
        if argv and argv[0].endswith((".yaml", ".yml")):
            given += self._read_yaml(Path(argv.pop(0)))
        for name in self.positionals:
            if not argv or argv[0].startswith("--"):
                break
            given.append(f"--{name}={argv.pop(0)}")
        for token in argv:
            if token.startswith("--"):
                key = token[2:].split("=")[0].replace("-", "_")
                self._check_known(key, "--" + key, extra=[f"no_{name}" for name in self.settings])
        return given + argv

    def _check_known(self, key: str, shown: str, extra: Sequence[str] = ()) -> None:
        if key not in self.settings and key not in extra:
            near = difflib.get_close_matches(key, self.settings, n=1, cutoff=0.0)
            raise ValueError(f"{shown} is not a setting; the nearest one is `{near[0]}`.")

    def _read_yaml(self, path: Path) -> list[str]:
        """The file as command line arguments, so that both are read and checked alike."""
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold `key: value` lines")
        argv = []
        for key, value in values.items():
            self._check_known(key, f"`{key}` in {path}")
            if value is None:
                raise ValueError(f"`{key}` in {path} has no value; leave the line out for the default.")
            if isinstance(value, list):
                argv += [f"--{key}", *map(str, value)]
            else:
                argv.append(f"--{key}={json.dumps(value) if isinstance(value, dict) else value}")
        return argv


def read_json(text: str) -> dict:
    """A mapping given as JSON on the command line."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ArgumentTypeError(f"not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"must be a JSON object, not a {type(value).__name__}.")
    return value
