"""Sweeps on a real Ray of this machine: the same runs, events, stops and resumes as local workers."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tpo_gym.experiments.__main__ import main, parse
from tpo_gym.experiments.registry import EXPERIMENTS
from tpo_gym.experiments.run import load
from tpo_gym.experiments.settings import finished_seeds, run_folder
from tpo_gym.experiments.workers import Job
from tpo_gym.experiments.workers import run_all as run_locally


def bandit(updates: int) -> list:
    cells = EXPERIMENTS["bandit"].at_quick_scale().cells()
    return [replace(cell.settings, updates=updates, batch=10, evaluate_every=2) for cell in cells]


def jobs(out: Path, settings: list, seeds: int) -> list[Job]:
    return [Job("bandit", s, n, run_folder(out, s, n), "cpu") for s in settings for n in range(seeds)]


@pytest.fixture(scope="module")
def run_all():
    pytest.importorskip("ray", reason="ray is not installed: pip install 'tpo-gym[ray]'")
    from tpo_gym.experiments.ray_workers import run_all

    return run_all


@pytest.mark.slow
def test_runs_are_those_of_local_workers(run_all, tmp_path):
    settings = bandit(4)[:2]
    by_ray, here = jobs(tmp_path / "ray", settings, 2), jobs(tmp_path / "local", settings, 2)
    events = [event for event in run_all(by_ray, 2) if event is not None]
    assert [event.failure for event in events if event.failure] == []
    assert sorted(event.job for event in events if event.seconds is not None) == [0, 1, 2, 3]
    assert {event.updates for event in events if event.seconds is not None} == {4}
    for _ in run_locally(here, 1):
        pass
    for one, other in zip(by_ray, here, strict=True):
        (curves, facts), (local_curves, local_facts) = load(one.folder), load(other.folder)
        assert curves.keys() == local_curves.keys()
        assert all(np.array_equal(curves[key], local_curves[key]) for key in curves)
        assert facts["settings"] == local_facts["settings"]
        assert len(list(one.folder.glob("events.out.tfevents.*"))) == 1
        assert not list(one.folder.glob("*.partial"))


@pytest.mark.slow
def test_a_failing_run_is_told_and_the_others_go_on(run_all, tmp_path):
    good = bandit(2)[0]
    bad = replace(good, task="ContextualBandit", candidates="exact", batch=7)
    queue = jobs(tmp_path, [bad, good], 1)
    events = [event for event in run_all(queue, 1) if event is not None]
    failures = [event for event in events if event.failure is not None]
    assert [event.job for event in failures] == [0]
    assert "there are 7 sub-environments" in failures[0].failure
    assert finished_seeds(tmp_path, bad) == []
    assert finished_seeds(tmp_path, good) == [0]


@pytest.mark.slow
def test_closing_stops_the_runs_and_keeps_what_is_complete(run_all, tmp_path):
    short, long = bandit(2)[0], replace(bandit(2)[1], updates=10**7)
    events = run_all(jobs(tmp_path, [short, long], 1), 1)
    moved = False
    for event in events:
        if event is not None and event.job == 1 and event.updates > 0:
            moved = True
            break
    started = time.monotonic()
    events.close()
    assert moved
    assert time.monotonic() - started < 30
    assert finished_seeds(tmp_path, short) == [0]
    assert finished_seeds(tmp_path, long) == []
    assert not run_folder(tmp_path, long, 0).exists()


@pytest.mark.slow
def test_command_line_goes_on_where_it_stopped(run_all, tmp_path):
    command = [sys.executable, "-m", "tpo_gym.experiments", "bandit", "--out", str(tmp_path), "--set", "updates=3"]
    command += ["--backend", "ray", "--methods", "TPO"]

    def run(*more):
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "1 runs to do, 0 are there already." in run("--seeds", "1")
    shown = run("--seeds", "2", "--workers", "2")
    assert "1 runs to do, 1 are there already." in shown
    assert "done bandit TPO, seed 1" in shown
    facts = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/settings.json")]
    assert sorted(fact["seed"] for fact in facts) == [0, 1]
    assert "| TPO |" in (tmp_path / "report.md").read_text()


def test_errors(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        parse(["bandit", "--address", "head:6379"])
    assert "--address is that of a Ray cluster: it needs --backend ray" in capsys.readouterr().err
    for name in ("scipy", "matplotlib", "markdown"):
        pytest.importorskip(name)
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr("tpo_gym.experiments.__main__.find_spec", lambda name: None if name == "ray" else find(name))
    assert main(["bandit", "--backend", "ray", "--out", str(tmp_path)]) == 1
    assert "ray is missing: pip install 'tpo-gym[ray]'" in capsys.readouterr().out
