"""Draws the paper's figures from finished runs: means with shaded standard errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from tpo_gym.curves import smooth
from tpo_gym.experiments.experiment import Experiment, Figure
from tpo_gym.experiments.statistics import Curves
from tpo_gym.experiments.surplus import BIN_NAMES

Results = Mapping[tuple[str, str], Curves]
"""Curves by panel and method."""

# Colours of Okabe and Ito, told apart by every kind of colour vision; dashes tell them apart in print. A variant has
# its method's colour.
STYLES: dict[str, tuple[str, str]] = {
    "TPO": ("#0072B2", "-"),
    "TPO (1 epoch)": ("#0072B2", ":"),
    "TPO (no anchor)": ("#0072B2", "--"),
    "TPO, decay": ("#0072B2", "--"),
    "TPO ratio": ("#D55E00", "-"),
    "TPO ratio, decay": ("#D55E00", "--"),
    "GRPO": ("#009E73", "-"),
    "GRPO (no KL)": ("#009E73", ":"),
    "GRPO (masked)": ("#009E73", "--"),
    "GRPO, decay": ("#009E73", "--"),
    "DG": ("#E69F00", "--"),
    "DG (4 epochs)": ("#E69F00", ":"),
    "PPO": ("#555555", "-."),
    "PG": ("#CC79A7", "-"),
    "Group PG": ("#56B4E9", "--"),
    "CE": ("#000000", ":"),
}


def draw(experiment: Experiment, results: Results, folder: Path) -> list[tuple[Figure, Path]]:
    """Draw all figures of an experiment that there are runs for; returns them with their files."""
    files = []
    for figure in experiment.figures:
        chosen = _chosen(figure, results)
        if not chosen:
            continue
        canvas = _KINDS[figure.kind](experiment, figure, chosen)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{experiment.name}-{figure.number}.png"
        canvas.savefig(file, dpi=150, metadata={"Software": None})
        plt.close(canvas)
        files.append((figure, file))
    return files


def _chosen(figure: Figure, results: Results) -> Results:
    return {
        (panel, method): curves
        for (panel, method), curves in results.items()
        if (figure.panels is None or panel in figure.panels)
        and (figure.methods is None or method in figure.methods)
        and any(metric in curves.metrics for metric in figure.metrics)
    }


def _curve(axes: Axes, curves: Curves, figure: Figure, metric: str, label: str, colour: Any, dashes: str) -> None:
    values = smooth(curves.metrics[metric], figure.smooth)
    mean = values.mean(0)
    error = values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.zeros_like(mean)
    low, high = mean - error, mean + error
    if figure.log:
        mean, low, high = (np.maximum(line, figure.floor) for line in (mean, low, high))
    axes.plot(curves.x, mean, dashes, color=colour, linewidth=1.6, label=label)
    axes.fill_between(curves.x, low, high, color=colour, alpha=0.18, linewidth=0)


def _finish(axes: Axes, figure: Figure, metric_label: str, title: str = "", x_label: str = "update") -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(metric_label)
    axes.set_title(title, fontsize=10)
    if figure.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0.0)
    _clean(axes)


def _clean(axes: Axes) -> None:
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _grid(
    n: int, columns: int, height: float = 2.9, share: Literal["none", "row"] = "none"
) -> tuple[Canvas, list[Axes]]:
    columns = min(n, columns)
    rows = -(-n // columns)
    width = {1: 5.2, 2: 8.4}.get(columns, 3.1 * columns)
    canvas, grid = plt.subplots(
        rows, columns, figsize=(width, height * rows), layout="constrained", squeeze=False, sharey=share
    )
    axes = list(grid.flat)
    for empty in axes[n:]:
        empty.set_visible(False)
    return canvas, axes[:n]


def _legend(canvas: Canvas, axes: list[Axes]) -> None:
    """One legend for all panels, over them."""
    entries: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    order = [label for label in STYLES if label in entries] + [label for label in entries if label not in STYLES]
    handles = [entries[label] for label in order]
    columns = min(len(order), 6, max(3, int(canvas.get_figwidth() // 1.6)))
    canvas.legend(handles, order, loc="outside upper center", ncols=columns, frameon=False)


def _panels(experiment: Experiment, figure: Figure, results: Results) -> Canvas:
    names = list(dict.fromkeys(panel for panel, _ in results))
    canvas, axes = _grid(len(names), figure.columns, share="row")
    metric = figure.metrics[0]
    for i, (panel, name) in enumerate(zip(axes, names, strict=True)):
        for (where, method), curves in results.items():
            if where == name:
                _curve(panel, curves, figure, metric, method, *STYLES[method])
        label = experiment.metric_labels.get(metric, metric) if i % figure.columns == 0 else ""
        _finish(panel, figure, label, name, "update" if i >= len(names) - figure.columns else "")
    _legend(canvas, axes)
    return canvas


def _metrics(experiment: Experiment, figure: Figure, results: Results) -> Canvas:
    canvas, axes = _grid(len(figure.metrics), 3, 3.2)
    for panel, metric in zip(axes, figure.metrics, strict=True):
        for (_, method), curves in results.items():
            if metric in curves.metrics:
                _curve(panel, curves, figure, metric, method, *STYLES[method])
        _finish(panel, figure, experiment.metric_labels.get(metric, metric))
    _legend(canvas, axes)
    return canvas


def _sweep(experiment: Experiment, figure: Figure, results: Results) -> Canvas:
    methods = list(dict.fromkeys(method for _, method in results))
    names = [panel.label for panel in experiment.panels if any((panel.label, m) in results for m in methods)]
    canvas, axes = _grid(len(methods) + 1, 4, 3.4)
    colours = plt.get_cmap("viridis")(np.linspace(0.9, 0.1, len(names)))
    metric = figure.metrics[0]
    label = experiment.metric_labels.get(metric, metric)
    for panel, method in zip(axes, methods, strict=False):
        for name, colour in zip(names, colours, strict=True):
            if (name, method) in results:
                _curve(panel, results[name, method], figure, metric, name, colour, "-")
        _finish(panel, figure, label, method)
        panel.legend(frameon=False, fontsize=8)
    for method in methods:
        finals = [results[name, method].mean_and_error(metric) for name in names if (name, method) in results]
        where = [i for i, name in enumerate(names) if (name, method) in results]
        mean, error = [float(m[-1]) for m, _ in finals], [float(e[-1]) for _, e in finals]
        colour, dashes = STYLES[method]
        axes[-1].errorbar(
            where, mean, error, color=colour, linestyle=dashes, marker="o", markersize=5, capsize=3, label=method
        )
    axes[-1].set_xticks(range(len(names)), names, rotation=20)
    axes[-1].set_title(f"final {label}", fontsize=10)
    axes[-1].legend(frameon=False, fontsize=8)
    _clean(axes[-1])
    return canvas


def _bars(experiment: Experiment, figure: Figure, results: Results) -> Canvas:
    methods = list(dict.fromkeys(method for _, method in results))
    names = list(dict.fromkeys(panel for panel, _ in results))
    canvas, (axes,) = _grid(1, 1, 3.4)
    canvas.set_figwidth(max(5.2, 1.1 * len(names) * len(methods) / 2 + 2))
    metric = figure.metrics[0]
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        where = [j + (i - (len(methods) - 1) / 2) * width for j, name in enumerate(names) if (name, method) in results]
        finals = [results[name, method].mean_and_error(metric) for name in names if (name, method) in results]
        mean, error = [100 * float(m[-1]) for m, _ in finals], [100 * float(e[-1]) for _, e in finals]
        colour, _ = STYLES[method]
        hatch = "///" if "(" in method else ""
        axes.bar(where, mean, width, yerr=error, color=colour, label=method, capsize=3, hatch=hatch, edgecolor="white")
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right" if len(names) > 1 else "center")
    axes.set_ylabel(f"final {experiment.metric_labels.get(metric, metric)} (%)")
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))  # where all is solved, not a magnified zero
    _clean(axes)
    axes.grid(axis="x", visible=False)
    _legend(canvas, [axes])
    return canvas


def _profile(experiment: Experiment, figure: Figure, results: Results) -> Canvas:
    canvas, (axes,) = _grid(1, 1, 3.4)
    metric = figure.metrics[0]
    for (_, method), curves in results.items():
        values = curves.metrics[metric][:, -1]  # (seeds, bins)
        count = np.isfinite(values).sum(0)
        mean = np.where(count > 0, np.nansum(values, 0) / np.maximum(count, 1), np.nan)
        spread = np.sqrt(np.nansum((values - mean) ** 2, 0) / np.maximum(count - 1, 1) / np.maximum(count, 1))
        colour, dashes = STYLES[method]
        axes.errorbar(
            range(len(mean)),
            mean,
            spread,
            color=colour,
            linestyle=dashes,
            marker="o",
            markersize=5,
            capsize=3,
            label=method,
        )
    axes.axhline(0, color="#999999", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(BIN_NAMES)), BIN_NAMES)
    axes.set_xlabel("wrong-class concentration")
    axes.set_ylabel(experiment.metric_labels.get(metric, metric))
    _clean(axes)
    _legend(canvas, [axes])
    return canvas


_KINDS = {"panels": _panels, "metrics": _metrics, "sweep": _sweep, "bars": _bars, "profile": _profile}
