"""Our curves against those of the author's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback

from tpo_gym.agents import DG, GRPO, REINFORCE, TPO, CrossEntropy, GroupAlgorithm, NormalizedStep
from tpo_gym.experiments.registry import EXPERIMENTS
from tpo_gym.experiments.run import carry_out, load

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "experiments" / "curves"
ROUNDING = 1e-6  # of the stored numbers


def assert_within_three_errors(
    mean: np.ndarray, error: np.ndarray, stored: dict[str, list[float]], what: str, sampled: bool = False
) -> None:
    """Two means of the same quantity are within 3 combined standard errors at every point.

    Of sampled misalignments, whose points are independent from update to update, one in 30 may lie beyond, by less than
    another error: of 248 independent points 0.7 do on average.
    """
    theirs = np.atleast_1d(stored["mean"])
    distance = np.abs(mean - theirs) / (np.hypot(error, stored["se"]) + ROUNDING / 3)
    worst = int(distance.argmax())
    message = f"{what}, point {worst}: {mean[worst]} against {theirs[worst]}, {distance[worst]:.2f} errors"
    assert (distance > 3).mean() <= (1 / 30 if sampled else 0), message
    assert distance.max() <= 4, message


def mean_and_error(curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return curves.mean(0), curves.std(0) / np.sqrt(len(curves))


class StepPerSeed(NormalizedStep):
    """Every block of rows takes a step of its own length: many seeds in one table."""

    blocks = 20

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        (table,) = group["params"]
        gradient = table.grad.view(self.blocks, -1)
        table -= group["lr"] * (gradient / gradient.norm(dim=1, keepdim=True)).view_as(table)


class PerSeed(BaseCallback):
    """Error after the step and misalignment of the update, for each block of rows."""

    model: GroupAlgorithm

    def _on_training_start(self) -> None:
        self.error, self.misalignment = [], []
        self.table = self.model.policy.action_net.weight
        optimizer = self.model.policy.optimizer
        optimizer.register_step_pre_hook(self.before)
        optimizer.register_step_post_hook(self.after)

    def _on_step(self) -> bool:
        return True

    def before(self, *_: Any) -> None:
        oracle = -self.table.detach().softmax(-1)
        oracle[:, 0] += 1
        update = -self.table.grad * len(self.table)
        a, b = (x.double().view(StepPerSeed.blocks, -1) for x in (update, oracle))
        norms = ((a * a).sum(1) + 1e-12) * ((b * b).sum(1) + 1e-12)
        self.misalignment.append(1 - (a * b).sum(1) / norms.sqrt())

    def after(self, *_: Any) -> None:
        right = self.table.detach().softmax(-1)[:, 0].view(StepPerSeed.blocks, -1)
        self.error.append(1 - right.mean(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "algorithm", "arguments"),
    [
        ("CE", CrossEntropy, {}),
        ("PG", REINFORCE, {"baseline": None}),
        ("DG", DG, {"baseline": None}),
        ("GRPO", GRPO, {}),
        ("TPO", TPO, {}),
    ],
)
def test_exact_updates_of_20_seeds(
    label: str, algorithm: type[GroupAlgorithm], arguments: dict[str, Any], reference: dict[str, Any]
) -> None:
    """All seeds in one run: contexts only meet in the length of the step."""
    n_contexts = 100 * StepPerSeed.blocks
    env: Any = gym.make_vec(
        "tpo_gym/ContextualBandit-v0", n_contexts, num_contexts=n_contexts, correct_actions=[0] * n_contexts
    )
    model = algorithm(
        "TabularPolicy",
        env,
        0.1,
        candidates="exact",
        n_epochs=1,
        policy_kwargs={"init_std": 1.0, "optimizer_class": StepPerSeed},
        seed=0,
        device="cpu",
        **arguments,
    )
    callback = PerSeed()
    model.learn(1000 * n_contexts, callback=callback, log_interval=None)
    stored = reference["contextual_bandit"]
    for metric in ("error", "misalignment"):
        curves = torch.stack(getattr(callback, metric), 1)[:, stored["x"]].numpy()
        assert_within_three_errors(*mean_and_error(curves), stored[label][metric], f"{label} {metric}")


@pytest.mark.slow
@pytest.mark.parametrize("label", ["TPO", "GRPO", "DG", "PG"])
def test_bandit_of_25_seeds(label: str, reference: dict[str, Any], tmp_path: Path) -> None:
    (cell,) = (cell for cell in EXPERIMENTS["bandit"].cells() if cell.method == label)
    runs = []
    for seed in range(25):
        carry_out(cell.settings, seed, tmp_path / str(seed), "cpu", lambda updates, error: True)
        runs.append(load(tmp_path / str(seed))[0])
    stored = reference["bandit"]
    for metric in ("error", "misalignment"):
        curves = np.stack([run[metric][stored["x"]] for run in runs])
        numbers = mean_and_error(curves)
        assert_within_three_errors(*numbers, stored[label][metric], f"{label} {metric}", metric == "misalignment")


def committed(name: str) -> Any:
    file = RESULTS / f"{name}.npz"
    if not file.exists():
        pytest.skip(f"no committed results of {name} here")
    return np.load(file)


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("bandit", {"error": "error", "misalignment": "misalignment"}),
        ("contextual_bandit", {"error": "error_after", "misalignment": "misalignment"}),
    ],
)
def test_committed_bandits(name: str, metrics: dict[str, str], reference: dict[str, Any]) -> None:
    stored = reference[name]
    with committed(name) as curves:
        for method in (key for key in stored if key != "x"):
            assert len(curves[f"{method}/seeds"]) >= 20
            assert curves[f"{method}/x"][stored["x"]].tolist() == [x + 1 for x in stored["x"]]
            for theirs, ours in metrics.items():
                mean, error = (curves[f"{method}/{ours}/{kind}"][stored["x"]] for kind in ("mean", "se"))
                sampled = (name, theirs) == ("bandit", "misalignment")
                assert_within_three_errors(mean, error, stored[method][theirs], f"{method} {theirs}", sampled)


def test_committed_mnist(reference: dict[str, Any]) -> None:
    stored = reference["mnist"]
    with committed("mnist") as curves:
        for method, final in stored["final"].items():
            assert len(curves[f"{method}/seeds"]) >= 5
            assert curves[f"{method}/x"][-1] == 10_000
            mean, error = (curves[f"{method}/error/{kind}"][-1:] for kind in ("mean", "se"))
            assert_within_three_errors(mean, error, final, f"{method}, final")
        where = np.searchsorted(curves["TPO/x"], stored["TPO"]["x"])
        mean, error = (curves[f"TPO/error/{kind}"][where] for kind in ("mean", "se"))
        assert_within_three_errors(mean, error, stored["TPO"], "TPO")


@pytest.mark.parametrize("method", ["TPO", "GRPO", "DG"])
def test_committed_terminal(method: str, reference: dict[str, Any]) -> None:
    stored = reference["terminal"]
    cell = f"prompts, H=10/{method}"
    with committed("terminal") as curves:
        if f"{cell}/seeds" not in curves or len(curves[f"{cell}/seeds"]) < 5:
            pytest.skip("fewer than 5 seeds")
        where = np.searchsorted(curves[f"{cell}/x"], stored["x"])
        mean, error = (curves[f"{cell}/error/{kind}"][where] for kind in ("mean", "se"))
        assert_within_three_errors(mean, error, stored[method], method)
