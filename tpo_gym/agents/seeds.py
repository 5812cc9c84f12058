"""One training with many seeds: stacked on one device, or in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback, ConvertCallback
from stable_baselines3.common.type_aliases import MaybeCallback
from stable_baselines3.common.utils import get_device
from stable_baselines3.common.vec_env.base_vec_env import CloudpickleWrapper

from tpo_gym.agents.env_setup import EXHAUSTIVE_SETS
from tpo_gym.agents.group_algorithm import GroupAlgorithm
from tpo_gym.agents.policies import ActorPolicy
from tpo_gym.agents.resume_state import preserved_random
from tpo_gym.agents.stack import SeedRandom
from tpo_gym.agents.stack_observer import StackObserver
from tpo_gym.agents.stackable import refusal
from tpo_gym.agents.stacked import train_stacked

Model = TypeVar("Model", bound=GroupAlgorithm)
BACKENDS = ("auto", "stacked", "workers")
STACKED_SEEDS, STACKED_WORKERS = 8, 2
"""On a CPU bandits are stacked from so many seeds on, where there would be no more than so many workers."""
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

    def make_env(self) -> Any:
        """A new environment."""
        if not isinstance(self.env, str):
            return self.env(**self.env_kwargs)
        if not self.env_kwargs:
            return self.env
        return (gym.make_vec if "num_envs" in self.env_kwargs else gym.make)(self.env, **self.env_kwargs)

    def make_model(self, seed: int) -> GroupAlgorithm:
        """The untrained model of a seed."""
        return self.algorithm(self.policy, self.make_env(), seed=seed, **self.kwargs)

    def make_callback(self, seed: int) -> MaybeCallback:
        """The callback of a seed."""
        return None if self.callback is None else self.callback(seed)

    def run_name(self, seed: int) -> str:
        """Name of a seed's TensorBoard run."""
        return f"{self.tb_log_name}_seed{seed}"


