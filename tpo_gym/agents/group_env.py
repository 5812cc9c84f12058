"""What collectors need of an environment: groups of sub-environments that start from one context."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from stable_baselines3.common.utils import obs_as_tensor
from stable_baselines3.common.vec_env import VecEnv, unwrap_vec_normalize
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs
from torch import Tensor

from tpo_gym.agents.actor import ActorPolicy
from tpo_gym.agents.copies import same, to_env
from tpo_gym.agents.group_vec_env import GroupVecEnv
from tpo_gym.agents.masks import check_masks, choices
from tpo_gym.agents.rollouts import Observations
from tpo_gym.agents.trials import Lookahead, Trials, check_trials
from tpo_gym.envs.batched import BatchedEnv
from tpo_gym.envs.sb3 import SB3VecEnv
from tpo_gym.envs.vector_adapter import VectorEnvAdapter


class Step(NamedTuple):
    """One vector step. Tensors on the training device; ``dones`` on the host, so that loops need no device sync."""

    observe: Callable[[], Observations]
    """Gives the observations after the step, until the next one: making them takes time, and not all read them."""
    rewards: Tensor
    dones: np.ndarray
    infos: list[dict[str, Any]] | None
    """SB3's info dictionaries, where the environment makes them."""
    interactions: int
    """Interactions with the environment that this step took."""

    @property
    def observations(self) -> Observations:
        """Observations after the step."""
        return self.observe()


class GroupEnv(Protocol):
    """Sub-environments of which ``K`` consecutive ones share a context."""

    num_envs: int

    def start(self, group_size: int) -> Observations:
        """Observations of fresh episodes in all sub-environments, every ``group_size`` of one context."""
        ...

    def step(self, actions: Tensor) -> Step:
        """Act in every sub-environment."""
        ...

    def action_masks(self) -> Tensor | None:
        """Actions allowed now, bool ``(num_envs, entries)``; ``None``: all."""
        ...

    def score_actions(self, actions: Tensor, rows: np.ndarray, policy: ActorPolicy, lookahead: Lookahead) -> Tensor:
        """What ``(len(rows), K, ...)`` candidate actions would earn in these sub-environments, without taking them."""
        ...

    def check_scorable(self, lookahead: Lookahead) -> None:
        """Raise a ``ValueError`` where :meth:`score_actions` cannot work."""
        ...

    def go_on(self, running: np.ndarray) -> bool:
        """Whether an episode of the rollout batch goes on: one of ``running``, or one of another process."""
        ...

    def mean(self, values: Tensor) -> Tensor:
        """Mean of one value per sub-environment, over those of all processes."""
        ...


class OneProcessEnv:
    """Groups that are all in this process."""

    def go_on(self, running: np.ndarray) -> bool:
        return bool(running.any())

    def mean(self, values: Tensor) -> Tensor:
        return values.mean(0)


class BatchedGroupEnv(OneProcessEnv):
    """Groups on one of our own batched environments: tensors stay on their device."""

    def __init__(self, env: BatchedEnv, device: torch.device) -> None:
        self.env = env
        self.device = device
        self.num_envs = env.num_envs

    def start(self, group_size: int) -> Tensor:
        if self.env.group_size == group_size and self.env.at_start:
            observations = self.env.observations(again=False)  # the last step's autoreset drew this batch's contexts
        else:
            observations, _ = self.env.reset(options={"group_size": group_size})
        return observations.to(self.device)

    def start_all(self) -> Tensor:
        """Observations of fresh episodes in all contexts that there are, one per sub-environment, in order."""
        options = {"group_size": 1, "contexts": torch.arange(self.num_envs)}
        return self.env.reset(options=options)[0].to(self.device)

    def step(self, actions: Tensor) -> Step:
        rewards = self.env.advance(actions.to(self.env.device))
        # Episodes have one fixed length, so all sub-environments end together.
        dones = np.full(self.num_envs, self.env.at_start)
        return Step(cache(self._observe), rewards.to(self.device), dones, None, self.num_envs)

    def _observe(self) -> Tensor:
        return self.env.observations().to(self.device)

    def action_masks(self) -> None:
        return None

    def score_actions(self, actions: Tensor, rows: np.ndarray, policy: ActorPolicy, lookahead: Lookahead) -> Tensor:
        return self.env.score_actions(actions.to(self.env.device)).to(self.device)

    def check_scorable(self, lookahead: Lookahead) -> None:
        if lookahead.steps:
            raise ValueError(
                f"lookahead={lookahead.steps}: {self.env} scores actions without stepping, so there is nothing to "
                "look ahead to. Use lookahead=0."
            )


