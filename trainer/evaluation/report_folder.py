"""Report folders: how a draft decodes, or how it was calibrated, as Markdown and JSON with plots."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...hub_cards.plots import BLUE, GREY, ORANGE, acceptance_figure, new_axes, new_panels, shades
from ...modeling.saving.atomic_save import staged_directory
from .calibration_report import CalibrationReport
from .decoding_report import DecodingReport, column_names, decoding_table, without_nan

REPORT_NAME, CALIBRATION_NAME, RELIABILITY = "report", "calibration", "reliability.png"
LOSS, LEARNED, EXPERTS = "loss.png", "acceptance_in_training.png", "expert_load.png"
ACCEPTANCE, LENGTHS, ROUND = "acceptance_by_slot.png", "accepted_lengths.png", "round_time.png"
CAPTIONS = {
    LOSS: "Loss over training",
    LEARNED: "Teacher-forced acceptance over training",
    EXPERTS: "Load of the experts over training",
    ACCEPTANCE: "Acceptance by slot of the block",
    LENGTHS: "Tokens committed by a round",
    ROUND: "Where the time of a round goes",
}
TEXTS = tuple(f"{name}.{suffix}" for name in (REPORT_NAME, CALIBRATION_NAME) for suffix in ("md", "json"))
MIN_BIN_ROUNDS = 10  # of a point in the reliability plot
# The parts of a round: colour and label.
PARTS = {"target": (BLUE, "target forward"), "draft": (ORANGE, "draft forward"), "rest": (GREY, "the loop's own work")}


def write_report(
    folder: str | os.PathLike,
    log_history: list[dict],
    reports: dict[int | str, DecodingReport],
    command: str | None = None,
) -> Path:
    """Writes `report.md`, `report.json` and the plots they name; files of an earlier report are replaced.

    Args:
        log_history: `trainer.state.log_history`, for curves of the loss, of each slot's acceptance and of the experts'
            load, as far as these were logged; empty for a draft that was not trained here.
        reports: of one measurement, as [`fastest_block_size`] or [`compare_schedules`] returns them.
        command: what to run to measure this again.

    Returns:
        The path of `report.md`.

    Raises:
        ValueError: if there is no report.
    """
    if not reports:
        raise ValueError("`reports` is empty: a report shows at least one measurement.")
    measured = list(reports.values())
    curves = {LOSS: _loss(log_history), LEARNED: _learned(log_history), EXPERTS: _experts(log_history)}
    plots = {name: figure for name, figure in curves.items() if figure is not None}
    plots |= {ACCEPTANCE: _acceptance(measured), LENGTHS: _lengths(measured), ROUND: _round_time(measured)}
    text = [decoding_table(measured), *_measured_by(command), *(f"![{CAPTIONS[name]}]({name})" for name in plots)]
    values = {"command": command, "log_history": log_history, "reports": [report.to_dict() for report in measured]}
    path = _write(folder, REPORT_NAME, ["# Decoding report", *text], values, plots)
    _remove(folder, CAPTIONS.keys() - plots.keys())
    return path


def check_calibration(folder: str | os.PathLike, measured: Mapping, own: bool) -> list[str]:
    """What differs between the calibration that a folder holds and one that is to replace it, in words; `measured` is
    what [`write_calibration`] gets. Raises a `ValueError` if it is another draft's, unless the folder is the draft's
    `own`."""
    file = Path(folder, f"{CALIBRATION_NAME}.json")
    earlier = json.loads(file.read_text(encoding="utf-8")).get("measured") or {} if file.exists() else {}
    changed = [name for name in sorted(earlier) if earlier[name] != measured.get(name)]
    if "draft_sha256" in changed and not own:
        raise ValueError(f"`output`: {folder} holds the calibration of another draft. Choose another folder.")
    return [f"`{name}` was {earlier[name]}, now {measured.get(name)}" for name in changed]


def write_calibration(
    folder: str | os.PathLike, report: CalibrationReport, command: str | None = None, measured: Mapping | None = None
) -> Path:
    """Writes `calibration.md`, `calibration.json` and the reliability plot of what [`calibrate`] found; files of an
    earlier one are replaced. `command` is what to run to measure this again, `measured` what was measured and how.
    Returns the path of `calibration.md`."""
    text = [report.table(), report.summary(), *_measured_by(command), f"![Reliability]({RELIABILITY})"]
    values = {"command": command, "measured": measured} | report.to_dict()
    plots = {RELIABILITY: reliability_plot(report)}
    return _write(folder, CALIBRATION_NAME, ["# Confidence calibration", *text], values, plots)


def reliability_plot(report: CalibrationReport):
    """For each slot, the share of test rounds that was accepted over what the head said, in bins, before and after: a
    matplotlib `Figure`. A calibrated head lies on the diagonal. A marker's area shows a bin's rounds; bins with fewer
    than 10 are left out."""
    figure, panels = new_panels("cumulative confidence", "accepted (%)", columns=2)
    for axes, title, reliability in zip(panels, ("before", "after"), (report.before, report.after), strict=True):
        axes.plot([0, 1], [0, 100], color=GREY, linewidth=1, linestyle="--")
        for slot, (bins, colour) in enumerate(zip(reliability.bins, shades(len(reliability.bins)), strict=True), 1):
            filled = [i for i, count in enumerate(bins.rounds) if count >= MIN_BIN_ROUNDS]
            confidence = [bins.confidence[i] for i in filled]
            shares = [100 * bins.accepted[i] for i in filled]
            axes.plot(confidence, shares, color=colour, linewidth=1.2, label=f"slot {slot}")
            areas = [4 + 120 * bins.rounds[i] / sum(bins.rounds) for i in filled]
            axes.scatter(confidence, shares, areas, color=colour)
        axes.set_title(f"{title}: ECE {reliability.mean_ece:.3f}", fontsize=10)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 100)
    panels[0].legend(frameon=False, fontsize=8)
    return figure


def remove_reports(folder: str | os.PathLike) -> None:
    """Deletes what [`write_report`] and [`write_calibration`] left in a folder, before it gets other weights."""
    _remove(folder, (*TEXTS, *CAPTIONS, RELIABILITY))


def _remove(folder: str | os.PathLike, names: Iterable[str]) -> None:
    for name in names:
        Path(folder, name).unlink(missing_ok=True)


def _measured_by(command: str | None) -> list[str]:
    return [] if command is None else [f"Measured by:\n\n```\n{command}\n```"]


def _write(folder: str | os.PathLike, name: str, text: list[str], values: dict, plots: dict) -> Path:
    with staged_directory(folder) as staging:
        (staging / f"{name}.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
        (staging / f"{name}.json").write_text(json.dumps(without_nan(values), indent=2) + "\n", encoding="utf-8")
        for plot, figure in plots.items():
            figure.savefig(staging / plot, dpi=150)
    return Path(folder) / f"{name}.md"


def _curves(log_history: list[dict], ylabel: str, styles: dict[str, dict]):
    """A figure of logged values over steps, by their keys, each with matplotlib's settings of its line; `None` if none
    was logged."""
    figure, axes = new_axes("optimizer step", ylabel)
    for key, style in styles.items():
        if points := [(entry["step"], entry[key]) for entry in log_history if key in entry]:
            axes.plot(*zip(*points, strict=True), **({"linewidth": 1.8, "markersize": 4} | style))
    if not axes.lines:
        return None
    if len(axes.lines) > 1:
        axes.legend(frameon=False)
    axes.set_xlim(left=0)
    return figure


def _loss(log_history: list[dict]):
    styles = {
        "loss": {"label": "training", "color": BLUE},
        "eval_loss": {"label": "held out", "color": ORANGE, "marker": "o"},
    }
    return _curves(log_history, "loss", styles) if any("loss" in entry for entry in log_history) else None


def _learned(log_history: list[dict]):
    prefix = "acceptance_slot_"
    slots = sorted({int(key.removeprefix(prefix)) for entry in log_history for key in entry if key.startswith(prefix)})
    styles = {
        f"{prefix}{slot}": {"label": f"slot {slot}", "color": colour}
        for slot, colour in zip(slots, shades(len(slots)), strict=True)
    }
    return _curves(log_history, "blocks right up to the slot", styles)


def _experts(log_history: list[dict]):
    styles = {
        "busiest_expert": {"label": "busiest expert of any layer", "color": ORANGE},
        "least_used_expert": {"label": "least used", "color": BLUE},
    }
    return _curves(log_history, "tokens, in multiples of an even load", styles)


def _labels(reports: list[DecodingReport]) -> list[str]:
    title, names = column_names(reports)
    return [f"{title} {name}" for name in names] if title == "block size" else names


def _acceptance(reports: list[DecodingReport]):
    named = zip(_labels(reports), reports, strict=True)
    return acceptance_figure([(f"{name}, tau {report.tau:.2f}", report.acceptance_by_slot) for name, report in named])


def _lengths(reports: list[DecodingReport]):
    figure, axes = new_axes("tokens committed by a round", "% of rounds")
    width = 0.8 / len(reports)
    for i, (report, name, colour) in enumerate(zip(reports, _labels(reports), shades(len(reports)), strict=True)):
        rounds = len(report.accepted_lengths)
        shift = (i - (len(reports) - 1) / 2) * width
        places = [length + shift for length in report.histogram]
        shares = [100 * count / max(rounds, 1) for count in report.histogram.values()]
        axes.bar(places, shares, width * 0.92, color=colour, label=f"{name}, {rounds} rounds")
    axes.set_xticks(range(1, max(report.drafted for report in reports) + 2))
    axes.legend(frameon=False)
    return figure


def _round_time(reports: list[DecodingReport]):
    bars = {name: report.round_seconds for name, report in zip(_labels(reports), reports, strict=True)}
    if reports[0].plain_tokens_per_second:
        bars = {"plain step": {"target": reports[0].plain_step_seconds}} | bars
    figure, axes = new_axes("time (ms)", "", height=1.3 + 0.45 * len(bars))
    for place, parts in enumerate(bars.values()):
        left = 0.0
        for part, seconds in parts.items():
            axes.barh(place, 1e3 * seconds, 0.6, left=left, color=PARTS[part][0])
            left += 1e3 * seconds
    axes.set_yticks(range(len(bars)), bars)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.invert_yaxis()
    handles = [axes.barh(0, 0, color=colour, label=label) for colour, label in PARTS.values()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    return figure
