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


@strict
class CheckedConfig(PreTrainedConfig):
    """A configuration that checks itself when it is made, and derives `layer_types`. A subclass names its sizes and
    extends `check`."""

    keys_to_ignore_at_inference = ["cache"]
    positive_ints: ClassVar[tuple[str, ...]] = ()
    positive_numbers: ClassVar[tuple[str, ...]] = ()

    schema_version: int = SCHEMA_VERSION

    def __post_init__(self, **kwargs):
        kwargs.pop("layer_types", None)
        super().__post_init__(**kwargs)
        self.check()

    def validate_layer_type(self):
        """The types may be our own: the list in transformers does not apply."""

    def check(self) -> None:
        """Raises a `ValueError` that names the first setting outside of what is defined."""
        self.check_version("schema_version", SCHEMA_VERSION)
        self.require_positive_ints(*self.positive_ints)
        for name in self.positive_numbers:
            value = getattr(self, name)
            self.require(name, math.isfinite(value) and value > 0, "it must be finite and positive")

    def check_version(self, name: str, known: int) -> None:
        """Refuses settings of a later version than this code knows."""
        reason = f"this version of blockdraft reads up to {known}; install a newer one"
        self.require(name, getattr(self, name) <= known, reason)

    def require_positive_ints(self, *names: str) -> None:
        for name in names:
            self.require(name, is_positive_int(getattr(self, name)), "it must be a positive integer")

    def require(self, name: str, condition: bool, reason: str) -> None:
        """Raises a `ValueError` that names a setting of this configuration, unless `condition`."""
        require(condition, name, getattr(self, name), reason)
