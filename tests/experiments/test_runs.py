"""Every experiment from its settings to the report, at the smallest size."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpo_gym.experiments.__main__ import main, parse
from tpo_gym.experiments.experiment import Experiment
from tpo_gym.experiments.registry import EXPERIMENTS
from tpo_gym.experiments.run import Stopped, carry_out, carry_out_together, load
from tpo_gym.experiments.settings import finished_seeds, run_folder
from tpo_gym.experiments.workers import Job, bundles

pytest.importorskip("scipy")
pytest.importorskip("matplotlib")
pytest.importorskip("markdown")


def go_on(updates: int, error: Any) -> bool:
    return True


def smallest(name: str) -> Experiment:
    experiment = EXPERIMENTS[name].at_quick_scale()
    changes: dict[str, Any] = {**experiment.changes, "updates": 2, "evaluate_every": 2}
    if name != "contextual_bandit":  # its batch is the number of its contexts
        changes["batch"] = 4
    return replace(experiment, changes=changes, panels=tuple(replace(p, single_sample={}) for p in experiment.panels))


@pytest.mark.parametrize("name", ["bandit", "contextual_bandit", "mnist", "mnist_mechanism"])
def test_seeds_carried_out_together_have_the_curves_of_single_runs(name: str, tmp_path: Path) -> None:
    for cell in smallest(name).cells():
        settings = cell.settings.change({"evaluate_every": 1})
        folders = [run_folder(tmp_path, settings, seed) for seed in (3, 1)]
        carry_out_together(settings, [3, 1], folders, "cpu", [go_on, go_on])
        for seed, folder in zip((3, 1), folders, strict=True):
            carry_out(settings, seed, tmp_path / "single", "cpu", go_on)
            (together, facts), (alone, other) = load(folder), load(tmp_path / "single")
            assert {key: facts[key] for key in ("settings", "seed", "interactions")} == {
                key: other[key] for key in ("settings", "seed", "interactions")
            }
            assert together.keys() == alone.keys()
            assert list(alone["x"]) == [1, 2]
            for key in alone:
                np.testing.assert_allclose(together[key], alone[key], rtol=1e-3, atol=1e-5)
            assert len(list(folder.glob("events.out.tfevents.*"))) == 1


def test_what_is_bundled() -> None:
    bandit, tokens = (smallest(name).cells()[0].settings for name in ("bandit", "terminal"))
    jobs = [Job("", settings, seed, Path(), "cpu") for seed in range(20) for settings in (bandit, tokens)]
    together = [numbers for numbers in bundles(jobs, 2) if len(numbers) > 1]
    assert together == [list(range(0, 20, 2)), list(range(20, 40, 2))]
    assert all(len(numbers) == 1 for numbers in bundles(jobs, 3))
    mnist = smallest("mnist").cells()[0].settings
    images = [Job("", mnist, seed, Path(), "cpu") for seed in range(20)]
    assert bundles(images, 2) == [list(range(10)), list(range(10, 20))]
    alone = [Job("", tokens, seed, Path(), "cpu") for seed in range(20)]
    assert all(len(numbers) == 1 for numbers in bundles(alone, 2))  # measured by callbacks of each seed
    on_gpu = [job._replace(device="cuda") for job in jobs]
    assert sorted(map(len, bundles(on_gpu, 1))) == [20, 20]


METRICS = {"bandit": "misalignment", "contextual_bandit": "error_after", "mnist_mechanism": "surplus"}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment(name: str, tmp_path: Path) -> None:
    from tpo_gym.experiments.report import make_section, write

    experiment = smallest(name)
    cells = {cell.settings.folder: cell.settings for cell in experiment.cells()}
    for settings in cells.values():
        folder = run_folder(tmp_path, settings, 0)
        carry_out(settings, 0, folder, "cpu", go_on)
        curves, facts = load(folder)
        assert curves["x"][-1] == 2
        assert {len(values) for values in curves.values()} == {len(curves["x"])}
        assert METRICS.get(name, "error") in curves
        assert facts["seed"] == 0
        assert facts["settings"]["updates"] == 2
        assert {"torch", "numpy", "python"} <= set(facts["versions"])
        assert len(list(folder.glob("events.out.tfevents.*"))) == 1
    section = make_section(experiment, tmp_path, same_size=False)
    assert len(section.results) == len(experiment.cells())
    assert [f.number for f, _ in section.figures] == [f.number for f in experiment.figures if f.number != "17b"]
    files = write([section], tmp_path, "a command", 60.0)
    text = files[0].read_text()
    assert f"## {experiment.title}: `{name}`" in text
    assert all(file.read_bytes()[:4] == b"\x89PNG" for _, file in section.figures)
    html = files[1].read_text()
    assert html.count("data:image/png;base64,") == len(section.figures)
    assert "<table>" in html
    with np.load(files[2]) as stored:
        assert any(key.endswith("/mean") for key in stored)


def test_mechanism_metrics(tmp_path: Path) -> None:
    settings = smallest("mechanism").cells()[0].settings
    carry_out(settings, 0, tmp_path, "cpu", go_on)
    curves, _ = load(tmp_path)
    assert set(curves) == {
        "x", "error", "gradient_norm", "success_weight", "failure_weight", "prompts_with_success", "all_fail"
    }  # fmt: skip
    assert np.allclose(curves["all_fail"] + curves["prompts_with_success"], 1)
    success_rate = 1 - curves["error"]
    total = settings.group_size * (
        success_rate * curves["success_weight"] + (1 - success_rate) * curves["failure_weight"]
    )
    assert np.allclose(total, 1, atol=1e-5)  # the target masses of a group sum to 1


def test_same_seed_same_curves_and_other_seed_others(tmp_path: Path) -> None:
    settings = smallest("terminal").cells()[0].settings
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        carry_out(settings, seed, tmp_path / name, "cpu", go_on)
    a, b, c = (load(tmp_path / name)[0]["gradient_norm"] for name in "abc")
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_a_stopped_run_is_not_kept(tmp_path: Path) -> None:
    settings = smallest("terminal").cells()[0].settings
    with pytest.raises(Stopped):
        carry_out(settings, 0, run_folder(tmp_path, settings, 0), "cpu", lambda updates, error: updates < 1)
    assert finished_seeds(tmp_path, settings) == []
    carry_out(settings, 0, run_folder(tmp_path, settings, 0), "cpu", go_on)
    assert finished_seeds(tmp_path, settings) == [0]
    assert finished_seeds(tmp_path, settings.change({"batch": 5})) == []


def test_one_seed_that_is_stopped_ends_all_that_are_carried_out_together(tmp_path: Path) -> None:
    settings = smallest("bandit").cells()[0].settings
    folders = [run_folder(tmp_path, settings, seed) for seed in range(2)]
    heard: list[Any] = []

    def stop(updates: int, error: Any) -> bool:
        heard.append((updates, error))
        return updates < 1

    with pytest.raises(Stopped):
        carry_out_together(settings, range(2), folders, "cpu", [go_on, stop])
    assert [updates for updates, _ in heard] == [0, 1]
    assert heard[0][1] is None
    assert float(heard[1][1]) == pytest.approx(0.99, abs=1e-6)  # 100 actions, all alike
    assert finished_seeds(tmp_path, settings) == []


@pytest.mark.slow
def test_command_line_goes_on_where_it_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tpo_gym.experiments", "bandit", "--out", str(tmp_path), "--set", "updates=3"]

    def run(*more: str) -> str:
        done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "4 runs to do, 0 are there already." in run("--seeds", "1")
    folders = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/*/curves.npz")}
    assert len(folders) == 4
    shown = run("--seeds", "2", "--workers", "2")
    assert "4 runs to do, 4 are there already." in shown
    assert "done bandit TPO, seed 1" in shown
    assert all(path.stat().st_mtime_ns == time for path, time in folders.items())
    assert "| TPO | final |" in (tmp_path / "report.md").read_text()
    facts = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/*/settings.json")]
    assert sorted(fact["seed"] for fact in facts) == [0] * 4 + [1] * 4


@pytest.mark.slow
def test_a_failing_run_is_told_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["contextual_bandit", "--out", str(tmp_path), "--set", "updates=2", "batch=7", "--seeds", "1"]
    assert main([*words, "--methods", "TPO", "CE"]) == 1
    shown = capsys.readouterr().out
    assert "there are 7 sub-environments: make 100" in shown
    assert "2 runs failed" in shown
    assert "No run is finished" in (tmp_path / "report.md").read_text()


def test_command_line_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for words, message in (
        ([], "name an experiment"),
        (["x"], "unknown experiment x"),
        (["mnist", "--seeds", "0"], "1"),
    ):
        with pytest.raises(SystemExit):
            parse(words)
        assert message in capsys.readouterr().err
    assert main(["mnist", "--set", "colour=red", "--out", str(tmp_path)]) == 2
    assert "no setting 'colour'" in capsys.readouterr().out
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in EXPERIMENTS)
    assert parse(["all"]).names == list(EXPERIMENTS)
