"""One training with many seeds: stacked on one device, or in processes of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import MaybeCallback
from torch import nn

from tpo_gym.agents.env_setup import EXHAUSTIVE_SETS
from tpo_gym.agents.group_algorithm import GroupAlgorithm
from tpo_gym.agents.policies import ActorPolicy
from tpo_gym.agents.resume_state import preserved_random
from tpo_gym.agents.seed_workers import Recipe, stack_seeds, train_in_workers
from tpo_gym.agents.stack_observer import StackObserver
from tpo_gym.agents.stackable import refusal

Model = TypeVar("Model", bound=GroupAlgorithm)
BACKENDS = ("auto", "stacked", "workers")
SHORT = 50_000
"""Updates, of all seeds, after which workers have about won back the time that they take to start."""


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
    compile: bool | dict[str, Any] = False,
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
            needs ``if __name__ == "__main__":``. ``"auto"``: stacked on a GPU where that serves; on a CPU bandits are
            stacked, those of long trainings in workers, and everything else goes to workers: measured, see
            docs/results/train_seeds.md.
        n_workers: Processes; ``None``: one per processor. With ``"stacked"`` the seeds are divided among so many,
            which stack theirs; ``None``: all in this one.
        observer: Watches all seeds at once, where callbacks of each would take longer than training does. Needs
            ``backend="stacked"``.
        compile: Compile the updates, with these arguments where a dictionary is given: see
            :meth:`GroupAlgorithm.compile`. Takes some seconds and pays in long trainings. Of stacked seeds nothing is
            compiled where there are callbacks.
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
    if n_workers is not None and n_workers < 1:
        raise ValueError(f"n_workers must be at least 1, got {n_workers}.")
    if observer is not None and (backend != "stacked" or (n_workers or 1) > 1):
        raise ValueError(
            f"An observer watches seeds that are stacked in this process, but backend={backend!r} and "
            f'n_workers={n_workers}: pass backend="stacked" and leave n_workers out.'
        )
    name = tb_log_name or algorithm.__name__
    options = compile if isinstance(compile, dict) else {} if compile else None
    recipe = Recipe(
        *(algorithm, policy, env, env_kwargs or {}, kwargs, total_timesteps, callback, log_interval, name, options)
    )
    with preserved_random():
        first = recipe.make_model(chosen[0])
        reason = refusal(first)
        if backend == "stacked" and reason is not None:
            raise ValueError(f'backend="stacked" cannot train these seeds: {reason}. Use backend="workers".')
        if backend == "auto":
            n_workers = n_workers or _processors()
            n_processes, stacks = _choose(first, len(chosen), total_timesteps, n_workers, reason is None)
        else:
            stacks = backend == "stacked"
            n_processes = (n_workers or 1) if stacks else (n_workers or _processors())
        if stacks and n_processes == 1:
            return stack_seeds(recipe, chosen, first, progress_bar, observer)  # type: ignore[return-value]
        del first
        per_job = -(-len(chosen) // n_processes) if stacks else 1
        return train_in_workers(recipe, chosen, n_processes, per_job, progress_bar)  # type: ignore[return-value]


def _choose(model: GroupAlgorithm, n_seeds: int, total_timesteps: int, n_workers: int, can: bool) -> tuple[int, bool]:
    """How many processes, and whether they stack their seeds: measured, see docs/results/train_seeds.md.

    Args:
        model: That of any seed.
        n_seeds: How many seeds.
        total_timesteps: Interactions of each.
        n_workers: Processes that there may be.
        can: Whether these seeds can be stacked.
    """
    if can and model.device.type != "cpu":
        return 1, True
    small = can and model.candidate_set in EXHAUSTIVE_SETS
    if not small or any(isinstance(module, nn.modules.conv._ConvNd) for module in model.policy.modules()):
        return n_workers, False
    assert model.env is not None
    if n_seeds * (total_timesteps // model.env.num_envs) <= SHORT:
        return 1, True
    return n_workers, n_seeds > n_workers


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
