"""TPO beside SB3's PPO on control tasks: returns over interactions, several seeds, committed under docs/results.

    python scripts/control.py --out docs/results/control            # all tasks, five seeds, two workers
    python scripts/control.py CartPole-v1 --seeds 2 --out results    # one task

PPO has the settings of rl-baselines3-zoo where it has any, else SB3's defaults. Both are evaluated by 20 episodes of
the deterministic policy at ten points of the budget. Writes curves.json, control.png and table.md; a run that is
already in curves.json is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

N_POINTS = 10
N_EVAL_EPISODES = 20


@dataclass(frozen=True)
class Task:
    """A task, its budget in interactions, and each method's settings."""

    budget: int
    good: float
    """The return of a solved task, drawn as a line."""
    tpo: dict[str, Any] = field(default_factory=dict)
    ppo: dict[str, Any] = field(default_factory=dict)
    ppo_envs: int = 8
    normalize: bool = False
    """Whether PPO's zoo settings normalize observations and rewards."""


TASKS = {
    "CartPole-v1": Task(
        100_000,
        475,
        ppo=dict(
            n_steps=32,
            batch_size=256,
            gae_lambda=0.8,
            gamma=0.98,
            n_epochs=20,
            ent_coef=0.0,
            learning_rate=("linear", 1e-3),
            clip_range=("linear", 0.2),
        ),
    ),
    "Acrobot-v1": Task(
        300_000,
        -100,
        ppo=dict(n_steps=256, gae_lambda=0.94, gamma=0.99, n_epochs=4, ent_coef=0.0),
        ppo_envs=16,
        normalize=True,
    ),
    # Episodes are short and their outcome is luck as well: more contexts, and the smaller step of the plain sum.
    "FrozenLake-v1": Task(200_000, 0.7, tpo=dict(n_contexts=16, length_normalize=False, learning_rate=3e-3)),
    "PointMass": Task(100_000, -4.0),
    "Pendulum-v1": Task(
        300_000,
        -250,
        tpo=dict(length_normalize=False, n_epochs=30),
        ppo=dict(
            n_steps=1024,
            gae_lambda=0.95,
            gamma=0.9,
            n_epochs=10,
            ent_coef=0.0,
            learning_rate=1e-3,
            clip_range=0.2,
            use_sde=True,
            sde_sample_freq=4,
        ),
        ppo_envs=4,
    ),
    "IdentityMultiDiscrete": Task(50_000, 100, ppo=dict(gamma=0.4), ppo_envs=8),
}


def make_env(name: str) -> Any:
    """A single environment; the MultiDiscrete task is SB3's: repeat the observed pair of numbers, 100 steps."""
    import gymnasium as gym

    if name == "IdentityMultiDiscrete":
        from stable_baselines3.common.envs import IdentityEnvMultiDiscrete

        return IdentityEnvMultiDiscrete(dim=4)
    return point_mass() if name == "PointMass" else gym.make(name)


def point_mass() -> Any:
    """A point in the plane that is to reach the origin in 30 steps: Box actions, minus the distance as reward."""
    import gymnasium as gym
    import numpy as np
    from gymnasium import spaces

    class PointMass(gym.Env):
        observation_space = spaces.Box(-4, 4, (2,), np.float32)
        action_space = spaces.Box(-1, 1, (2,), np.float32)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.position = self.np_random.uniform(-1, 1, 2)
            return self.position.astype(np.float32), {}

        def step(self, action: Any) -> Any:
            self.position = self.position + 0.1 * np.clip(action, -1, 1)
            return self.position.astype(np.float32), -float(np.linalg.norm(self.position)), False, False, {}

    return gym.wrappers.TimeLimit(PointMass(), 30)


def make_model(method: str, name: str, seed: int) -> Any:
    """The untrained model."""
    task = TASKS[name]
    if method == "TPO":
        from tpo_gym import TPO

        return TPO("MlpPolicy", make_env(name), seed=seed, device="cpu", **task.tpo)
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.utils import LinearSchedule
    from stable_baselines3.common.vec_env import VecNormalize

    kwargs: dict[str, Any] = {
        k: LinearSchedule(v[1], 0.0, 1.0) if isinstance(v, tuple) else v for k, v in task.ppo.items()
    }
    env: Any = make_vec_env(lambda: make_env(name), n_envs=task.ppo_envs, seed=seed)
    if task.normalize:
        env = VecNormalize(env)
    return PPO("MlpPolicy", env, seed=seed, device="cpu", **kwargs)


