"""What callbacks, logs and SB3's episode statistics see of a group algorithm."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.utils import safe_mean
from torch import Tensor

from tpo_gym.agents.distributed import OneProcess
from tpo_gym.agents.env_setup import native_env
from tpo_gym.agents.group_env import BatchedGroupEnv, GroupEnv, Step
from tpo_gym.agents.infos import EpisodeInfos, as_numpy
from tpo_gym.agents.mail import Mail
from tpo_gym.agents.metrics import approximate_kl, rollout_metrics
from tpo_gym.agents.rollouts import GroupRollout

if TYPE_CHECKING:
    from tpo_gym.agents.group_algorithm import GroupAlgorithm


class ReportingMixin(BaseAlgorithm):
    """The part of a group algorithm that reports."""

    rollout: GroupRollout | None
    _group_env: GroupEnv
    _frozen: dict[str, Tensor]
    _unlogged: GroupRollout | None
    _processes: OneProcess
    _mail: Mail

    def diagnostics(self, log_probs: Tensor, frozen: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scalars to log after the last epoch, by their full key.

        Args:
            log_probs: The candidates' log-probabilities under the fitted policy, ``(B, K)``.
            frozen: What :meth:`freeze` returned.
        """
        return {"train/approx_kl": approximate_kl(log_probs, frozen["old_log_probs"])}

    def _step_locals(self, step: Step, rewards: list[Tensor]) -> dict[str, Any]:
        """What SB3's callbacks find in ``self.locals``; ``rewards`` are those of the batch's steps up to this one."""
        infos: Any = step.infos
        if isinstance(self._group_env, BatchedGroupEnv):
            max_return = self._group_env.env.max_return
            infos = EpisodeInfos(rewards, bool(step.dones[0]), max_return, self.start_time / 1e9)
        return {
            "self": self,
            "new_obs": as_numpy(step.observations),
            "rewards": as_numpy(step.rewards),
            "dones": step.dones,
            "infos": infos,
        }

    def _record_episodes(self, returns: Sequence[float]) -> None:
        """Put the batch's last episodes where SB3 keeps them, as `Monitor` would (no more than the window holds)."""
        assert self.ep_info_buffer is not None and self.ep_success_buffer is not None
        env = self._group_env.env  # type: ignore[attr-defined]
        seconds = round(time.time() - self.start_time / 1e9, 6)
        length, highest = env.horizon, env.max_return
        self.ep_info_buffer.extend([{"r": value, "l": length, "t": seconds} for value in returns])
        self.ep_success_buffer.extend([value >= highest for value in returns])

    def _record_all(self, names: Sequence[str], values: Sequence[float]) -> None:
        for name, value in zip(names, values, strict=True):
            self.logger.record(name, value)

    @property
    def _log_is_read(self) -> bool:
        return type(self.logger) is not Logger or bool(self.logger.output_formats)

    def dump_logs(self, iteration: int = 0) -> None:
        """Write the logs of the last update, once after it, and what is known of the episodes so far.

        Args:
            iteration: Rollout batches so far; 0: not logged (SB3's callbacks that log on their own do not know it).
        """
        if not self._log_is_read:
            self._mail.deliver()
            self.logger.dump(step=self.num_timesteps)  # no passes through the network for the log
            self._unlogged = None
            return
        assert self.ep_info_buffer is not None and self.ep_success_buffer is not None
        elapsed = max((time.time_ns() - self.start_time) / 1e9, sys.float_info.epsilon)
        if self.rollout is not None and self._unlogged is self.rollout:
            metrics = rollout_metrics(self.rollout, getattr(native_env(self.env), "max_return", None))
            metrics.update(
                self.diagnostics(self._processes.log_probs(cast("GroupAlgorithm", self), self.rollout), self._frozen)
            )
            self._mail.post(torch.stack(list(metrics.values())), lambda values: self._record_all(list(metrics), values))
            self._unlogged = None
        self._mail.deliver()
        if len(self.ep_info_buffer) > 0:
            self.logger.record("rollout/ep_rew_mean", safe_mean([info["r"] for info in self.ep_info_buffer]))
            self.logger.record("rollout/ep_len_mean", safe_mean([info["l"] for info in self.ep_info_buffer]))
        if len(self.ep_success_buffer) > 0:
            self.logger.record("rollout/success_rate", safe_mean(self.ep_success_buffer))
        if iteration > 0:
            self.logger.record("time/iterations", iteration, exclude="tensorboard")
        self.logger.record("time/fps", int((self.num_timesteps - self._num_timesteps_at_start) / elapsed))
        self.logger.record("time/time_elapsed", int(elapsed), exclude="tensorboard")
        self.logger.record("time/total_timesteps", self.num_timesteps, exclude="tensorboard")
        self.logger.dump(step=self.num_timesteps)
