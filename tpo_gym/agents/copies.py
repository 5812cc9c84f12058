"""Copies of environments: what makes groups exact and lets actions be tried without taking them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.monitor import Monitor
from torch import Tensor

from tpo_gym.agents.masks import check_masks, sample_allowed

PROBE_STEPS = 10


def snapshot(env: gym.Env) -> Callable[[], gym.Env]:
    """Freeze an environment.

    Args:
        env: Any environment; valid until it is stepped again.

    Returns:
        A function that makes independent copies of ``env``. Its random stream is copied too: copies that act alike
        see the same future.

    Raises:
        Exception: Whatever ``copy.deepcopy`` raises where the environment cannot be copied.
    """
    try:
        # Means the same as deepcopy, but is written in C: 7 times faster for the tables of toy text.
        frozen = pickle.dumps(env, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # local classes, lambdas
        copy.deepcopy(env)  # raises here rather than later
        return lambda: copy.deepcopy(env)
    return lambda: pickle.loads(frozen)


def transplant(source: gym.Env, target: gym.Env) -> None:
    """Replace what lies under ``target``'s wrappers by a copy of what lies under ``source``'s.

    Both must be wrapped alike and have just been reset; ``target``'s wrappers stay, so that they keep their records.
    """
    inner: Any = target
    while isinstance(inner.env, gym.Wrapper):
        inner = inner.env
    inner.env = snapshot(source.unwrapped)()


def without_monitor(env: gym.Env) -> gym.Env:
    """The environment under SB3's ``Monitor``, so that what is tried out is not recorded."""
    return env.env if isinstance(env, Monitor) else env


def allowed_actions(env: gym.Env) -> np.ndarray | None:
    """The environment's own mask ``(entries,)``, or ``None`` where it has no ``action_masks()``."""
    try:
        method = env.get_wrapper_attr("action_masks")
    except AttributeError:
        return None
    return check_masks(method(), env.action_space, 1)[0]


def behave_alike(first: gym.Env, second: gym.Env, seed: int) -> bool:
    """Whether two environments answer the same random actions alike, for one episode or ten steps; steps both."""
    rng = np.random.default_rng(seed)
    for _ in range(PROBE_STEPS):
        action = sample_allowed(allowed_actions(first), first.action_space, rng)
        # Copies that share hidden state disagree, since they move it twice.
        expected, actual = first.step(action), second.step(action)
        if not all(same(a, b) for a, b in zip(expected[:4], actual[:4], strict=True)):
            return False
        if expected[2] or expected[3]:
            return True
    return True


def same(first: Any, second: Any) -> bool:
    """Whether two observations (arrays, numbers or dictionaries of them) are equal."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return np.array_equal(first, second, equal_nan=np.asarray(first).dtype.kind == "f")


def to_env(actions: Tensor, space: gym.Space) -> np.ndarray:
    """Actions as the environment takes them: a Gaussian has no bounds, a Box has."""
    array = actions.cpu().numpy()
    if isinstance(space, gym.spaces.Box):
        return np.clip(array, space.low, space.high)
    return array.astype(space.dtype, copy=False)
