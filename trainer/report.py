"""A folder that shows a trained draft: the numbers of real decoding as Markdown and JSON, and plots."""

import json
import os
from pathlib import Path

from ..modeling.atomic_save import staged_directory
from .decoding_report import DecodingReport, decoding_table, without_nan

REPORT_NAME = "report"
LOSS, ACCEPTANCE, LENGTHS, ROUND = "loss.png", "acceptance_by_slot.png", "accepted_lengths.png", "round_time.png"
CAPTIONS = {
    LOSS: "Loss over training",
    ACCEPTANCE: "Acceptance by slot of the block",
    LENGTHS: "Tokens committed by a round",
    ROUND: "Where the time of a round goes",
}
BLUE, ORANGE, GREEN, GREY = "#3b6ea8", "#d9822b", "#5a9e6f", "#8a8a8a"
PART_COLOURS = {"target": BLUE, "draft": ORANGE, "rest": GREY}


def write_report(
    folder: str | os.PathLike,
    log_history: list[dict],
    reports: dict[int, DecodingReport],
    command: str | None = None,
) -> Path:
    """Writes `report.md`, `report.json` and the plots they name; files of an earlier report are replaced.

    Args:
        folder: made if absent.
        log_history: `trainer.state.log_history`, for the loss curve; empty for a draft that was not trained here.
        reports: by served block size, of one measurement, as [`fastest_block_size`] returns them.
        command: what to run to measure this again.

    Returns:
        The path of `report.md`.

    Raises:
        ValueError: if there is no report.
    """
    if not reports:
        raise ValueError("`reports` is empty: a report shows at least one measurement.")
    measured = list(reports.values())
    plots = {ACCEPTANCE: _acceptance(measured), LENGTHS: _lengths(measured), ROUND: _round_time(measured)}
    if any("loss" in entry for entry in log_history):
        plots = {LOSS: _loss(log_history)} | plots
    text = ["# Decoding report", decoding_table(measured)]
    if command is not None:
        text.append(f"Measured by:\n\n```\n{command}\n```")
    text += [f"![{CAPTIONS[name]}]({name})" for name in plots]
    values = {"command": command, "log_history": log_history, "reports": [report.to_dict() for report in measured]}
    with staged_directory(folder) as staging:
        (staging / f"{REPORT_NAME}.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
        (staging / f"{REPORT_NAME}.json").write_text(
            json.dumps(without_nan(values), indent=2) + "\n", encoding="utf-8"
        )
        for name, figure in plots.items():
            figure.savefig(staging / name, dpi=150)
    return Path(folder) / f"{REPORT_NAME}.md"


def _axes(xlabel: str, ylabel: str, height: float = 3.6):
    """A figure and its one pair of axes. Made without pyplot, so no global state and no display is touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


def _shades(count: int) -> list:
    """One colour for each block size, the longest block darkest."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("blocks", ["#a9c4e0", BLUE, "#1d3b5f"])
    return [BLUE] if count == 1 else [colours(i / (count - 1)) for i in range(count)]


def _loss(log_history: list[dict]):
    figure, axes = _axes("optimizer step", "loss (weighted cross-entropy, nats)")
    for key, label, style in (
        ("loss", "training", {"color": BLUE}),
        ("eval_loss", "held out", {"color": ORANGE, "marker": "o"}),
    ):
        points = [(entry["step"], entry[key]) for entry in log_history if key in entry]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, linewidth=1.8, markersize=4, **style)
    if len(axes.lines) > 1:
        axes.legend(frameon=False)
    axes.set_xlim(left=0)
    return figure


def _acceptance(reports: list[DecodingReport]):
    figure, axes = _axes("slot of the block", "rounds that accept the slot (%)")
    for report, colour in zip(reports, _shades(len(reports)), strict=True):
        shares = [100 * share for share in report.acceptance_by_slot]
        label = f"block of {report.block_size}, tau {report.tau:.2f}"
        axes.plot(
            range(1, report.block_size), shares, color=colour, marker="o", linewidth=1.8, markersize=4, label=label
        )
    axes.set_ylim(0, 100)
    axes.set_xticks(range(1, max(report.block_size for report in reports)))
    axes.legend(frameon=False)
    return figure


def _lengths(reports: list[DecodingReport]):
    figure, axes = _axes("tokens committed by a round", "% of rounds")
    width = 0.8 / len(reports)
    for i, (report, colour) in enumerate(zip(reports, _shades(len(reports)), strict=True)):
        rounds = len(report.accepted_lengths)
        shift = (i - (len(reports) - 1) / 2) * width
        places = [length + shift for length in report.histogram]
        shares = [100 * count / max(rounds, 1) for count in report.histogram.values()]
        label = f"block of {report.block_size}, {rounds} rounds"
        axes.bar(places, shares, width * 0.92, color=colour, label=label)
    axes.set_xticks(range(1, max(report.block_size for report in reports) + 1))
    axes.legend(frameon=False)
    return figure


def _round_time(reports: list[DecodingReport]):
    bars = {f"block of {report.block_size}": report.round_seconds for report in reports}
    if reports[0].plain_tokens_per_second:
        bars = {"plain step": {"target": reports[0].plain_step_seconds}} | bars
    figure, axes = _axes("time (ms)", "", height=1.3 + 0.45 * len(bars))
    for place, parts in enumerate(bars.values()):
        left = 0.0
        for part, seconds in parts.items():
            axes.barh(place, 1e3 * seconds, 0.6, left=left, color=PART_COLOURS[part])
            left += 1e3 * seconds
    axes.set_yticks(range(len(bars)), bars)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.invert_yaxis()
    labels = {"target": "target forward", "draft": "draft forward", "rest": "the loop's own work"}
    handles = [axes.barh(0, 0, color=colour, label=labels[part]) for part, colour in PART_COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    return figure