def run(job: tuple[str, str, int]) -> dict[str, Any]:
    """Train one model; its evaluated returns along the budget."""
    name, method, seed = job
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    model = make_model(method, name, seed)
    eval_env: Any = make_vec_env(lambda: make_env(name), n_envs=1, seed=10_000 + seed)
    statistics = model.get_vec_normalize_env()
    if statistics is not None:
        eval_env = VecNormalize(eval_env, training=False, norm_reward=False)
    budget = TASKS[name].budget
    points: list[tuple[int, float]] = []
    seconds = [0.0]

    class Evaluate(BaseCallback):
        """Evaluate at the start of the first rollout past each point, when the policy is up to date."""

        def _on_rollout_start(self) -> None:
            if self.num_timesteps >= len(points) * budget / N_POINTS:
                self.measure()

        def measure(self) -> None:
            start = time.perf_counter()
            if statistics is not None:
                eval_env.obs_rms = statistics.obs_rms
            generator = torch.get_rng_state()
            mean, _ = evaluate_policy(self.model, eval_env, N_EVAL_EPISODES)
            torch.set_rng_state(generator)
            points.append((self.model.num_timesteps, float(mean)))  # type: ignore[arg-type]
            seconds[0] += time.perf_counter() - start

        def _on_step(self) -> bool:
            return True

    callback = Evaluate()
    start = time.perf_counter()
    model.learn(budget, callback=callback, log_interval=None)
    callback.measure()
    wall = time.perf_counter() - start - seconds[0]
    return {"task": name, "method": method, "seed": seed, "seconds": wall, "points": points}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """One panel per task: thin lines for seeds, thick for their mean."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    names = [name for name in TASKS if any(r["task"] == name for r in runs)]
    figure, axes = plt.subplots(1, len(names), figsize=(4.2 * len(names), 3.4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for method, colour in (("TPO", "#0072B2"), ("PPO", "#D55E00")):
            curves = [r["points"] for r in runs if r["task"] == name and r["method"] == method]
            for curve in curves:
                axis.plot(*zip(*curve, strict=True), color=colour, alpha=0.25, linewidth=0.8)
            if curves:
                length = min(map(len, curves))
                mean = np.mean([curve[:length] for curve in curves], axis=0)
                axis.plot(mean[:, 0], mean[:, 1], color=colour, linewidth=2, label=f"{method} ({len(curves)} seeds)")
        axis.axhline(TASKS[name].good, color="grey", linestyle=":", linewidth=1)
        axis.set_title(name)
        axis.set_xlabel("interactions")
        axis.ticklabel_format(axis="x", style="sci", scilimits=(0, 0))
    axes[0][0].set_ylabel("mean return of 20 episodes")
    axes[0][0].legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def report(runs: list[dict[str, Any]], path: Path) -> None:
    """A table: final return per seed, mean with a bootstrap interval, time."""
    import numpy as np

    lines = ["| task | method | interactions | final return, mean [95 %] | seeds | first at the line | time |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, task in TASKS.items():
        for method in ("TPO", "PPO"):
            chosen = sorted((r for r in runs if r["task"] == name and r["method"] == method), key=lambda r: r["seed"])
            if not chosen:
                continue
            finals = np.array([r["points"][-1][1] for r in chosen])
            draws = np.random.default_rng(0).choice(finals, (10_000, len(finals))).mean(1)
            low, high = np.percentile(draws, [2.5, 97.5])
            reached = [next((x for x, y in r["points"] if y >= task.good), None) for r in chosen]
            solved = [x for x in reached if x is not None]
            first = f"{len(solved)}/{len(chosen)}" + (f", median {int(np.median(solved)):,}" if solved else "")
            each = ", ".join(f"{value:.4g}" for value in finals)
            seconds = np.mean([r["seconds"] for r in chosen])
            lines.append(
                f"| {name} | {method} | {task.budget:,} | {finals.mean():.4g} [{low:.4g}, {high:.4g}] | {each} | "
                f"{first} | {seconds:.0f} s |"
            )
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run what is missing, then draw and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help=f"of {', '.join(TASKS)}; default: all")
    parser.add_argument("--methods", nargs="+", default=["TPO", "PPO"], choices=["TPO", "PPO"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    unknown = set(arguments.tasks) - set(TASKS)
    if unknown:
        parser.error(f"unknown tasks {sorted(unknown)}; choose of {list(TASKS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "curves.json"
    runs = json.loads(file.read_text()) if file.exists() else []
    done = {(r["task"], r["method"], r["seed"]) for r in runs}
    jobs = [(t, m, s) for t in arguments.tasks for s in range(arguments.seeds) for m in arguments.methods]
    jobs = [job for job in jobs if job not in done]
    with multiprocessing.get_context("spawn").Pool(arguments.workers, maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(run, jobs):
            runs.append(result)
            file.write_text(json.dumps(runs))
            print(result["task"], result["method"], result["seed"], f"{result['seconds']:.0f} s", result["points"][-1])
    draw(runs, arguments.out / "control.png")
    report(runs, arguments.out / "table.md")
    print((arguments.out / "table.md").read_text())


if __name__ == "__main__":
    main()
