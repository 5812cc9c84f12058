"""The vectorized environment that an id or a single environment becomes: SB3's, with exact groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gymnasium as gym
import numpy as np
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from tpo_gym.agents.copies import behave_alike, transplant, without_monitor


class GroupVecEnv(DummyVecEnv):
    """SB3's ``DummyVecEnv`` that can also run groups: ``K`` sub-environments from one state, one episode each.

    After :meth:`prepare_groups` the next ``reset`` forms groups. From then on a sub-environment whose episode is over
    stands still (its last observation, reward 0, not done) until the next ``reset``: nothing is stepped in vain. Any
    other ``reset`` goes back to SB3's behaviour, which restarts every episode at its end.

    Args:
        env_fns: Functions that make one sub-environment each, all alike.
    """

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env]]) -> None:
        super().__init__(list(env_fns))
        self.n_interactions = 0
        """Sub-environments that the last step moved."""
        self.idle = np.zeros(self.num_envs, dtype=bool)
        """Sub-environments that stand still because their episode is over."""
        self.owned = range(self.num_envs)
        """Sub-environments whose groups are run in this process; the others stand still all the time."""
        self._group_size: int | None = None
        self._grouped = False
        self._members = 1
        self._copies: bool | None = None

    def prepare_groups(self, group_size: int, seeds: Sequence[int]) -> None:
        """Make the next ``reset`` start ``group_size`` consecutive sub-environments from one state.

        Args:
            group_size: Members of a group; divides ``num_envs``.
            seeds: One seed per group.
        """
        self._group_size = group_size
        self._seeds = [int(seed) for seed in seeds for _ in range(group_size)]

    @property
    def exact_copies(self) -> bool:
        """Whether a group's members are copies of its first one; else they are reset with the same seed.

        Tried once, on the first two sub-environments, which this leaves somewhere in an episode.
        """
        if self._copies is None:
            try:
                for env in self.envs[:2]:
                    without_monitor(env).reset(seed=0)
                transplant(self.envs[0], self.envs[1])
                first, second = (without_monitor(env) for env in self.envs[:2])
                self._copies = behave_alike(first, second, seed=0)
            except Exception:  # anything may go wrong in an environment that was not made to be copied
                self._copies = False
        return self._copies

    def reset(self) -> VecEnvObs:
        group_size, self._group_size = self._group_size, None
        self._members = group_size or 1
        self._grouped = group_size is not None
        self.idle[:] = False
        if group_size is None or (len(self.owned) == self.num_envs and (group_size == 1 or not self.exact_copies)):
            return super().reset()
        if group_size > 1:
            _ = self.exact_copies  # found out before the groups start, since that resets sub-environments
        seeds = self._seeds
        for leader in range(self.owned.start, self.owned.stop, group_size):
            self._start_group(range(leader, leader + group_size), seeds[leader])
        elsewhere = np.delete(np.arange(self.num_envs), self.owned)
        self.idle[elsewhere] = True
        for values in self.buf_obs.values():
            values[elsewhere] = values[self.owned.start]  # something to show
        self._reset_seeds()
        self._reset_options()
        return self._obs_from_buf()

    def _start_group(self, members: range, seed: int | None) -> None:
        for index in members:
            options = {"options": self._options[index]} if self._options[index] else {}
            obs, self.reset_infos[index] = self.envs[index].reset(seed=seed, **options)
            if index == members[0]:
                first_obs = obs
            elif self._copies:
                try:
                    transplant(self.envs[members[0]], self.envs[index])
                    obs = first_obs
                except Exception:  # it can no longer be copied, e.g. once it has been rendered: the seed must do
                    self._copies = False
            self._save_obs(index, obs)

    def step_wait(self) -> VecEnvStepReturn:
        if not self._grouped:
            self.n_interactions = self.num_envs
            return super().step_wait()
        self.n_interactions = int(np.count_nonzero(~self.idle))
        self.buf_dones[:], self.buf_rews[:] = False, 0.0
        self.buf_infos = [{} for _ in range(self.num_envs)]
        for index in np.flatnonzero(~self.idle):
            self._step_member(int(index))
        self.idle |= self.buf_dones
        return self._obs_from_buf(), self.buf_rews.copy(), self.buf_dones.copy(), self.buf_infos

    def _step_member(self, index: int) -> None:
        try:
            obs, reward, terminated, truncated, info = self.envs[index].step(self.actions[index])
        except TypeError as error:  # Monitor's, where the reward is None
            context, candidate = divmod(index, self._members)
            raise ValueError(
                f"Candidate {candidate} of context {context}: the step failed ({error}). It must return an "
                "observation, a reward that is a finite number, terminated, truncated and an info."
            ) from error
        self.buf_rews[index] = float(reward)
        self.buf_dones[index] = terminated or truncated
        info = {**info, "TimeLimit.truncated": truncated and not terminated}
        if self.buf_dones[index]:
            info["terminal_observation"] = obs
        self.buf_infos[index] = info
        self._save_obs(index, obs)
