"""A picture of a held-out study: training by step, and each learning rate on the test questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from tpo_gym.curves import smooth
from tpo_gym.llm.study import Run

# Colours of Okabe and Ito, the same for a method as in the paper's figures.
STYLES = {"target_po": ("TPO", "#0072B2", "-", "o"), "grpo": ("GRPO", "#009E73", "--", "s")}
SMOOTH = 5
"""Steps that a training curve averages."""


def draw(report: dict[str, Any], out: Path) -> Path:
    """Draw the study in ``out`` from its report and the logs of its runs; returns ``<out>/study.png``."""
    figure, (training, test) = plt.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    for method, cell in report["chosen"].items():
        label, colour, dashes, _ = STYLES[method]
        runs = [Run(method, cell["learning_rate"], seed) for seed in range(report["seeds"])]
        curves = np.stack([_exact_matches(out, run) for run in runs])
        mean, error = curves.mean(0), curves.std(0) / np.sqrt(len(curves))
        steps = np.arange(1, len(mean) + 1)
        training.plot(steps, mean, dashes, color=colour, label=f"{label}, {cell['learning_rate']:g}")
        training.fill_between(steps, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)
    training.set(title="Training questions, chosen learning rates", xlabel="step", ylabel="exact matches, sampled")
    _draw_test(report, test)
    for axis in (training, test):
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.supxlabel(
        f"Left: means over {report['seeds']} seeds, ± standard error, running means over {SMOOTH} steps. "
        "Right: each seed, and the mean with its bootstrap interval.",
        fontsize=8,
    )
    file = out / "study.png"
    figure.savefig(file, dpi=130, metadata={"Software": None})
    plt.close(figure)
    return file


def _exact_matches(out: Path, run: Run) -> np.ndarray:
    log = json.loads((out / "runs" / run.name / "log.json").read_text())
    key = "rewards/exact_match/mean"
    return smooth(np.array([entry[key] for entry in log if key in entry]), SMOOTH)


def _draw_test(report: dict[str, Any], axis: Axes) -> None:
    rates = sorted({cell["learning_rate"] for cell in report["cells"]})
    for i, (method, (label, colour, _, marker)) in enumerate(STYLES.items()):
        cells = [cell for cell in report["cells"] if cell["method"] == method]
        x = np.array([rates.index(cell["learning_rate"]) for cell in cells]) + 0.16 * i - 0.08
        for place, cell in zip(x, cells, strict=True):
            axis.scatter([place - 0.05] * len(cell["test"]), cell["test"], s=12, color=colour, alpha=0.5, linewidths=0)
        means = np.array([cell["interval"]["mean"] for cell in cells])
        ends = np.array([[cell["interval"][end] for end in ("low", "high")] for cell in cells]).reshape(-1, 2).T
        axis.errorbar(x, means, np.abs(ends - means), fmt=marker, color=colour, capsize=3, label=label)
    axis.axhline(report["start"]["test"], color="#555555", linestyle=":", label="before training")
    axis.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axis.set(title="Test questions", xlabel="learning rate", ylabel="exact matches, sampled")
