"""Several seeds of one training in processes of their own: see :func:`tpo_gym.agents.seeds.train_seeds`."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.utils import get_device
from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper

from tpo_gym.agents.group_algorithm import GroupAlgorithm
from tpo_gym.agents.policies import ActorPolicy
from tpo_gym.agents.stack import SeedRandom
from tpo_gym.agents.stack_observer import StackObserver
from tpo_gym.agents.stacked import train_stacked
from tpo_gym.worker_processes import end_with_parent

REPORT_SECONDS = 0.5
"""Time between two looks at the workers."""


@dataclass(frozen=True)
class Recipe:
    """How to make and train the model of any seed."""

    algorithm: type[GroupAlgorithm]
    policy: str | type[ActorPolicy]
    env: str | Callable[..., Any]
    env_kwargs: dict[str, Any]
    kwargs: dict[str, Any]
    total_timesteps: int
    callback: Callable[[int], MaybeCallback] | None
    log_interval: int | None
    tb_log_name: str
    compile_options: dict[str, Any] | None = None

    def make_env(self) -> Any:
        """A new environment."""
        if not isinstance(self.env, str):
            return self.env(**self.env_kwargs)
        if not self.env_kwargs:
            return self.env
        return (gym.make_vec if "num_envs" in self.env_kwargs else gym.make)(self.env, **self.env_kwargs)

    def make_model(self, seed: int) -> GroupAlgorithm:
        """The untrained model of a seed."""
        model = self.algorithm(self.policy, self.make_env(), seed=seed, **self.kwargs)
        if self.compile_options is not None:
            model.compile(**self.compile_options)
        return model

    def make_callback(self, seed: int) -> MaybeCallback:
        """The callback of a seed."""
        return None if self.callback is None else self.callback(seed)

    def run_name(self, seed: int) -> str:
        """Name of a seed's TensorBoard run."""
        return f"{self.tb_log_name}_seed{seed}"


def stack_seeds(
    recipe: Recipe,
    seeds: Sequence[int],
    first: GroupAlgorithm,
    progress_bar: bool = False,
    observer: StackObserver | None = None,
) -> list[GroupAlgorithm]:
    """Train these seeds stacked, in this process.

    Args:
        recipe: The training.
        seeds: The seeds.
        first: The model of the first one, which was just made.
        progress_bar: Show a progress bar.
        observer: Watches all of them at once.
    """
    models = [(first, SeedRandom(first.device))]
    for seed in seeds[1:]:
        model = recipe.make_model(seed)
        models.append((model, SeedRandom(model.device)))
    train_stacked(
        seeds,
        models,
        recipe.total_timesteps,
        [recipe.make_callback(seed) for seed in seeds],
        recipe.log_interval,
        [recipe.run_name(seed) for seed in seeds],
        progress_bar,
        observer,
    )
    return [model for model, _ in models]


_shared: tuple[Any, Any] | None = None  # in a worker: how far each seed is, and whether to stop


class _Watch(BaseCallback):
    """Tells how far a seed is, and ends it when all are to end."""

    passive = True

    def __init__(self, index: int, progress: Any, stop: Any) -> None:
        super().__init__()
        self._index, self._progress, self._stop = index, progress, stop

    def _on_step(self) -> bool:
        self._progress[self._index] = self.num_timesteps
        return not self._stop.is_set()


class _WatchAll(StackObserver):
    """As :class:`_Watch`, for stacked seeds."""

    def __init__(self, start: int, progress: Any, stop: Any) -> None:
        self._start, self._progress, self._stop = start, progress, stop
        self._models: Sequence[GroupAlgorithm] = ()

    def on_training_start(self, models: Sequence[GroupAlgorithm]) -> None:
        self._models = models

    def goes_on(self) -> bool:
        for i, model in enumerate(self._models, self._start):
            self._progress[i] = model.num_timesteps
        return not self._stop.is_set()


def _initialize(progress: Any, stop: Any) -> None:
    global _shared
    _shared = progress, stop
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    torch.set_num_threads(1)


def _train(wrapped: CloudpickleWrapper, start: int, seeds: Sequence[int], paths: Sequence[str]) -> str | None:
    """Train seeds, stacked if there are several, and save them; returns a traceback where that failed.

    ``start``: place of the first of them among all seeds.
    """
    recipe: Recipe = wrapped.var
    assert _shared is not None
    progress, stop = _shared
    if stop.is_set():
        return None
    try:
        model = recipe.make_model(seeds[0])
        if len(seeds) > 1:
            models = stack_seeds(recipe, seeds, model, observer=_WatchAll(start, progress, stop))
        else:
            models = [model]
            given = recipe.make_callback(seeds[0])
            callbacks: list[Any] = [] if given is None else list(given) if isinstance(given, list) else [given]
            callbacks = [each if isinstance(each, BaseCallback) else ConvertCallback(each) for each in callbacks]
            watched = [*callbacks, _Watch(start, progress, stop)]
            model.learn(recipe.total_timesteps, watched, recipe.log_interval, recipe.run_name(seeds[0]))
        for trained, path in zip(models, paths, strict=True):
            trained.save(path, allow_pickle=True)
    except Exception:
        return traceback.format_exc()
    return None


def train_in_workers(
    recipe: Recipe, seeds: Sequence[int], n_workers: int, per_job: int, progress_bar: bool
) -> list[GroupAlgorithm]:
    """Train these seeds in processes with one thread each.

    Args:
        recipe: The training.
        seeds: The seeds.
        n_workers: Processes; no more are started than there are jobs.
        per_job: Seeds that are stacked; 1: none are.
        progress_bar: Show a progress bar.
    """
    starts = range(0, len(seeds), per_job)
    jobs = [list(seeds[start : start + per_job]) for start in starts]
    context = multiprocessing.get_context("spawn")
    progress, stop = context.Array("q", len(seeds), lock=False), context.Event()
    device = get_device(recipe.kwargs.get("device", "auto"))
    wrapped = CloudpickleWrapper(recipe)
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(min(len(jobs), n_workers), context, _initialize, (progress, stop)) as pool,
    ):
        paths = [str(Path(folder) / f"{seed}.zip") for seed in seeds]
        futures = [
            pool.submit(_train, wrapped, start, job, paths[start : start + per_job])
            for start, job in zip(starts, jobs, strict=True)
        ]
        try:
            _wait(futures, jobs, progress, recipe.total_timesteps if progress_bar else None)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
        return [
            recipe.algorithm.load(path, env=recipe.make_env(), device=device, trust=True)  # our own files
            for path in paths
        ]


def _wait(futures: Sequence[Future[str | None]], jobs: Sequence[list[int]], progress: Any, total: int | None) -> None:
    """Wait for all seeds; show a progress bar if ``total`` interactions of each are given.

    Raises:
        RuntimeError: At the first job that failed.
    """
    from tqdm import tqdm

    with tqdm(total=(total or 0) * len(progress), disable=total is None) as bar:
        pending = set(futures)
        while pending:
            done, pending = wait(pending, REPORT_SECONDS, FIRST_EXCEPTION)
            bar.update(sum(progress) - bar.n)
            for future in done:
                seeds = jobs[futures.index(future)]
                name = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
                try:
                    failure = future.result()
                except BrokenProcessPool as error:
                    raise RuntimeError(
                        f"The worker of {name} died: out of memory? Try fewer n_workers. (A script needs "
                        'if __name__ == "__main__": around what it runs.)'
                    ) from error
                if failure is not None:
                    raise RuntimeError(f"{name.capitalize()} failed:\n{failure}")
