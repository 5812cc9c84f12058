"""What the demo leaves behind: a table, a figure, the curves as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from tpo_gym.curves import smooth
from tpo_gym.demo.jobs import SETTINGS, TASKS, Result

HAVE_MATPLOTLIB = find_spec("matplotlib") is not None
HEADER = ("Task", "Method", "Interactions", "Final error", "Each seed", "Wall (s)", "CPU (s)")
BUDGET_NOTE = (
    "Budgets count environment interactions (every candidate of a group is counted) and are equal for all methods of a "
    "task."
)
# Colours of Okabe and Ito, told apart by every kind of colour vision; the dashes tell them apart in print.
_STYLES = {
    "TPO": ("#0072B2", "-"),
    "TPO ratio": ("#D55E00", "-"),
    "GRPO": ("#009E73", "--"),
    "PPO": ("#555555", "-."),
}


@dataclass(frozen=True)
class Row:
    """One method on one task."""

    task: str
    method: str
    runs: list[Result]

    def cells(self) -> tuple[str, ...]:
        """The table's row, one string per column of ``HEADER``."""
        errors = [run.final_error for run in self.runs]
        return (
            TASKS[self.task].title,
            self.method,
            f"{self.runs[0].interactions[-1]:,}",
            f"{np.mean(errors):.1%}",
            ", ".join(f"{error:.1%}" for error in errors),
            f"{np.mean([run.seconds for run in self.runs]):.0f}",
            f"{np.mean([run.cpu_seconds for run in self.runs]):.0f}",
        )


def rows(results: Sequence[Result]) -> list[Row]:
    """Results by task and method, in the order of ``SETTINGS``, seeds ascending."""
    table = []
    for task, method in SETTINGS:
        runs = sorted((r for r in results if (r.task, r.method) == (task, method)), key=lambda run: run.seed)
        if runs:
            table.append(Row(task, method, runs))
    return table


def terminal_tables(results: Sequence[Result]) -> list[Table]:
    """A table for each task, for the terminal."""
    tables: dict[str, Table] = {}
    for row in rows(results):
        if row.task not in tables:
            tables[row.task] = Table(title=f"[bold]{TASKS[row.task].title}[/bold]", title_justify="left")
            for i, name in enumerate(HEADER[1:]):
                tables[row.task].add_column(name, justify="right" if i else "left", no_wrap=i != 3)
        tables[row.task].add_row(*row.cells()[1:])
    return list(tables.values())


def machine() -> str:
    """The machine and the versions, without names."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "stable-baselines3", "gymnasium"))
    return f"{cores} CPU cores ({platform.machine()}), Python {platform.python_version()}, {packages}"


def save(results: Sequence[Result], folder: Path, command: str, workers: int, seconds: float) -> list[Path]:
    """Write ``demo.json``, ``demo.md`` and, with matplotlib, ``demo.png``; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / "demo.json", folder / "demo.md"]
    facts: dict[str, Any] = dict(command=command, machine=machine(), workers=workers, wall_seconds=round(seconds, 1))
    settings = [dict(task=task, method=method, settings=text) for (task, method), text in SETTINGS.items()]
    runs = [_rounded(run) for row in rows(results) for run in row.runs]
    head = json.dumps(dict(**facts, budget=BUDGET_NOTE, settings=settings), indent=1)
    lines = ",\n  ".join(json.dumps(run) for run in runs)  # a run a line, not a number a line
    files[0].write_text(f'{head[:-2]},\n "runs": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
    files[1].write_text(_markdown(results, facts), encoding="utf-8")
    if HAVE_MATPLOTLIB:
        files.append(folder / "demo.png")
        _draw(results, files[-1])
    return files


def _rounded(run: Result) -> dict[str, Any]:
    entry = asdict(run)
    entry["error"] = [round(value, 6) for value in run.error]
    rounded = {name: round(entry[name], 1) for name in ("seconds", "cpu_seconds")}
    return {**entry, **rounded, "final_error": round(run.final_error, 6)}


def _markdown(results: Sequence[Result], facts: dict[str, Any]) -> str:
    lines = ["# Result of the demo", "", f"Command: `{facts['command']}`.", f"Machine: {facts['machine']}."]
    cpu_minutes = sum(run.cpu_seconds for run in results) / 60
    lines += [
        f"Wall time: {facts['wall_seconds'] / 60:.1f} minutes with {facts['workers']} worker processes; "
        f"CPU time of all runs together: {cpu_minutes:.1f} minutes.",
        "",
    ]
    lines += [BUDGET_NOTE, "", "| " + " | ".join(HEADER) + " |", "|---|---|" + "---:|" * (len(HEADER) - 2)]
    lines += ["| " + " | ".join(row.cells()) + " |" for row in rows(results)]
    lines += ["", "Final error:", *(f"* {task.title}: {task.measure}." for task in TASKS.values())]
    lines += ["", "Settings:"]
    lines += [f"* {method}, {TASKS[task].title}: {text}." for (task, method), text in SETTINGS.items()]
    return "\n".join([*lines, "", "![error curves](demo.png)", ""])


def _draw(results: Sequence[Result], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

    tasks = list(dict.fromkeys(row.task for row in rows(results)))
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.6 * len(tasks), 4.2), layout="constrained", squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for row in rows(results):
            if row.task != task:
                continue
            colour, dashes = _STYLES[row.method]
            x = np.array(row.runs[0].interactions) / 1000
            width = 5 if task == "reversal" else 1
            curves = [smooth(np.array(run.error), width) for run in row.runs]
            for curve in curves:
                axis.plot(x, curve, color=colour, linewidth=0.8, alpha=0.5)
            axis.plot(x, np.mean(curves, 0), dashes, color=colour, linewidth=2.2, label=row.method)
        axis.set_title(TASKS[task].title, fontsize=11)
        axis.set_xlabel("interactions (thousands)")
        axis.set_ylabel("rollout error (exact match)" if task == "reversal" else "test error")
        axis.set_xlim(left=0)
        if task == "mnist":
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(FixedLocator([0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5, 1]))
            axis.yaxis.set_minor_locator(NullLocator())
            low, high = axis.get_ylim()
            axis.set_ylim(min(low, 0.028), high)  # a labelled line below the curves
        else:
            axis.set_ylim(-0.02, 1.02)
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.grid(alpha=0.25, which="both", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.supxlabel(
        "Thick: mean over seeds, thin: each seed. Rollout errors are running means over 5 batches.", fontsize=8
    )
    figure.savefig(file, dpi=130)
    plt.close(figure)
