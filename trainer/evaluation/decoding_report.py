"""What decoding with a draft gains: acceptance, speed-up, time of a round, equality with greedy decoding."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

import numpy as np

from ...hub_cards.results import FEW_PROMPTS

MAX_TIE_SHARE = 0.01
RESAMPLES, LEVEL = 2000, 0.95  # of a bootstrap interval
OFF = "off"  # the confidence schedule that verifies every drafted token
GREEDY, TEMPERATURE_1 = "greedy", "sampling temperature 1"
HEADLINE = ("tau", "tau_without_loops", "looping_share", "speedup")
WITH_INTERVAL = ("tau", "tau_without_loops", "speedup")


def is_looping(token_ids: Sequence[int], n: int = 4, times: int = 4) -> bool:
    """Whether an answer loops: the same `n` tokens come `times` times in a row, without a gap, anywhere in it.

    Shorter periods that divide `n` (a single token repeated 16 times) are found as well. A looping answer is easy to
    draft, so acceptance lengths are reported without such answers, too. Raises a `ValueError` for impossible numbers.
    """
    if n < 1 or times < 2:
        raise ValueError(f"n must be at least 1 and times at least 2, got n={n} and times={times}.")
    run = 0
    for i in range(n, len(token_ids)):
        run = run + 1 if token_ids[i] == token_ids[i - n] else 0
        if run == n * (times - 1):
            return True
    return False


@dataclass
class Answer:
    """One decoded prompt.

    Attributes:
        prompt_length: in tokens.
        tokens: ids of the answer, a stop token included.
        accepted_lengths: tokens committed by each verification round, the bonus included; what follows a stop or the
            limit, and the prefill's token, are excluded.
        verified_lengths: tokens that the target verified in each round, the anchor included.
        seconds: wall-clock time of the whole call (`wall`) and of its parts: `prefill`, `target` (verification),
            `draft`, `rest` (the loop's own work).
        plain: by plain decoder, number of its answer's tokens and wall-clock seconds; empty if not compared.
        plain_step_seconds: one target forward on one token; `None` if not compared.
        difference: where the answer first differs from greedy `generate()`: `position` in the answer, `gap` between
            the two best scores of plain decoding there, infinite where one answer only goes on behind the other's
            end; `None` if equal or not compared.
    """

    prompt_length: int
    tokens: list[int]
    accepted_lengths: list[int]
    verified_lengths: list[int]
    seconds: dict[str, float]
    plain: dict[str, tuple[int, float]] = field(default_factory=dict)
    plain_step_seconds: float | None = None
    difference: dict[str, float] | None = None

    @cached_property
    def is_looping(self) -> bool:
        return is_looping(self.tokens)


@dataclass
class DecodingReport:
    """Answers of a draft and its target, and what follows from them. What no round or comparison defines is NaN.

    Attributes:
        block_size: as served; `drafted`: tokens that such a block drafts, one fewer if the anchor has a slot of its
            own.
        confidence_schedule: name of what chose the drafted tokens to verify; "off" if all were.
        max_new_tokens: limit of an answer.
        dtype, device, threads: of the target, for the plain decoders too; draft_dtype: of most of the draft's weights.
        tie_gap: logits this close are a tie.
        checks_equality: whether answers must equal greedy decoding: an fp32 target, greedy, compared.
        decoding: "greedy", or the settings of sampling.
        at_temperature_1: the same prompts, sampled at temperature 1 from the whole vocabulary; `None` if not measured.
    """

    block_size: int
    drafted: int
    confidence_schedule: str
    max_new_tokens: int
    dtype: str
    draft_dtype: str
    device: str
    threads: int
    tie_gap: float
    checks_equality: bool
    answers: list[Answer]
    decoding: str = GREEDY
    at_temperature_1: "DecodingReport | None" = None

    @property
    def accepted_lengths(self) -> list[int]:
        """Of all rounds of all answers."""
        return [length for answer in self.answers for length in answer.accepted_lengths]

    @property
    def tau(self) -> float:
        """The acceptance length: tokens committed by verification rounds / rounds."""
        return _mean(self.accepted_lengths)

    @property
    def tau_without_loops(self) -> float:
        """Tau over the answers that do not loop: loops are easily drafted."""
        return _mean([n for answer in self.answers if not answer.is_looping for n in answer.accepted_lengths])

    @property
    def rows_per_token(self) -> float:
        """Target tokens per committed token: tokens that verification ran through the target / tokens it committed; 1
        for plain decoding."""
        rows = sum(length for answer in self.answers for length in answer.verified_lengths)
        return _ratio(rows, sum(self.accepted_lengths))

    @property
    def looping_share(self) -> float:
        return _mean([answer.is_looping for answer in self.answers])

    @property
    def histogram(self) -> dict[int, int]:
        """Number of rounds by accepted length, 1 to `drafted` + 1."""
        counts = Counter(self.accepted_lengths)
        return {length: counts[length] for length in range(1, self.drafted + 2)}

    @property
    def acceptance_by_slot(self) -> list[float]:
        """Share of rounds that committed more than k tokens, for k = 1..`drafted`: sums to tau - 1. A round that did
        not verify the k-th drafted token counts as one that did not commit it."""
        lengths = self.accepted_lengths
        return [_mean([length > slot for length in lengths]) for slot in range(1, self.drafted + 1)]

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens a second with the draft, prefill included."""
        return _ratio(self._total_tokens, sum(answer.seconds["wall"] for answer in self.answers))

    @property
    def plain_tokens_per_second(self) -> dict[str, float]:
        """The same for each plain decoder; empty if not compared."""
        plain = [answer.plain for answer in self.answers]
        return {name: _ratio(sum(p[name][0] for p in plain), sum(p[name][1] for p in plain)) for name in plain[0]}

    @property
    def speedup(self) -> float:
        """Tokens a second with the draft / those of the faster plain decoder."""
        return _ratio(self.tokens_per_second, max(self.plain_tokens_per_second.values(), default=math.nan))

    def interval(self, name: str) -> tuple[float, float]:
        """The 95% interval of one of [`WITH_INTERVAL`]: percentiles of the bootstrap (Efron 1979) over prompts, whose
        rounds are alike, so that resampling rounds would make it too narrow. NaN for fewer than two prompts."""
        answers = self.answers
        if name == "tau_without_loops":
            answers = [answer for answer in answers if not answer.is_looping]
        if len(answers) < 2:
            return math.nan, math.nan
        draws = np.random.default_rng(0).integers(len(answers), size=(RESAMPLES, len(answers)))

        def sums(numbers: Iterable[float]) -> np.ndarray:
            """Of one number for each answer, over the answers of each draw."""
            return np.array([*numbers], dtype=float)[draws].sum(axis=1)

        with np.errstate(divide="ignore", invalid="ignore"):
            if name == "speedup":
                speed = sums(len(a.tokens) for a in answers) / sums(a.seconds["wall"] for a in answers)
                plain = [
                    sums(a.plain[k][0] for a in answers) / sums(a.plain[k][1] for a in answers)
                    for k in answers[0].plain
                ]
                values = speed / np.max(plain, axis=0) if plain else np.empty(0)
            else:
                lengths = [answer.accepted_lengths for answer in answers]
                values = sums(map(sum, lengths)) / sums(map(len, lengths))
        values = values[np.isfinite(values)]  # a draw of answers without a round has none
        tails = (50 * (1 - LEVEL), 50 * (1 + LEVEL))
        return tuple(np.percentile(values, tails).tolist()) if len(values) else (math.nan, math.nan)

    @property
    def round_seconds(self) -> dict[str, float]:
        """Mean time of a round's parts: `target` (verification), `draft`, `rest`."""
        rounds, parts = len(self.accepted_lengths), ("target", "draft", "rest")
        return {part: _ratio(sum(answer.seconds[part] for answer in self.answers), rounds) for part in parts}

    @property
    def plain_step_seconds(self) -> float:
        """Mean time of one target forward on one token."""
        return _mean([answer.plain_step_seconds for answer in self.answers if answer.plain_step_seconds])

    @property
    def differences(self) -> list[dict[str, float]]:
        """Answers that differ from greedy decoding: `prompt` (index), `position`, `gap`."""
        return [{"prompt": i} | a.difference for i, a in enumerate(self.answers) if a.difference is not None]

    @property
    def equal_to_greedy(self) -> bool | None:
        """Whether all answers are those of greedy `generate()`, but for ties on at most 1% of them; `None` if that
        cannot be asked: another dtype than fp32, sampling, not compared."""
        if not self.checks_equality:
            return None
        gaps = [difference["gap"] for difference in self.differences]
        return all(gap <= self.tie_gap for gap in gaps) and len(gaps) <= MAX_TIE_SHARE * len(self.answers)

    @property
    def _total_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    @property
    def protocol(self) -> dict[str, str | int]:
        """How this was measured: what must agree between numbers that are compared."""
        threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        schedule = {} if self.confidence_schedule == OFF else {"confidence_schedule": self.confidence_schedule}
        return {
            "decoding": self.decoding,
            "block_size": self.block_size,
            **schedule,
            "prompts": len(self.answers),
            "max_new_tokens": self.max_new_tokens,
            "batch_size": 1,
            "dtype": self.dtype,
            "draft_dtype": self.draft_dtype,
            "hardware": f"CPU ({threads})" if self.device == "cpu" else self.device,
        }

    def headline(self) -> dict:
        """What a model card shows, without what was not measured: a few of [`metrics`], their `intervals`, the
        `protocol` and `acceptance_by_slot`, ready for JSON."""
        metrics = self.metrics()
        headline = {name: metrics[name] for name in HEADLINE if not math.isnan(metrics[name])}
        limits = {name: [metrics[f"{name}_low"], metrics[f"{name}_high"]] for name in WITH_INTERVAL}
        if intervals := {name: pair for name, pair in limits.items() if not math.isnan(pair[0])}:
            headline["intervals"] = intervals
        if self.accepted_lengths:
            headline["acceptance_by_slot"] = self.acceptance_by_slot
        return headline | {"protocol": self.protocol}

    def metrics(self) -> dict[str, float]:
        """Flat numbers; the keys are always the same.

        `tau`, `tau_without_loops` and `speedup`, each with `_low` and `_high`, the limits of its [`interval`];
        `rows_per_token`; `looping_answers` (count), `looping_share`; `prompts`, `rounds`, `tokens`;
        `tokens_per_second`, `baseline_tokens_per_second` (the faster plain decoder); `target_share`, `draft_share`,
        `rest_share` of a round's time; `verification_steps`, `draft_steps`: a verification and a draft forward, in
        plain decoding steps; `differences`: answers unlike greedy `generate()`, `differences_at_ties` of them at a
        tie. What needs plain decoding is NaN without it, and so are limits of fewer than two prompts.
        """
        round_seconds = self.round_seconds
        whole = sum(round_seconds.values())
        gaps = [difference["gap"] for difference in self.differences]
        compared = bool(self.answers[0].plain)
        metrics = {
            "tau": self.tau,
            "tau_without_loops": self.tau_without_loops,
            "rows_per_token": self.rows_per_token,
            "looping_answers": sum(answer.is_looping for answer in self.answers),
            "looping_share": self.looping_share,
            "prompts": len(self.answers),
            "rounds": len(self.accepted_lengths),
            "tokens": self._total_tokens,
            "tokens_per_second": self.tokens_per_second,
            "baseline_tokens_per_second": max(self.plain_tokens_per_second.values(), default=math.nan),
            "speedup": self.speedup,
            **{f"{part}_share": _ratio(seconds, whole) for part, seconds in round_seconds.items()},
            "verification_steps": _ratio(round_seconds["target"], self.plain_step_seconds),
            "draft_steps": _ratio(round_seconds["draft"], self.plain_step_seconds),
            "differences": len(gaps) if compared else math.nan,
            "differences_at_ties": sum(gap <= self.tie_gap for gap in gaps) if compared else math.nan,
        }
        for name in WITH_INTERVAL:
            metrics[f"{name}_low"], metrics[f"{name}_high"] = self.interval(name)
        return {name: float(value) for name, value in metrics.items()}

    def table(self) -> str:
        """The numbers to read, as a Markdown table."""
        return decoding_table([self])

    def rows(self) -> dict[str, str]:
        """What is measured, by name, as text; [`decoding_table`] sets reports side by side."""
        m, plain, parts = self.metrics(), self.plain_tokens_per_second, self.round_seconds
        few = " (few: a rough measure)" if len(self.answers) < FEW_PROMPTS else ""

        def figure(name: str, unit: str = "") -> str:
            low, high = m[f"{name}_low"], m[f"{name}_high"]
            return f"{m[name]:.2f}{unit}" + ("" if math.isnan(low) else f" ({low:.2f} to {high:.2f})")

        rows = {
            "target": f"{self.dtype} on {self.device}, CPU threads: {self.threads}",
            "draft": self.draft_dtype,
            "decoding": self.decoding,
            "drafted tokens a block": str(self.drafted),
            "confidence schedule": self.confidence_schedule,
            "prompts; answer limit": f"{m['prompts']:.0f}{few}; {self.max_new_tokens} tokens",
            "tokens; rounds": f"{m['tokens']:.0f}; {m['rounds']:.0f}",
            "tau (tokens a round)": figure("tau"),
            "tau without looping answers": figure("tau_without_loops"),
            "target tokens per committed token": f"{m['rows_per_token']:.2f}",
            "looping answers": f"{m['looping_answers']:.0f} ({m['looping_share']:.0%})",
            "tokens/s with draft": f"{m['tokens_per_second']:.1f}",
        }
        rows |= {f"tokens/s, {name}": f"{speed:.1f}" for name, speed in plain.items()}
        if plain:
            rows[f"speed-up over {max(plain, key=plain.get)}"] = figure("speedup", "x")
        for part, seconds in parts.items():
            rows[f"a round: {part}"] = f"{1e3 * seconds:.2f} ms ({m[f'{part}_share']:.0%})"
        if plain:
            verdict = {True: "equal", False: "**not equal**", None: "not judged"}[self.equal_to_greedy]
            rows |= {
                "plain step": f"{1e3 * self.plain_step_seconds:.2f} ms",
                "verification in plain steps": f"{m['verification_steps']:.2f}",
                "draft forward in plain steps": f"{m['draft_steps']:.2f}",
                "answers unlike greedy": f"{m['differences']:.0f}, at ties {m['differences_at_ties']:.0f}: {verdict}",
            }
        if self.at_temperature_1 is not None:
            sampled = self.at_temperature_1.rows()
            rows["tau at temperature 1"] = sampled["tau (tokens a round)"]
        return rows

    def to_dict(self) -> dict:
        """Everything, for JSON; what is not finite becomes `None`."""
        derived = {
            "metrics": self.metrics(),
            "plain_tokens_per_second": self.plain_tokens_per_second,
            "equal_to_greedy": self.equal_to_greedy,
            "histogram": self.histogram,
            "acceptance_by_slot": self.acceptance_by_slot,
            "round_seconds": self.round_seconds,
            "plain_step_seconds": self.plain_step_seconds,
            "differences": self.differences,
        }
        sampled = None if self.at_temperature_1 is None else self.at_temperature_1.to_dict()
        return without_nan(derived | asdict(self) | {"at_temperature_1": sampled})


def column_names(reports: Sequence[DecodingReport]) -> tuple[str, list[str]]:
    """What tells the reports of one measurement apart, and its value in each: the confidence schedule if they differ
    in that, else the block size."""
    schedules = [report.confidence_schedule for report in reports]
    if len(set(schedules)) > 1:
        return "confidence schedule", schedules
    return "block size", [str(report.block_size) for report in reports]


def decoding_table(reports: Sequence[DecodingReport]) -> str:
    """Reports of one measurement side by side, a column for each, as a Markdown table."""
    rows = [report.rows() for report in reports]
    title, names = column_names(reports)
    header = (title, *names)
    return markdown_table(header, [(name, *(values[name] for values in rows)) for name in rows[0] if name != title])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up in a terminal too."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def _mean(values: Sequence[float]) -> float:
    return _ratio(sum(values), len(values))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def without_nan(value):
    """A tree of dicts and lists, ready for JSON: numbers that are not finite become `None`, tuples become lists."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