class VecGroupEnv(OneProcessEnv):
    """Groups on any SB3 ``VecEnv``: the members of a group start from the same state.

    They are copies of one another where we made the sub-environments ourselves (:class:`GroupVecEnv`); in a vector
    environment that the user made they are reset with the same seed, and every sub-environment goes on until the
    longest episode ends. Rewards are those under ``VecNormalize``.

    Args:
        env: The vectorized environment.
        device: Where tensors go.
        rng: Source of the groups' seeds.

    Raises:
        ValueError: If the environment masks actions that cannot be masked.
    """

    def __init__(self, env: VecEnv, device: torch.device, rng: np.random.Generator) -> None:
        self.env = env
        self.device = device
        self.rng = rng
        self.num_envs = env.num_envs
        self._space = env.action_space
        self._base: Any = env.unwrapped
        self._normalize = unwrap_vec_normalize(env)
        self._mask_entries = sum(choices(self._space)) if env.has_attr("action_masks") else 0
        self._trials: Trials | None = None
        self._warned = False

    def start(self, group_size: int) -> Observations:
        seeds = self.rng.integers(2**31 - 1, size=self.num_envs // group_size)
        if isinstance(self._base, GroupVecEnv):
            self._base.prepare_groups(group_size, seeds.tolist())
        elif self._is_batched():
            self._base._seeds = [int(seeds[0])] * self.num_envs
            self.env.set_options({"group_size": group_size})
        else:
            self._base._seeds = seeds.repeat(group_size).tolist()
        observations = self.env.reset()
        # A group's members share a random stream. Whoever resets the environment next, e.g. an evaluation, parts them.
        self._base._seeds = [int(seeds[0]) + 1 + index for index in range(self.num_envs)]
        if self._is_batched():
            self.env.set_options({"group_size": 1})
        self._check_groups(observations, group_size)
        return obs_as_tensor(observations, self.device)  # type: ignore[arg-type]

    def _is_batched(self) -> bool:
        """Whether the sub-environments are those of a batched environment of ours, which forms groups itself."""
        if isinstance(self._base, VectorEnvAdapter):
            return isinstance(self._base.vector.unwrapped, BatchedEnv)
        return isinstance(self._base, SB3VecEnv)

    def _check_groups(self, observations: VecEnvObs, group_size: int) -> None:
        """Warn once if the members of a group begin differently."""
        if self._warned or group_size == 1:
            return
        parts = observations if isinstance(observations, dict) else {"": observations}
        for values in parts.values():
            members = np.asarray(values).reshape(-1, group_size, *np.shape(values)[1:])
            if not same(members, np.broadcast_to(members[:, :1], members.shape)):
                self._warned = True
                warnings.warn(
                    f"The candidates of a group begin with different observations: {self._base} does not start twice "
                    "from the same state, so a group's scores mix luck with skill. Let reset(seed=...) determine the "
                    "first state (self.np_random after super().reset(seed=seed)), or make the environment copyable.",
                    stacklevel=2,
                )
                return

    def step(self, actions: Tensor) -> Step:
        observations, rewards, dones, infos = self.env.step(to_env(actions, self._space))
        if self._normalize is not None:
            rewards = self._normalize.get_original_reward()
        count = getattr(self._base, "n_interactions", self.num_envs)
        if self._trials is not None:
            count += self._trials.take_count()
        made = obs_as_tensor(observations, self.device)  # type: ignore[arg-type]
        return Step(
            lambda: made,
            torch.as_tensor(rewards, dtype=torch.float32, device=self.device),
            np.asarray(dones, dtype=bool),
            list(infos),
            count,
        )

    def action_masks(self) -> Tensor | None:
        if not self._mask_entries:
            return None
        idle = self._base.idle if isinstance(self._base, GroupVecEnv) else np.zeros(self.num_envs, dtype=bool)
        acting = np.flatnonzero(~idle).tolist()
        masks = np.ones((self.num_envs, self._mask_entries), dtype=bool)
        given = [np.ravel(mask) for mask in self.env.env_method("action_masks", indices=acting)]
        masks[acting] = check_masks(np.concatenate(given), self._space, len(acting), acting)
        return torch.as_tensor(masks, device=self.device)

    def score_actions(self, actions: Tensor, rows: np.ndarray, policy: ActorPolicy, lookahead: Lookahead) -> Tensor:
        assert self._trials is not None, "check_scorable() comes first"
        scores = self._trials.score(to_env(actions, self._space), rows, policy, lookahead)
        return torch.as_tensor(scores, dtype=torch.float32, device=self.device)

    def check_scorable(self, lookahead: Lookahead) -> None:
        check_trials(self.env, lookahead)
        self._trials = Trials(self.env, self.device)
