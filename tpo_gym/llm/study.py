"""The held-out study: methods times learning rates times seeds, tuned alike, on one warmed-up model.

Every method gets the same grid. The learning rate of each is the one with the best mean score on *validation*
questions; what is reported are its exact matches on *test* questions. Neither were trained on.
Each run has a folder of its own; a second call does what is missing, and rewrites the report.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tpo_gym.llm.evaluate import Interval, bootstrap, evaluate, write_result
from tpo_gym.llm.settings import RunSettings

RESULT = "result.json"
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the study."""

    method: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Its folder."""
        return f"{self.method}-{self.learning_rate:g}-seed{self.seed}"


def plan(methods: Sequence[str], learning_rates: Sequence[float], seeds: int) -> list[Run]:
    """All runs: the same grid for each method, all of a seed before the next one."""
    return [Run(method, rate, seed) for seed in range(seeds) for method in methods for rate in learning_rates]


def study(
    settings: RunSettings,
    *,
    methods: Sequence[str] = ("target_po", "grpo"),
    learning_rates: Sequence[float] = (3e-5, 1e-4, 3e-4),
    seeds: int = 3,
    samples: int = 4,
    warmup_arguments: dict[str, Any] | None = None,
    say: Say = print,
) -> dict[str, Any]:
    """Carries out the runs that are missing and reports all.

    Args:
        settings: Task and training; ``output`` is the folder of the study, ``model`` the model to start from.
        methods: To compare.
        learning_rates: The grid, the same for each.
        seeds: Runs per cell, with seeds 0, 1, ...
        samples: Sampled completions per question in the evaluations; greedy ones are reported beside them.
        warmup_arguments: Of :func:`~tpo_gym.llm.warmup.warmup`, which makes the model if its folder has none; None:
            there is a model.
        say: Told what is being done.

    Returns:
        The report, as in ``<output>/study.json``; ``study.md`` has it as tables and, where there is matplotlib,
        ``study.png`` as a picture.

    Raises:
        ValueError: For no method, learning rate or seed.
    """
    runs = plan(methods, learning_rates, seeds)
    if not runs:
        raise ValueError("A study needs at least one method, one learning rate and one seed.")
    out = Path(settings.output)
    _same_settings(settings, out)
    # An interrupted warmup leaves a folder without a configuration.
    if warmup_arguments is not None and not (Path(settings.model) / "config.json").is_file():
        from tpo_gym.llm.warmup import warmup

        say(f"warming up {settings.model}")
        warmup(settings, **warmup_arguments)
    start = out / "start.json"
    if not start.is_file():
        write_result(_measure(settings, samples), start)
    for number, run in enumerate(runs, 1):
        folder = out / "runs" / run.name
        if (folder / RESULT).is_file():
            continue
        say(f"run {number} of {len(runs)}: {run.name}")
        _carry_out(settings, run, folder, samples)
    report = make_report(out, methods, learning_rates, seeds)
    write_result(report, out / "study.json")
    (out / "study.md").write_text(as_markdown(report))
    if find_spec("matplotlib") is not None:
        from tpo_gym.llm.study_figure import draw

        say(f"drawn: {draw(report, out)}")
    return report


def _same_settings(settings: RunSettings, out: Path) -> None:
    """Refuse to mix runs of different settings in one folder."""
    path = out / "settings.yaml"
    before = path.read_text() if path.is_file() else None
    settings.save(path)
    if before is not None and before != path.read_text():
        path.write_text(before)
        raise ValueError(f"{path} has other settings than these: take another output, or remove the folder.")


def _carry_out(settings: RunSettings, run: Run, folder: Path, samples: int) -> None:
    from tpo_gym.llm.train import train

    mine = dataclasses.replace(
        settings, method=run.method, learning_rate=run.learning_rate, seed=run.seed, output=str(folder)
    )
    train(mine)
    write_result(_measure(dataclasses.replace(mine, model=str(folder)), samples), folder / RESULT)


def _measure(settings: RunSettings, samples: int) -> dict[str, Any]:
    """Sampled and greedy answers to the held-out questions: half of them validate, half of them test."""
    sampled = evaluate(settings, samples=samples)
    greedy = evaluate(settings)
    return {
        "validation_score": sampled["per_question"]["score"][0::2],
        "test_exact": sampled["per_question"]["exact_match"][1::2],
        "test_exact_greedy": greedy["per_question"]["exact_match"][1::2],
        "examples": sampled["examples"],
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def make_report(out: Path, methods: Sequence[str], rates: Sequence[float], seeds: int) -> dict[str, Any]:
    """All cells, and each method at its own best learning rate."""
    start = json.loads((out / "start.json").read_text())
    report: dict[str, Any] = {
        "start": {"test": _mean(start["test_exact"]), "test_greedy": _mean(start["test_exact_greedy"])},
        "seeds": seeds,
        "cells": [],
        "chosen": {},
    }
    for method in methods:
        cells = [_cell(out, [Run(method, rate, seed) for seed in range(seeds)]) for rate in rates]
        report["cells"] += cells
        report["chosen"][method] = max(cells, key=lambda cell: _mean(cell["validation"]))
    return report


def _cell(out: Path, runs: Sequence[Run]) -> dict[str, Any]:
    results = [json.loads((out / "runs" / run.name / RESULT).read_text()) for run in runs]
    tests = [_mean(result["test_exact"]) for result in results]
    return {
        "method": runs[0].method,
        "learning_rate": runs[0].learning_rate,
        "validation": [_mean(result["validation_score"]) for result in results],
        "test": tests,
        "test_greedy": [_mean(result["test_exact_greedy"]) for result in results],
        "interval": (bootstrap(tests) if len(tests) > 1 else Interval(tests[0], float("nan"), float("nan")))._asdict(),
    }


def as_markdown(report: dict[str, Any]) -> str:
    """The report as two tables."""
    lines = [
        f"Exact matches on test questions, {report['seeds']} seeds; before training: {report['start']['test']:.3f} "
        f"sampled, {report['start']['test_greedy']:.3f} greedy.",
        "",
        "| method | learning rate, by validation | mean | 95 % interval over seeds | each seed | greedy, each seed |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(cell) for cell in report["chosen"].values()]
    lines += [
        "",
        "All cells:",
        "",
        "| method | learning rate | mean | interval | each seed | greedy |",
        "|" + "---|" * 6,
    ]
    lines += [_row(cell) for cell in report["cells"]]
    return "\n".join(lines) + "\n"


def _row(cell: dict[str, Any]) -> str:
    interval = cell["interval"]
    each, greedy = (", ".join(f"{value:.3f}" for value in cell[name]) for name in ("test", "test_greedy"))
    span = f"{interval['low']:.3f} to {interval['high']:.3f}"
    return f"| {cell['method']} | {cell['learning_rate']:g} | {interval['mean']:.3f} | {span} | {each} | {greedy} |"