def train_seeds(
    algorithm: type[Model],
    env: str | Callable[..., Any],
    seeds: Iterable[int] = range(20),
    *,
    total_timesteps: int,
    policy: str | type[ActorPolicy] = "MlpPolicy",
    env_kwargs: dict[str, Any] | None = None,
    callback: Callable[[int], MaybeCallback] | None = None,
    log_interval: int | None = 1,
    tb_log_name: str | None = None,
    progress_bar: bool = False,
    backend: str = "auto",
    n_workers: int | None = None,
    observer: StackObserver | None = None,
    **kwargs: Any,
) -> list[Model]:
    """Train one model per seed, each as ``algorithm(policy, env, seed=seed, **kwargs).learn(total_timesteps)`` would.

    Args:
        algorithm: A group algorithm, such as :class:`~tpo_gym.agents.TPO`.
        env: An id, or a function that makes an environment: each seed has its own.
        seeds: Different integers.
        total_timesteps: Interactions of each seed.
        policy: See the algorithm.
        env_kwargs: Arguments of the environment. With ``num_envs`` an id is made by ``gymnasium.make_vec`` (as for
            ``device="cuda"``), else by ``gymnasium.make`` and copied as the algorithm needs.
        callback: A function from a seed to its callbacks. In workers it is called there, so what a callback gathers
            must be written to a file. Stacked seeds are faster without: each seed's callbacks are called one after the
            other, and may change the policy, which then has to be computed again.
        log_interval: See ``learn``.
        tb_log_name: The TensorBoard run of a seed is ``{tb_log_name}_seed{seed}``; ``None``: the algorithm's name.
        progress_bar: Show a progress bar.
        backend: ``"stacked"``: all seeds in this process on one device, their networks stacked; a seed equals its
            single run up to the rounding of sums. For candidates ``"all_actions"`` and ``"exact"`` on bandits of this
            package, and token tasks with a ``TransformerPolicy``. ``"workers"``: processes with one thread each, for
            everything; a seed equals its single run with one thread exactly. A program that is run as a script then
            needs ``if __name__ == "__main__":``. ``"auto"``: stacked on a GPU where that serves; on a CPU workers, but
            for 8 seeds and more of a bandit where there are no more than two processors: measured, see
            docs/results/train_seeds.md.
        n_workers: Processes; ``None``: one per processor.
        observer: Watches all seeds at once, where callbacks of each would take longer than training does. Needs
            ``backend="stacked"``.
        **kwargs: Arguments of the algorithm, without ``seed``.

    Returns:
        The trained models, in the order of the seeds. Like loaded ones they predict, save, and go on by
        ``learn(..., reset_num_timesteps=False)`` as if they had never stopped. The program's random generators are as
        before.

    Raises:
        TypeError: If an argument has the wrong type, for instance one environment for all seeds.
        ValueError: If the seeds repeat, or ``backend="stacked"`` cannot serve this training.
        RuntimeError: If a worker failed, naming the seed; the others are ended.

    Example:
        >>> import tpo_gym
        >>> models = tpo_gym.train_seeds(
        ...     tpo_gym.TPO, "tpo_gym/Bandit-v0", range(3), total_timesteps=5_000, policy="TabularPolicy",
        ...     learning_rate=0.1, n_contexts=100, backend="stacked",
        ... )
        >>> [int(model.predict(0, deterministic=True)[0]) for model in models]
        [0, 0, 0]
    """
    chosen = _check(algorithm, env, seeds, callback, backend, kwargs)
    if observer is not None and backend != "stacked":
        raise ValueError(f'An observer watches stacked seeds, but backend={backend!r}: pass backend="stacked".')
    name = tb_log_name or algorithm.__name__
    recipe = Recipe(algorithm, policy, env, env_kwargs or {}, kwargs, total_timesteps, callback, log_interval, name)
    with preserved_random():
        first = recipe.make_model(chosen[0])
        reason = refusal(first)
        if backend == "stacked" and reason is not None:
            raise ValueError(f'backend="stacked" cannot train these seeds: {reason}. Use backend="workers".')
        if backend == "stacked" or (
            backend == "auto" and reason is None and _stacking_pays(first, len(chosen), n_workers or _processors())
        ):
            models = [(first, SeedRandom(first.device))]
            for seed in chosen[1:]:
                model = recipe.make_model(seed)
                models.append((model, SeedRandom(model.device)))
            train_stacked(
                chosen,
                models,
                total_timesteps,
                [recipe.make_callback(seed) for seed in chosen],
                log_interval,
                [recipe.run_name(seed) for seed in chosen],
                progress_bar,
                observer,
            )
            return [model for model, _ in models]  # type: ignore[misc]
        del first
        return _train_in_workers(recipe, chosen, n_workers, progress_bar)  # type: ignore[return-value]


def _check(
    algorithm: Any, env: Any, seeds: Iterable[int], callback: Any, backend: str, kwargs: dict[str, Any]
) -> list[int]:
    """Check the arguments; the seeds as a list of integers."""
    if not (isinstance(algorithm, type) and issubclass(algorithm, GroupAlgorithm)):
        raise TypeError(f"train_seeds trains group algorithms such as TPO, not {algorithm!r}.")
    if not (isinstance(env, str) or callable(env)):
        raise TypeError(
            f"Every seed needs an environment of its own, but env is {env!r}: pass an id (with env_kwargs=), or a "
            "function that makes one."
        )
    if callback is not None and (isinstance(callback, BaseCallback) or not callable(callback)):
        raise TypeError(
            f"Every seed needs a callback of its own, but callback is {callback!r}: pass a function from the seed to "
            "its callbacks, e.g. callback=lambda seed: ResumeCallback(f'checkpoints/{seed}')."
        )
    if backend not in BACKENDS:
        raise ValueError(f"Unknown backend {backend!r}: choose one of {', '.join(map(repr, BACKENDS))}.")
    if "seed" in kwargs:
        raise TypeError(f"seed={kwargs['seed']!r}: name the seeds by seeds=[...].")
    chosen = list(seeds)
    wrong = [seed for seed in chosen if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool)]
    if wrong or not chosen:
        raise ValueError(f"seeds must be integers, at least one; got {wrong[0] if wrong else chosen!r}.")
    twice = {seed for seed in chosen if chosen.count(seed) > 1}
    if twice:
        raise ValueError(f"Seed {min(twice)} is given more than once: its runs would be the same. Leave one out.")
    return [int(seed) for seed in chosen]


