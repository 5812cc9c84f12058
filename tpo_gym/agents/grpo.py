"""Group Relative Policy Optimization."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from tpo_gym.agents import objectives
from tpo_gym.agents.env_setup import EnvLike
from tpo_gym.agents.group_algorithm import CommonArguments, GroupAlgorithm, Schedule
from tpo_gym.agents.policies import ActorPolicy
from tpo_gym.agents.rollouts import Evaluation, GroupRollout


class GRPO(GroupAlgorithm):
    """Group Relative Policy Optimization (Shao et al. 2024), as TPO's paper compares with it.

    A clipped surrogate on each candidate's log-probability ratio, with advantages standardized within the group
    (population deviation + 1e-8) and a KL penalty to the sampling policy.

    Args:
        policy: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
        env: See there.
        learning_rate: A float or a schedule of the remaining progress.
        clip_range: ε of the clipped ratio.
        beta: Weight of the KL penalty; 0 leaves it out.
        **kwargs: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`. ``candidates`` can be ``"episodes"`` or
            ``"actions"``: the advantages are those of sampled candidates.
    """

    candidate_sets: ClassVar[tuple[str, ...]] = ("episodes", "actions")

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        clip_range: float = 0.2,
        beta: float = 0.04,
        **kwargs: Unpack[CommonArguments],
    ) -> None:
        self.clip_range = clip_range
        self.beta = beta
        super().__init__(policy, env, learning_rate, **kwargs)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if not self.clip_range > 0:
            raise ValueError(f"clip_range must be positive, got {self.clip_range}.")
        if self.beta < 0:
            raise ValueError(f"beta must not be negative, got {self.beta}: it weighs a penalty.")

    def freeze(self, rollout: GroupRollout) -> dict[str, Tensor]:
        """The advantages and the log-probabilities at sampling."""
        return {
            "advantages": objectives.group_advantages(rollout.scores),
            "old_log_probs": rollout.old_log_probs,
        }

    def group_losses(self, evaluation: Evaluation, frozen: dict[str, Tensor]) -> Tensor:
        """Clipped surrogate with KL penalty of each group."""
        return objectives.grpo_loss(
            evaluation.log_probs, frozen["old_log_probs"], frozen["advantages"], self.clip_range, self.beta
        )

    def diagnostics(self, log_probs: Tensor, frozen: dict[str, Tensor]) -> dict[str, Tensor]:
        """``clip_fraction``: candidates whose ratio left the clipping range."""
        ratio = (log_probs - frozen["old_log_probs"]).exp()
        return {
            **super().diagnostics(log_probs, frozen),
            "train/clip_fraction": ((ratio - 1).abs() > self.clip_range).float().mean(),
        }
