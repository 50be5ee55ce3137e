"""Figures of real decoding as cards show them: none without its protocol."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from huggingface_hub import EvalResult

from .rules import is_hub_id

FIGURES = {
    "tau": "tau",
    "tau_without_loops": "tau without looping answers",
    "looping_share": "looping answers",
    "rows_per_token": "rows through the target a token",
    "speedup": "speed-up",
}
# Those that the Hub indexes.
METRICS = {"tau": "tokens committed a round (tau)", "speedup": "speed-up over plain decoding"}
# What makes figures comparable, and how a card words it.
PROTOCOL = {
    "decoding": "{}",
    "block_size": "block {}",
    "confidence_schedule": "confidence schedule {}",
    "prompts": "{} prompts",
    "max_new_tokens": "up to {} new tokens",
    "batch_size": "batch {}",
    "dtype": "{}",
    "hardware": "{}",
}
REQUIRED = ("decoding", "block_size", "prompts", "max_new_tokens", "dtype", "hardware")


@dataclass(frozen=True)
class DecodingResult:
    """What decoding one data set gave.

    Attributes:
        data: name of the data set.
        protocol: the parts of [`PROTOCOL`] that are known.
        figures: numbers by the names of [`FIGURES`], finite.
        acceptance: share of rounds that got past each drafted slot; empty if not known.
    """

    data: str
    protocol: dict
    figures: dict[str, float]
    acceptance: tuple[float, ...]

    @property
    def protocol_text(self) -> str:
        parts = [words.format(self.protocol[key]) for key, words in PROTOCOL.items() if key in self.protocol]
        return " ".join(", ".join(parts).split())

    def figure_text(self, name: str) -> str:
        """A table cell."""
        if name not in self.figures:
            return "-"
        value = self.figures[name]
        return f"{value:.0%}" if name == "looping_share" else f"{value:.2f}"


def read_results(metrics: Mapping[str, Mapping | Sequence[Mapping]] | None) -> list[DecodingResult]:
    """
    Checks what a card is given.

    Args:
        metrics: by data set, what `DecodingReport.headline()` returns: `protocol` (a dict), any of [`FIGURES`] and,
            if known, `acceptance_by_slot`; or a list of such, one for each protocol.

    Raises:
        ValueError: for a number without a protocol, one that is not of real decoding or not finite, and for two
            results that cannot be told apart.
    """
    results = []
    for data, given in (metrics or {}).items():
        results += [_read(data, values) for values in ([given] if isinstance(given, Mapping) else given)]
    keys = [(_data_type(result.data), result.protocol_text) for result in results]
    if twice := [result.data for result, key in zip(results, keys, strict=True) if keys.count(key) > 1]:
        raise ValueError(f"`metrics` has two results of {twice[0]!r} by the same protocol: give one of them.")
    return results


def _read(data: str, values: Mapping) -> DecodingResult:
    if not isinstance(values, Mapping) or not isinstance(values.get("protocol"), Mapping):
        raise ValueError(
            f"`metrics` of {data!r} have no `protocol`: a card says how its numbers were measured. Give what "
            "`DecodingReport.headline()` returns."
        )
    figures = {name: value for name, value in values.items() if name not in ("protocol", "acceptance_by_slot")}
    protocol, acceptance = dict(values["protocol"]), tuple(values.get("acceptance_by_slot") or ())
    if lacking := [name for name in REQUIRED if protocol.get(name) in (None, "")]:
        raise ValueError(f"`metrics` of {data!r} have a protocol without `{lacking[0]}`: say it.")
    for name in [*protocol, *figures]:
        if name not in (PROTOCOL if name in protocol else FIGURES):
            raise ValueError(
                f"`metrics` of {data!r} have `{name}`, which is no figure of real decoding: a card takes "
                f"{', '.join(FIGURES)}."
            )
    for name, value in [*figures.items(), *(("acceptance_by_slot", share) for share in acceptance)]:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"`metrics` of {data!r} have `{name}` = {value}: leave out what was not measured.")
    return DecodingResult(" ".join(data.split()), protocol, figures, acceptance)


def eval_results(results: list[DecodingResult]) -> list[EvalResult]:
    """Entries of a `model-index`: tau and speed-up for each data set and protocol."""
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Speculative decoding",
            dataset_type=_data_type(result.data),
            dataset_name=result.data,
            dataset_config=result.protocol_text,
            metric_type=name,
            metric_name=METRICS[name],
            metric_value=round(float(result.figures[name]), 4),
        )
        for result in results
        for name in METRICS
        if name in result.figures
    ]


def _data_type(data: str) -> str:
    """The Hub's id of a data set, or a short form of its name."""
    return data if is_hub_id(data) else re.sub(r"[^\w.]+", "-", data.lower()).strip("-") or "data"
