"""Figures of real decoding, as cards and the Hub's evaluation files show them: none without its protocol."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from huggingface_hub import EvalResult, EvalResultEntry

from .rules import is_hub_id

FIGURES = {
    "tau": "tau",
    "tau_without_loops": "tau without looping answers",
    "looping_share": "looping answers",
    "rows_per_token": "target tokens per committed token",
    "speedup": "speed-up",
}
# Those that the Hub indexes.
METRICS = {"tau": "tokens committed per verification (tau)", "speedup": "speed-up over plain decoding"}
# What makes figures comparable, and how a card words it.
PROTOCOL = {
    "decoding": "{}",
    "block_size": "block {}",
    "confidence_schedule": "confidence schedule {}",
    "prompts": "{} prompts",
    "max_new_tokens": "up to {} new tokens",
    "batch_size": "batch {}",
    "dtype": "{}",
    "draft_dtype": "draft {}",
    "hardware": "{}",
}
FEW_PROMPTS = 32  # figures of fewer are a rough measure
REQUIRED = ("decoding", "block_size", "prompts", "max_new_tokens", "dtype", "hardware")
NOT_FIGURES = ("protocol", "intervals", "acceptance_by_slot", "benchmark_task")


@dataclass(frozen=True)
class DecodingResult:
    """What decoding one data set gave.

    Attributes:
        data: name of the data set.
        protocol: the parts of [`PROTOCOL`] that are known.
        figures: numbers by the names of [`FIGURES`], finite.
        intervals: lowest and highest value of those whose 95% interval over prompts is known.
        acceptance: share of rounds that got past each drafted slot; empty if not known.
        benchmark_task: the task that ranks drafts by tau, where the data set is a benchmark of the Hub with such a
            task; `None` for any other.
    """

    data: str
    protocol: dict
    figures: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    acceptance: tuple[float, ...]
    benchmark_task: str | None = None

    @property
    def protocol_text(self) -> str:
        parts = [words.format(self.protocol[key]) for key, words in PROTOCOL.items() if key in self.protocol]
        return " ".join(", ".join(parts).split())

    def figure_text(self, name: str) -> str:
        """A figure with its interval; a dash where it was not measured."""
        if name not in self.figures:
            return "-"
        shown = ("{:.0%}" if name == "looping_share" else "{:.2f}").format(self.figures[name])
        return shown + (" ({:.2f} to {:.2f})".format(*self.intervals[name]) if name in self.intervals else "")

    @property
    def curve_label(self) -> str:
        how = f"tau {self.figures['tau']:.2f}" if "tau" in self.figures else self.protocol["decoding"]
        return f"{self.data}, {how}"

    @property
    def shares_text(self) -> str:
        return ", ".join(f"{100 * share:.0f}" for share in self.acceptance) + " %"


def read_results(metrics: Mapping[str, Mapping | Sequence[Mapping]] | None) -> list[DecodingResult]:
    """Checks what a card is given.

    Args:
        metrics: by data set, what `DecodingReport.headline()` returns: `protocol` (a dict), any of [`FIGURES`] and, if
            known, `intervals` (pairs by figure) and `acceptance_by_slot`; or a list of such, one for each protocol.
            `benchmark_task` may be added, see [`DecodingResult`].

    Raises:
        ValueError: for a number without a protocol, one that is not of real decoding or not finite, two results that
            cannot be told apart, and a benchmark's task without tau or without the Hub id of the benchmark.
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
    figures = {name: value for name, value in values.items() if name not in NOT_FIGURES}
    protocol, acceptance = dict(values["protocol"]), tuple(values.get("acceptance_by_slot") or ())
    intervals = {name: tuple(limits) for name, limits in (values.get("intervals") or {}).items()}
    if lacking := [name for name in REQUIRED if protocol.get(name) in (None, "")]:
        raise ValueError(f"`metrics` of {data!r} have a protocol without `{lacking[0]}`: add it.")
    for known, names in ((PROTOCOL, protocol), (FIGURES, figures), (figures, intervals)):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(
                f"`metrics` of {data!r} have `{unknown[0]}`, which is no figure of real decoding: a card takes "
                f"{', '.join(FIGURES)}."
            )
    limits = [(f"intervals {name}", limit) for name, pair in intervals.items() for limit in pair]
    for name, value in [*figures.items(), *(("acceptance_by_slot", share) for share in acceptance), *limits]:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"`metrics` of {data!r} have `{name}` = {value}: leave out what was not measured.")
    task = values.get("benchmark_task")
    if task is not None and not (is_hub_id(data) and "tau" in figures and re.fullmatch(r"[\w.-]+", str(task))):
        raise ValueError(
            f"`benchmark_task` is {task!r} beside the data set {data!r}: it is a task in the `eval.yaml` of a "
            "benchmark on the Hub (`owner/name`) that ranks drafts by tau, which has to be measured."
        )
    return DecodingResult(" ".join(data.split()), protocol, figures, intervals, acceptance, task)


def model_index(results: list[DecodingResult]) -> list[EvalResult]:
    """Entries of a card's `model-index`: tau and speed-up for each data set and protocol."""
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


def benchmark_entries(results: list[DecodingResult]) -> list[EvalResultEntry]:
    """Entries of an evaluation file (`.eval_results/*.yaml`): tau by benchmark and protocol. The Hub puts it on the
    leaderboard of the data set's task. One of answers' quality is no place for a draft's tau, so only results that
    name the task that ranks it have an entry."""
    return [
        EvalResultEntry(
            dataset_id=result.data,
            task_id=result.benchmark_task,
            value=round(float(result.figures["tau"]), 4),
            notes=result.protocol_text,
        )
        for result in results
        if result.benchmark_task is not None
    ]


def _data_type(data: str) -> str:
    """The Hub's id of a data set, or a short form of its name."""
    return data if is_hub_id(data) else re.sub(r"[^\w.]+", "-", data.lower()).strip("-") or "data"
