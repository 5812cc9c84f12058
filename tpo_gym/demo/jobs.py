"""What the demo runs, as data, and how one run is carried out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import configure
from torch import nn

from tpo_gym.agents import GRPO, TPO, GroupAlgorithm, MuonAdamW, TransformerExtractor
from tpo_gym.agents.metrics import rollout_metrics
from tpo_gym.envs.sb3 import make_vec_env

Report = Callable[[int, float], None]
"""Called with the interactions so far and the current error."""


@dataclass(frozen=True)
class Task:
    """A task and the methods that are compared on it."""

    title: str
    env_id: str
    env_kwargs: dict[str, Any]
    methods: tuple[str, ...]
    """The slowest one first, so that the workers end at about the same time."""
    per_update: int
    """Interactions per rollout batch, the same for all methods of the task."""
    updates: int
    quick_updates: int
    points: int
    """Measurements and log entries per run, if there are as many updates."""
    measure: str
    """What the error is, in words."""


TASKS = {
    "reversal": Task(
        title="Sparse token reversal, H=7",
        env_id="tpo_gym/TokenReversalSparse-v0",
        env_kwargs={"sequence_length": 7, "vocab_size": 2},
        methods=("PPO", "TPO ratio", "TPO", "GRPO"),
        per_update=800 * 7,
        updates=280,
        quick_updates=3,
        points=1000,
        measure="share of wrong sequences among the 800 of a rollout batch; the final one is the last 10 batches' mean",
    ),
    "mnist": Task(
        title="MNIST, bandit feedback",
        env_id="tpo_gym/MNISTBandit-v0",
        env_kwargs={},
        methods=("PPO", "TPO"),
        per_update=800,
        updates=625,
        quick_updates=10,
        points=20,
        measure="share of the 10,000 test images whose most likely action is wrong",
    ),
}

_TRANSFORMER = "the causal transformer of TPO's paper (2 layers, width 64), Muon + AdamW at 1e-3"
_MLP = "an MLP 784-50-50-10 (ReLU), Adam at 1e-3"
SETTINGS = {
    ("reversal", "TPO"): f"{_TRANSFORMER}; 100 contexts x K=8, 4 epochs of one full-batch step (the paper's form)",
    ("reversal", "TPO ratio"): 'as TPO, with anchor="ratio"',
    ("reversal", "GRPO"): "as TPO; clip 0.2, KL weight 0.04",
    ("reversal", "PPO"): "SB3's PPO, the same transformer under actor and critic, the same optimizer; 800 environments "
    "x 7 steps, one epoch of 4 minibatches (as many optimizer steps as TPO), gamma 1, the rest SB3's defaults",
    ("mnist", "TPO"): f"{_MLP}; 100 images per update, all 10 actions are candidates, one step per update",
    ("mnist", "PPO"): "SB3's PPO, the same network once for the actor and once for the critic, Adam at 1e-3; "
    "100 environments x 8 steps, 2 epochs of 4 minibatches (as many optimizer steps as TPO), the rest SB3's defaults",
}
"""What the methods run with, as the demo tells it."""


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    method: str
    seed: int
    interactions: int
    folder: Path
    """Where its TensorBoard events go."""


@dataclass(frozen=True)
class Result:
    """What a run gives."""

    task: str
    method: str
    seed: int
    interactions: list[int]
    error: list[float]
    final_error: float
    seconds: float
    cpu_seconds: float
    """Time on the processor: what the run takes where nothing else runs."""


def make_model(job: Job) -> BaseAlgorithm:
    """The job's algorithm on its environment."""
    task = TASKS[job.task]
    common: dict[str, Any] = dict(learning_rate=1e-3, seed=job.seed, device="cpu")
    if job.task == "reversal":
        if job.method == "PPO":
            vec_env = make_vec_env(task.env_id, n_envs=800, **task.env_kwargs)
            network = dict(features_extractor_class=TransformerExtractor, net_arch=[], optimizer_class=MuonAdamW)
            return PPO(
                "MlpPolicy",
                vec_env,
                n_steps=7,
                batch_size=1400,
                n_epochs=1,
                gamma=1.0,
                policy_kwargs=dict(**network, ortho_init=False),
                **common,
            )
        envs: Any = gym.make_vec(task.env_id, num_envs=800, **task.env_kwargs)
        groups: dict[str, Any] = dict(group_size=8, n_epochs=4, candidates="episodes", **common)
        if job.method == "GRPO":
            return GRPO("TransformerPolicy", envs, **groups)
        return TPO("TransformerPolicy", envs, anchor="ratio" if job.method == "TPO ratio" else "old", **groups)
    network = dict(net_arch=[50, 50], activation_fn=nn.ReLU)
    if job.method == "PPO":
        vec_env = make_vec_env(task.env_id, n_envs=100)
        return PPO("MlpPolicy", vec_env, n_steps=8, batch_size=200, n_epochs=2, policy_kwargs=network, **common)
    images: Any = gym.make_vec(task.env_id, num_envs=100)
    return TPO("MlpPolicy", images, candidates="all_actions", n_epochs=1, policy_kwargs=network, **common)


