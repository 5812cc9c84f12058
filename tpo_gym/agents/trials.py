"""Trying actions on copies of an environment (candidate set "actions" on environments of other packages)."""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    VecCheckNan,
    VecEnv,
    VecEnvWrapper,
    VecMonitor,
    VecNormalize,
    VecTransposeImage,
)

from tpo_gym.agents.actor import ActorPolicy
from tpo_gym.agents.copies import allowed_actions, behave_alike, snapshot, to_env, without_monitor
from tpo_gym.agents.rollouts import Observations

PASSIVE_WRAPPERS = (VecMonitor, VecCheckNan)


class Lookahead(NamedTuple):
    """How far an action is followed after it was tried."""

    steps: int = 0
    """Further steps, with the policy's actions."""
    deterministic: bool = True
    """Take the most likely action in them; else sample."""


NO_LOOKAHEAD = Lookahead()


class Trial:
    """One action, tried on a copy and followed for some steps."""

    def __init__(self, env: gym.Env) -> None:
        self.env = env
        self.score = 0.0
        self.done = False
        self.observation: Any = None

    def step(self, action: Any) -> None:
        """Act in the copy and add the reward to the score."""
        self.observation, reward, terminated, truncated, _ = self.env.step(action)
        self.score += float(reward)
        self.done = bool(terminated or truncated)


class Trials:
    """Scores candidate actions by trying them on copies.

    Args:
        env: A ``DummyVecEnv``, possibly wrapped.
        device: Where the policy is.
    """

    def __init__(self, env: VecEnv, device: torch.device) -> None:
        self._wrappers = wrappers_of(env)
        self._base: Any = env.unwrapped
        self._device = device
        self._count = 0

    def take_count(self) -> int:
        """Steps of copies since this was last asked."""
        count, self._count = self._count, 0
        return count

    def score(self, actions: np.ndarray, rows: np.ndarray, policy: ActorPolicy, lookahead: Lookahead) -> np.ndarray:
        """What each action earns: its reward and those of the steps looked ahead.

        Equal actions at one state are tried once: the copies share the random stream, so they have the same fate.

        Args:
            actions: ``(len(rows), K, ...)``, as the environment takes them.
            rows: Which sub-environments.
            policy: Acts in the steps looked ahead.
            lookahead: How many of them, and how.

        Returns:
            ``(len(rows), K)`` float64.
        """
        trials: list[Trial] = []
        index = np.zeros(actions.shape[:2], dtype=np.int64)
        for i, row in enumerate(rows):
            copy = snapshot(without_monitor(self._base.envs[row]))
            known: dict[bytes, int] = {}
            for k, action in enumerate(actions[i]):
                key = action.tobytes()
                if key not in known:
                    known[key] = len(trials)
                    trials.append(Trial(copy()))
                    self._step(trials[-1], action)
                index[i, k] = known[key]
        for _ in range(lookahead.steps):
            alive = [trial for trial in trials if not trial.done]
            if not alive:
                break
            for trial, action in zip(alive, self._act(alive, policy, lookahead.deterministic), strict=True):
                self._step(trial, action)
        return np.array([trial.score for trial in trials])[index]

    def _step(self, trial: Trial, action: Any) -> None:
        trial.step(action)
        self._count += 1

    def _act(self, trials: list[Trial], policy: ActorPolicy, deterministic: bool) -> np.ndarray:
        masks = [allowed_actions(trial.env) for trial in trials]
        given: dict[str, Any] = {} if masks[0] is None else {"action_masks": np.stack(masks)}  # type: ignore[arg-type]
        actions, _ = policy(self._observe(trials), deterministic=deterministic, **given)
        return to_env(actions, self._base.action_space)

    def _observe(self, trials: list[Trial]) -> Observations:
        """The copies' observations as the policy would get them through the vector environment's wrappers."""
        space = self._base.observation_space
        obs: Any
        if isinstance(space, gym.spaces.Dict):
            obs = {
                key: np.stack([np.asarray(trial.observation[key], dtype=part.dtype) for trial in trials])
                for key, part in space.spaces.items()
            }
        else:
            obs = np.stack([np.asarray(trial.observation, dtype=space.dtype) for trial in trials])
        for wrapper in self._wrappers:
            if isinstance(wrapper, VecTransposeImage):
                obs = wrapper.transpose_observations(obs)
            elif isinstance(wrapper, VecNormalize):
                obs = wrapper.normalize_obs(obs)
        return obs_as_tensor(obs, self._device)


def wrappers_of(env: VecEnv) -> list[VecEnvWrapper]:
    """The wrappers around a vector environment, innermost first."""
    wrappers = []
    while isinstance(env, VecEnvWrapper):
        wrappers.append(env)
        env = env.venv
    return wrappers[::-1]


def check_trials(env: VecEnv, lookahead: Lookahead) -> None:
    """Refuse environments whose actions cannot be tried on copies; resets and steps the first sub-environment.

    Args:
        env: The vectorized environment.
        lookahead: What is asked for.

    Raises:
        ValueError: Saying what to do instead.
    """
    remedy = 'Use candidates="episodes", which needs no copies.'
    base = env.unwrapped
    if not isinstance(base, DummyVecEnv):
        raise ValueError(
            f'candidates="actions" tries actions on copies of the sub-environments, which {type(base).__name__} keeps '
            f"out of reach. Pass the environment's id, one gym.Env or a DummyVecEnv. {remedy}"
        )
    known = (VecTransposeImage, VecNormalize, *PASSIVE_WRAPPERS)
    foreign = [type(wrapper).__name__ for wrapper in wrappers_of(env) if not isinstance(wrapper, known)]
    if lookahead.steps and foreign:
        raise ValueError(
            f"lookahead={lookahead.steps} needs the observations of copies, which cannot pass through {foreign[0]}. "
            f"Use lookahead=0, or wrap the single environments instead. {remedy}"
        )
    first = without_monitor(base.envs[0])
    try:
        first.reset(seed=0)
        exact = behave_alike(first, snapshot(first)(), seed=0)
        reason = "a copy of it behaves differently"
    except Exception as error:  # anything may go wrong in an environment that was not made to be copied
        exact, reason = False, f"{type(error).__name__}: {error}"
    if not exact:
        raise ValueError(
            f'candidates="actions" tries actions on copies, but {first} cannot be copied exactly ({reason}). {remedy}'
        )
