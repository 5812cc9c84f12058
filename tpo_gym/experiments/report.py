"""Writes the report: the paper's numbers beside ours, as Markdown and as one HTML file with the figures in it."""

from __future__ import annotations

import base64
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tpo_gym.experiments.experiment import Claim, Experiment, Figure
from tpo_gym.experiments.figures import Results, draw
from tpo_gym.experiments.run import versions
from tpo_gym.experiments.statistics import Estimate, estimate, load_cell, verdict

HEADER = ("Panel", "Method", "Quantity", "Paper", "Ours", "95 % interval", "IQM", "Seeds", "Verdict")
STORED_POINTS = 100
"""Points per curve and seed in the compact files."""
_GUIDE = """Intervals are percentile-bootstrap intervals over seeds of the mean curve's number; "IQM" is the
interquartile mean over seeds. Verdicts: **inside**: the paper's number lies in our interval; **ordering kept**: it does
not, but the method stands to every other method of the panel as in the paper; **not**: neither. "never": the mean curve
did not get there within the run. Errors of rollout batches are those of the policy that sampled them."""


@dataclass(frozen=True)
class Section:
    """What the report says of an experiment."""

    experiment: Experiment
    results: Results
    figures: list[tuple[Figure, Path]]
    same_size: bool
    """Whether the runs have the paper's size."""
    changed: Sequence[str] = ()
    """Overrides, as on the command line."""


def gather(experiment: Experiment, out: Path) -> Results:
    """All finished runs of an experiment."""
    loaded = {(cell.panel, cell.method): load_cell(out, cell) for cell in experiment.cells()}
    return {key: curves for key, curves in loaded.items() if curves is not None}


def write(sections: Sequence[Section], out: Path, command: str, seconds: float) -> list[Path]:
    """Write ``report.md``, ``report.html`` and a compact file of curves per experiment; returns the files."""
    out.mkdir(parents=True, exist_ok=True)
    lines = ["# The paper's experiments, recomputed", "", *_facts(command, seconds), "", _GUIDE, ""]
    for section in sections:
        lines += _section_lines(section, out)
    text = "\n".join(lines) + "\n"
    files = [out / "report.md", out / "report.html"]
    files[0].write_text(text, encoding="utf-8")
    files[1].write_text(_as_html(text, out), encoding="utf-8")
    for section in sections:
        if section.results:
            files.append(_store(section, out / "curves"))
    return files


def make_section(experiment: Experiment, out: Path, same_size: bool, changed: Sequence[str] = ()) -> Section:
    """Load an experiment's runs and draw its figures."""
    results = gather(experiment, out)
    return Section(experiment, results, draw(experiment, results, out / "figures"), same_size, changed)


