"""What collectors need of an environment: groups of sub-environments that start from one context."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from tpo_gym.agents.rollouts import Observations
from tpo_gym.envs.batched import BatchedEnv


class Step(NamedTuple):
    """One vector step. Tensors on the training device; ``dones`` on the host, so that loops need no device sync."""

    observations: Observations
    rewards: Tensor
    dones: np.ndarray
    infos: list[dict[str, Any]] | None
    """SB3's info dictionaries, where the environment makes them."""


class GroupEnv(Protocol):
    """Sub-environments of which ``K`` consecutive ones share a context."""

    num_envs: int

    def start(self, group_size: int) -> Observations:
        """Observations of fresh episodes in all sub-environments, every ``group_size`` of one context."""
        ...

    def step(self, actions: Tensor) -> Step:
        """Act in every sub-environment."""
        ...


class BatchedGroupEnv:
    """Groups on one of our own batched environments: tensors stay on their device."""

    def __init__(self, env: BatchedEnv, device: torch.device) -> None:
        self.env = env
        self.device = device
        self.num_envs = env.num_envs

    def start(self, group_size: int) -> Tensor:
        if self.env.group_size == group_size and self.env.at_start:
            observations = self.env.observations()  # the last step's autoreset already drew this batch's contexts
        else:
            observations, _ = self.env.reset(options={"group_size": group_size})
        return observations.to(self.device)

    def step(self, actions: Tensor) -> Step:
        observations, rewards, _, _, _ = self.env.step(actions.to(self.env.device))
        # Episodes have one fixed length, so all sub-environments end together.
        dones = np.full(self.num_envs, self.env.at_start)
        return Step(observations.to(self.device), rewards.to(self.device), dones, None)


class VecGroupEnv:
    """Groups on any SB3 ``VecEnv``: the members of a group are reset with the same seed.

    What a group then shares is whatever the environment draws from its seed in ``reset``; randomness after the reset
    is shared too as long as the members act alike.

    Args:
        env: The vectorized environment.
        device: Where tensors go.
        rng: Source of the groups' seeds.
    """

    def __init__(self, env: VecEnv, device: torch.device, rng: np.random.Generator) -> None:
        self.env = env
        self.device = device
        self.rng = rng
        self.num_envs = env.num_envs
        self._space = env.action_space

    def start(self, group_size: int) -> Observations:
        seeds = self.rng.integers(2**31 - 1, size=self.num_envs // group_size).repeat(group_size)
        base = self.env.unwrapped
        base._seeds = [int(seed) for seed in seeds]
        return obs_as_tensor(self.env.reset(), self.device)  # type: ignore[arg-type]

    def step(self, actions: Tensor) -> Step:
        array = actions.cpu().numpy()
        if isinstance(self._space, gym.spaces.Box):
            array = np.clip(array, self._space.low, self._space.high)  # a Gaussian has no bounds
        observations, rewards, dones, infos = self.env.step(array)
        return Step(
            obs_as_tensor(observations, self.device),  # type: ignore[arg-type]
            torch.as_tensor(rewards, dtype=torch.float32, device=self.device),
            dones,
            infos,
        )
