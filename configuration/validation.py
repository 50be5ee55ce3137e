"""How the configurations check their settings."""

import math
from typing import ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

SCHEMA_VERSION = 1


def is_natural(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_positive_int(value) -> bool:
    return is_natural(value) and value > 0


def require(condition: bool, name: str, value, reason: str) -> None:
    """Raises a `ValueError` that names a setting, unless `condition`."""
    if not condition:
        raise ValueError(f"`{name}` is {value!r}: {reason}.")


def check_schema_version(name: str, value: int, known: int) -> None:
    """Raises a `ValueError` if a file's settings are of a later version than this code knows."""
    require(value <= known, name, value, f"this version of blockdraft reads up to {known}; install a newer one")


@strict
class CheckedConfig(PreTrainedConfig):
    """A configuration that checks itself when it is made. A subclass names its sizes and extends `check`."""

    positive_ints: ClassVar[tuple[str, ...]] = ()
    positive_numbers: ClassVar[tuple[str, ...]] = ()

    schema_version: int = SCHEMA_VERSION

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Raises a `ValueError` that names the first setting outside of what is defined."""
        check_schema_version("schema_version", self.schema_version, SCHEMA_VERSION)
        for name in self.positive_ints:
            value = getattr(self, name)
            require(is_positive_int(value), name, value, "it must be a positive integer")
        for name in self.positive_numbers:
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, name, value, "it must be finite and positive")