def _stacking_pays(model: GroupAlgorithm, n_seeds: int, n_workers: int) -> bool:
    """Whether stacking these seeds is faster than workers: measured, see docs/results/train_seeds.md."""
    if model.device.type != "cpu":
        return True
    return model.candidate_set in EXHAUSTIVE_SETS and n_seeds >= STACKED_SEEDS and n_workers <= STACKED_WORKERS


# Workers.

_shared: tuple[Any, Any] | None = None  # in a worker: how far each seed is, and whether to stop


class _Watch(BaseCallback):
    """Tells how far a seed is, and ends it when all are to end."""

    def __init__(self, index: int, progress: Any, stop: Any) -> None:
        super().__init__()
        self._index, self._progress, self._stop = index, progress, stop

    def _on_step(self) -> bool:
        self._progress[self._index] = self.num_timesteps
        return not self._stop.is_set()


def _initialize(progress: Any, stop: Any) -> None:
    global _shared
    _shared = progress, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    torch.set_num_threads(1)


def _train(wrapped: CloudpickleWrapper, index: int, seed: int, path: str) -> str | None:
    """Train a seed and save it; returns a traceback where that failed."""
    recipe: Recipe = wrapped.var
    assert _shared is not None
    progress, stop = _shared
    if stop.is_set():
        return None
    try:
        model, given = recipe.make_model(seed), recipe.make_callback(seed)
        callbacks: list[Any] = [] if given is None else list(given) if isinstance(given, list) else [given]
        callbacks = [each if isinstance(each, BaseCallback) else ConvertCallback(each) for each in callbacks]
        watched = [*callbacks, _Watch(index, progress, stop)]
        model.learn(recipe.total_timesteps, watched, recipe.log_interval, recipe.run_name(seed))
        model.save(path, allow_pickle=True)
    except Exception:
        return traceback.format_exc()
    return None


def _train_in_workers(
    recipe: Recipe, seeds: Sequence[int], n_workers: int | None, progress_bar: bool
) -> list[GroupAlgorithm]:
    n_workers = min(len(seeds), n_workers or _processors())
    context = multiprocessing.get_context("spawn")
    progress, stop = context.Array("q", len(seeds), lock=False), context.Event()
    device = get_device(recipe.kwargs.get("device", "auto"))
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(n_workers, context, _initialize, (progress, stop)) as pool,
    ):
        paths = [str(Path(folder) / f"{seed}.zip") for seed in seeds]
        futures = [pool.submit(_train, CloudpickleWrapper(recipe), i, seed, paths[i]) for i, seed in enumerate(seeds)]
        try:
            _wait(futures, seeds, progress, recipe.total_timesteps if progress_bar else None)
        finally:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
        return [
            recipe.algorithm.load(path, env=recipe.make_env(), device=device, trust=True)  # our own files
            for path in paths
        ]


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _wait(futures: Sequence[Future[str | None]], seeds: Sequence[int], progress: Any, total: int | None) -> None:
    """Wait for all seeds; show a progress bar if ``total`` interactions of each are given.

    Raises:
        RuntimeError: At the first seed that failed.
    """
    from tqdm import tqdm

    with tqdm(total=(total or 0) * len(seeds), disable=total is None) as bar:
        pending = set(futures)
        while pending:
            done, pending = wait(pending, REPORT_SECONDS, FIRST_EXCEPTION)
            bar.update(sum(progress) - bar.n)
            for future in done:
                seed = seeds[futures.index(future)]
                try:
                    failure = future.result()
                except BrokenProcessPool as error:
                    raise RuntimeError(
                        f"The worker of seed {seed} died: out of memory? Try fewer n_workers. (A script needs "
                        'if __name__ == "__main__": around what it runs.)'
                    ) from error
                if failure is not None:
                    raise RuntimeError(f"Seed {seed} failed:\n{failure}")
