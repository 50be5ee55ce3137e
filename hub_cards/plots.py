"""The look of the plots, and acceptance by slot."""

from collections.abc import Sequence
from pathlib import Path

BLUE, ORANGE, GREY = "#3b6ea8", "#d9822b", "#8a8a8a"
LABEL_LENGTH = 60


def new_axes(xlabel: str, ylabel: str, height: float = 3.6):
    """A figure and its one pair of axes."""
    figure, [axes] = new_panels(xlabel, ylabel, height=height)
    return figure, axes


def new_panels(xlabel: str, ylabel: str, height: float = 3.6, columns: int = 1):
    """A figure and its axes, side by side. Made without pyplot, so no global state and no display is touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 + 2.4 * (columns - 1), height), layout="constrained")
    panels = figure.subplots(1, columns, squeeze=False, sharey=True)[0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_xlabel(xlabel)
    panels[0].set_ylabel(ylabel)
    return figure, panels


def shades(count: int) -> list:
    """One colour for each line, the last darkest."""
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("blocks", ["#a9c4e0", BLUE, "#1d3b5f"])
    return [BLUE] if count == 1 else [colours(i / (count - 1)) for i in range(count)]


def acceptance_figure(curves: Sequence[tuple[str, Sequence[float]]]):
    """How far rounds get: a matplotlib `Figure` of `curves`, each a label and the share of rounds that accept each
    drafted slot, from the first on."""
    figure, axes = new_axes("drafted token of the block", "rounds that accept the slot (%)")
    for (label, shares), colour in zip(curves, shades(len(curves)), strict=True):
        label = label[:LABEL_LENGTH].lstrip("_").replace("$", r"\$")  # text, neither hidden nor mathematics
        slots, heights = range(1, len(shares) + 1), [100 * share for share in shares]
        axes.plot(slots, heights, color=colour, marker="o", linewidth=1.8, markersize=4, label=label)
    axes.set_ylim(0, 100)
    axes.set_xticks(range(1, max(len(shares) for _, shares in curves) + 1))
    axes.legend(frameon=False)
    return figure


def write_acceptance_plot(path: Path, curves: Sequence[tuple[str, Sequence[float]]]) -> None:
    """Writes [`acceptance_figure`] as PNG: the same bytes for the same curves, whatever the user's own style."""
    from matplotlib import style

    with style.context("default"):
        acceptance_figure(curves).savefig(
            path, dpi=100, format="png", metadata={"Software": None}, pil_kwargs={"optimize": True}
        )
