"""What calibrating a confidence head changed: temperatures, calibration errors before and after, reliability."""

from dataclasses import asdict, dataclass

from .decoding_report import markdown_table, without_nan

BINS, INTERVAL = 15, 0.95  # of a calibration error; level of its bootstrap interval


@dataclass
class ReliabilityBins:
    """One slot's test rounds by survival, in equal bins of [0, 1]: their number, mean survival and the share that was
    accepted; empty bins are NaN."""

    rounds: list[int]
    confidence: list[float]
    accepted: list[float]


@dataclass
class Reliability:
    """How well survival matches acceptance on the test rounds: the expected calibration error of the survival up to
    each slot, their mean with its `interval` (bootstrap percentiles, prompts resampled), and the bins of each slot."""

    ece_by_slot: list[float]
    mean_ece: float
    interval: tuple[float, float]
    bins: list[ReliabilityBins]


@dataclass
class CalibrationReport:
    """Temperatures and what they changed.

    Attributes:
        temperatures: one a slot, for `confidence_temperatures` of the draft's config.
        before, after: the test rounds with all temperatures 1, and with these.
        perfect_ece: mean ECE that a head that is exactly right would have, on as many rounds with the same survival.
        fit_prompts, fit_rounds, test_prompts, test_rounds: how much was decoded.
        labelled: test rounds that have a label, by slot; `accepted`: the share of these that was accepted.
        max_new_tokens, do_sample, dtype: of the answers. Acceptance differs between sampling and greedy decoding, so
            temperatures are right for the one they were fitted on.
    """

    temperatures: list[float]
    before: Reliability
    after: Reliability
    perfect_ece: float
    fit_prompts: int
    fit_rounds: int
    test_prompts: int
    test_rounds: int
    labelled: list[int]
    accepted: list[float]
    max_new_tokens: int
    do_sample: bool
    dtype: str

    def metrics(self) -> dict[str, float]:
        """The few numbers that a log or a card shows."""
        return {
            "ece_before": self.before.mean_ece,
            "ece_after": self.after.mean_ece,
            "ece_after_low": self.after.interval[0],
            "ece_after_high": self.after.interval[1],
            "calibration_rounds": float(self.test_rounds),
        }

    def table(self) -> str:
        """By slot: labelled rounds, acceptance, ECE before and after, temperature; then the mean with its interval."""
        header = ("drafted token", "rounds", "accepted", "ECE before", "ECE after", "temperature")
        columns = (self.labelled, self.accepted, self.before.ece_by_slot, self.after.ece_by_slot, self.temperatures)
        rows = [
            (str(slot), str(rounds), f"{accepted:.1%}", f"{before:.4f}", f"{after:.4f}", f"{temperature:.3f}")
            for slot, (rounds, accepted, before, after, temperature) in enumerate(zip(*columns, strict=True), 1)
        ]
        rows.append(("mean", "", "", _with_interval(self.before), _with_interval(self.after), ""))
        return markdown_table(header, rows)

    def summary(self) -> str:
        """What the table was measured on, as text."""
        kind = "sampled" if self.do_sample else "greedy"
        return (
            f"Fitted on {self.fit_rounds} rounds of {self.fit_prompts} prompts; ECE ({BINS} bins, of the survival up "
            f"to each token) on {self.test_rounds} rounds of {self.test_prompts} other prompts, {kind}, {self.dtype}, "
            f"answers up to {self.max_new_tokens} tokens. In brackets: {INTERVAL:.0%} bootstrap interval, prompts "
            f"resampled. A head that is exactly right would measure {self.perfect_ece:.4f} on so many rounds."
        )

    def to_dict(self) -> dict:
        """Everything, for JSON; NaN becomes `None`."""
        return without_nan({"metrics": self.metrics()} | asdict(self))


def _with_interval(reliability: Reliability) -> str:
    low, high = reliability.interval
    return f"{reliability.mean_ece:.4f} [{low:.4f}, {high:.4f}]"