class Curve(BaseCallback):
    """Measures the error in the course of a run, logs it and passes it on.

    Args:
        report: Told of each measurement.
    """

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report
        self.interactions: list[int] = []
        self.error: list[float] = []

    def _on_step(self) -> bool:
        return True

    def note(self, error: float) -> None:
        """Keep a measurement made at the present number of interactions."""
        self.interactions.append(self.model.num_timesteps)
        self.error.append(error)
        self.report(self.model.num_timesteps, error)


class RolloutError(Curve):
    """``rollout/error``: 1 - mean return / max_return of a rollout batch, for any algorithm."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self._returns: list[float] = []

    def _on_step(self) -> bool:
        self._returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True

    def _on_rollout_end(self) -> None:
        max_return = self.training_env.get_attr("max_return")[0]
        if isinstance(self.model, GroupAlgorithm):
            assert self.model.rollout is not None
            error = float(rollout_metrics(self.model.rollout, max_return)["rollout/error"])
        else:
            error = 1 - sum(self._returns) / len(self._returns) / max_return
            self.logger.record("rollout/error", error)  # TPO and GRPO log it themselves
            self._returns.clear()
        self.note(error)


class HeldOutError(Curve):
    """``eval/error``: the share of test images that the policy's most likely action gets wrong.

    Args:
        every: Interactions between two measurements.
        report: Told of each one.
    """

    def __init__(self, every: int, report: Report) -> None:
        super().__init__(report)
        self.every = every
        test: Any = gym.make_vec(TASKS["mnist"].env_id, num_envs=1, split="test")
        self._images, self._labels = test.features().numpy(), test.dataset.labels.numpy()

    def _measure(self) -> None:
        actions, _ = self.model.predict(self._images, deterministic=True)
        error = float((actions != self._labels).mean())
        self.logger.record("eval/error", error)
        self.note(error)

    def _on_rollout_start(self) -> None:
        if self.model.num_timesteps >= self.every * (len(self.error) + 1):
            self._measure()

    def _on_training_end(self) -> None:
        if not self.interactions or self.interactions[-1] < self.model.num_timesteps:
            self._measure()
            self.logger.dump(self.model.num_timesteps)


def run(job: Job, report: Report) -> Result:
    """Carry out a job in this process."""
    started, cpu_started = time.perf_counter(), time.process_time()
    task = TASKS[job.task]
    for old in job.folder.glob("events.out.tfevents.*"):
        old.unlink()  # TensorBoard would draw both runs as one
    model = make_model(job)
    model.set_logger(configure(str(job.folder), ["tensorboard"]))
    every = max(1, job.interactions // task.points)
    if job.task == "reversal":
        curve: Curve = RolloutError(report)
        callbacks: list[BaseCallback] = [curve]
    else:
        curve = HeldOutError(every, report)
        callbacks = [curve, RolloutError(lambda *_: None)]  # for the log
    per_iteration = task.per_update if job.method == "PPO" or job.task == "reversal" else 100
    model.learn(job.interactions, callback=callbacks, log_interval=max(1, every // per_iteration))
    tail = curve.error[-10:] if job.task == "reversal" else curve.error[-1:]
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return Result(
        job.task, job.method, job.seed, curve.interactions, curve.error, sum(tail) / len(tail), seconds, cpu_seconds
    )
