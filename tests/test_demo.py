"""The demo: its smallest setting from the command line, and its parts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tpo_gym.demo import report
from tpo_gym.demo.display import Display
from tpo_gym.demo.jobs import SETTINGS, TASKS, Job, Result, make_model
from tpo_gym.demo.workers import Event, JobFailed, run_all


def results(seeds: int = 2) -> list[Result]:
    return [
        Result(task, method, seed, [100, 200], [0.5, 0.25 + seed / 10], 0.25 + seed / 10, 3.0, 2.0)
        for task, method in SETTINGS
        for seed in reversed(range(seeds))
    ]


@pytest.mark.slow
def test_quick_demo_writes_curves_figure_and_logs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tpo_gym.demo", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr

    document = json.loads((tmp_path / "demo.json").read_text())
    assert {(run["task"], run["method"]) for run in document["runs"]} == set(SETTINGS)
    for run in document["runs"]:
        task = TASKS[run["task"]]
        assert run["interactions"][-1] == task.quick_updates * task.per_update
        assert run["interactions"] == sorted(set(run["interactions"]))
        assert len(run["interactions"]) == len(run["error"])
        assert all(0 <= error <= 1 for error in run["error"])
        folder = tmp_path / run["task"] / run["method"].replace(" ", "-") / f"seed-{run['seed']}"
        assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    table = [line for line in (tmp_path / "demo.md").read_text().splitlines() if line.startswith("| ")]
    assert len(table) == 1 + len(SETTINGS)
    if report.HAVE_MATPLOTLIB:
        assert (tmp_path / "demo.png").read_bytes()[:4] == b"\x89PNG"
    assert f"--logdir {tmp_path}" in done.stdout
    assert "done   mnist    TPO" in done.stdout  # plain lines, since this is no terminal


@pytest.mark.slow
def test_a_failing_run_is_reported_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"(?s)TPO on no-such-task, seed 3, failed.*KeyError: 'no-such-task'"):
        list(run_all([Job("no-such-task", "TPO", 3, 100, tmp_path)], 1))


def test_help_and_bad_arguments() -> None:
    command = [sys.executable, "-m", "tpo_gym.demo"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0
    assert "--quick" in shown.stdout
    refused = subprocess.run([*command, "--seeds", "0"], capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "must be positive" in refused.stderr


def test_report_averages_over_seeds_in_order(tmp_path: Path) -> None:
    files = report.save(results(), tmp_path, "python -m tpo_gym.demo", 2, 90.0)
    assert (tmp_path / "demo.md") in files
    text = (tmp_path / "demo.md").read_text()
    assert "| Sparse token reversal, H=7 | TPO ratio | 200 | 30.0% | 25.0%, 35.0% | 3 | 2 |" in text
    assert "Wall time: 1.5 minutes" in text
    document = json.loads((tmp_path / "demo.json").read_text())
    assert [run["seed"] for run in document["runs"][:2]] == [0, 1]
    assert sum(table.row_count for table in report.terminal_tables(results())) == len(SETTINGS)


def test_display_in_a_pipe_prints_lines(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = [Job("mnist", "TPO", 0, 200, Path("unused"))]
    with Display(jobs, Console(force_terminal=False)) as display:
        for event in (Event(0), Event(0, 100, 0.5), None, Event(0, 200, 0.25, result=results(1)[0])):
            display.show(event)
    lines = capsys.readouterr().out.splitlines()
    assert "start  mnist    TPO       seed 0" in lines[0]
    assert "100%  done   mnist    TPO       seed 0: error 25.0%" in lines[-1]


def test_display_in_a_terminal_has_a_bar_per_running_job() -> None:
    jobs = [Job("mnist", "TPO", 0, 200, Path("unused")), Job("mnist", "PPO", 0, 200, Path("unused"))]
    console = Console(force_terminal=True, width=120, record=True)
    with Display(jobs, console) as display:
        for event in (Event(0), Event(1), Event(0, 100, 0.5), Event(0, 200, 0.25, result=results(1)[0])):
            display.show(event)
    shown = console.export_text()
    assert "1 of 2 runs done" in shown
    assert "TPO       seed 0: error 25.0%" in shown


def test_every_method_has_settings_and_the_same_budget(tmp_path: Path) -> None:
    assert {(name, method) for name, task in TASKS.items() for method in task.methods} == set(SETTINGS)
    for name, method in SETTINGS:
        model = make_model(Job(name, method, 0, 1, tmp_path))
        steps = getattr(model, "n_steps", 1 if name == "mnist" else 7)
        assert TASKS[name].per_update % (model.n_envs * steps) == 0  # so every budget is met exactly