def _facts(command: str, seconds: float) -> list[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    named = ", ".join(f"{name} {number}" for name, number in versions().items())
    return [
        f"Command: `{command}`.",
        f"Machine: {cores} CPU cores ({platform.machine()}); {named}.",
        f"Wall time of this call: {seconds / 60:.1f} minutes (finished runs of earlier calls are not run again).",
    ]


def _section_lines(section: Section, out: Path) -> list[str]:
    experiment, results = section.experiment, section.results
    number = re.fullmatch(r"[\d.]+", experiment.section)
    place = f" ({'section' if number else 'appendix'} {experiment.section})" if experiment.section else ""
    lines = [f"## {experiment.title}: `{experiment.name}`{place}", ""]
    if section.changed:
        lines += ["Changed settings: " + ", ".join(f"`{text}`" for text in section.changed) + ".", ""]
    if not section.same_size:
        lines += ["Smaller than in the paper: only the ordering of the methods can be compared.", ""]
    if not results:
        return [*lines, "No run is finished.", ""]
    rows = _claim_rows(section) + _other_rows(section)
    shown = range(0 if any(row[0] for row in rows) else 1, len(HEADER))  # without the panel where there is but one
    for cells in (HEADER, ("---", "---", "---", *["---:"] * 5, "---"), *rows):
        lines.append("| " + " | ".join(cells[i] for i in shown) + " |")
    lines.append("")
    missing = [f"{c.method} ({c.panel})" if c.panel else c.method for c in experiment.cells()
               if (c.panel, c.method) not in results]  # fmt: skip
    if missing:
        lines += ["Not run: " + "; ".join(missing) + ".", ""]
    hours = sum(sum(curves.seconds) for curves in {id(c): c for c in results.values()}.values()) / 3600
    lines += [f"Time of these runs, one thread each: {hours:.1f} hours.", ""]
    lines += [f"* {note}" for note in experiment.notes] + ([""] if experiment.notes else [])
    for figure, file in section.figures:
        label = f"Figure {figure.number} of the paper" if figure.number != "ours" else "Figure"
        lines += [f"![{label}]({file.relative_to(out)})", "", f"*{label}. {figure.caption}*", ""]
    return lines


def _claim_rows(section: Section) -> list[tuple[str, ...]]:
    experiment, results = section.experiment, section.results
    claims = [c for c in experiment.claims if (c.panel, c.method) in results]
    claims = [c for c in claims if c.statistic != "at" or c.where <= results[c.panel, c.method].x[-1]]
    estimates = {claim: estimate(results[claim.panel, claim.method], claim) for claim in claims}
    rows = []
    for claim in claims:
        result = verdict(claim, estimates, claims, section.same_size)
        rows.append(_row(claim, estimates[claim], _number(claim, claim.value, claim.relation), result))
    return rows


def _other_rows(section: Section) -> list[tuple[str, ...]]:
    """Final values of what the paper gives no number for."""
    claimed = {(claim.panel, claim.method) for claim in section.experiment.claims}
    rows = []
    for (panel, method), curves in section.results.items():
        if (panel, method) not in claimed:
            metric = next(name for name in (*section.experiment.metric_labels, "error") if name in curves.metrics)
            claim = Claim(panel, method, "final", float("nan"), metric=metric)
            rows.append(_row(claim, estimate(curves, claim), "", ""))
    return rows


def _row(claim: Claim, ours: Estimate, paper: str, result: str) -> tuple[str, ...]:
    where = "" if claim.metric == "error" else f"{claim.metric}, "
    quantity = {
        "final": f"{where}final",
        "steps": f"{where}updates to {claim.where:.0%}",
        "at": f"{where}at update {claim.where:,.0f}",
    }[claim.statistic]
    interval = "one seed" if ours.n_seeds < 2 else f"{_number(claim, ours.low)} to {_number(claim, ours.high)}"
    robust = "" if np.isnan(ours.robust) else _number(claim, ours.robust)
    value = _number(claim, ours.value)
    return (claim.panel, claim.method, quantity, paper, value, interval, robust, str(ours.n_seeds), result)


def _number(claim: Claim, value: float, relation: str = "=") -> str:
    sign = "" if relation == "=" else relation
    if np.isinf(value):
        return "never"
    if claim.statistic == "steps":
        return f"{sign}{value:,.0f}"
    if claim.metric != "error":
        return f"{sign}{value:.3g}"
    return f"{sign}{100 * value:.3g} %"


def _as_html(text: str, out: Path) -> str:
    """The Markdown text as one HTML page that holds its figures."""
    from markdown import markdown  # type: ignore[import-untyped]

    body = markdown(text, extensions=["tables"])

    def inline(match: re.Match[str]) -> str:
        data = base64.b64encode((out / match.group(1)).read_bytes()).decode()
        return f'src="data:image/png;base64,{data}"'

    body = re.sub(r'src="([^":]+\.png)"', inline, body)
    style = (
        "body{font:16px/1.5 sans-serif;max-width:70em;margin:2em auto;padding:0 1em}"
        "table{border-collapse:collapse;font-size:90%}td,th{padding:.2em .7em;border-bottom:1px solid #ccc}"
        "img{max-width:100%}"
    )
    head = f'<meta charset="utf-8"><title>The paper\'s experiments</title><style>{style}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _store(section: Section, folder: Path) -> Path:
    """Mean and standard error of every curve, and each seed's curve at up to ``STORED_POINTS`` points."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    for (panel, method), curves in section.results.items():
        name = "/".join(part for part in (panel, method) if part)
        kept = np.unique(np.linspace(0, len(curves.x) - 1, STORED_POINTS).round().astype(int))
        arrays[f"{name}/x"], arrays[f"{name}/seeds"] = curves.x, np.array(curves.seeds)
        arrays[f"{name}/x_each"] = curves.x[kept]
        for metric, values in curves.metrics.items():
            mean, error = curves.mean_and_error(metric)
            arrays[f"{name}/{metric}/mean"], arrays[f"{name}/{metric}/se"] = mean.astype("f4"), error.astype("f4")
            arrays[f"{name}/{metric}/each"] = values[:, kept].astype("f4")
    file = folder / f"{section.experiment.name}.npz"
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return file
