"""Clipped surrogates over groups: GRPO with its options, Dr. GRPO and GSPO."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Unpack

from tpo_gym.agents import objectives
from tpo_gym.agents.arguments import CommonArguments
from tpo_gym.agents.env_setup import EnvLike
from tpo_gym.agents.group_algorithm import GroupAlgorithm, Schedule
from tpo_gym.agents.policies import ActorPolicy
from tpo_gym.agents.rollouts import Evaluation, GroupRollout

Ratio = Literal["candidate", "step"]
Scale = Literal["std", "none"]


class GRPO(GroupAlgorithm):
    """Group Relative Policy Optimization (Shao et al. 2024), as TPO's paper compares with it (section 3).

    A clipped surrogate on each candidate's probability ratio, with advantages standardized within the group (population
    deviation + 1e-8) and a KL penalty to the sampling policy. With bandit feedback (candidates ``"all_actions"``) one
    action is tried per context, so the reward is standardized over the batch instead.

    DAPO (Yu et al. 2025) is ``clip_range_high=0.28, beta=0, ratio="step", mask_zero_variance=True``.

    Args:
        policy: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
        env: See there.
        learning_rate: A float or a schedule of the remaining progress.
        clip_range: ε of the clipped ratio.
        beta: Weight of the KL penalty; 0 leaves it out.
        clip_range_high: Upper ε, if it differs from the lower one.
        mask_zero_variance: Leave out groups whose scores are all equal, and average over the others.
        scale: ``"std"``: advantages divided by the group's deviation; ``"none"``: only centred (Dr. GRPO).
        ratio: ``"candidate"``: one ratio for the whole candidate (the paper's form); ``"step"``: one per decision.
        **kwargs: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
    """

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        clip_range: float = 0.2,
        beta: float = 0.04,
        clip_range_high: float | None = None,
        mask_zero_variance: bool = False,
        scale: Scale = "std",
        ratio: Ratio = "candidate",
        **kwargs: Unpack[CommonArguments],
    ) -> None:
        self.clip_range = clip_range
        self.clip_range_high = clip_range_high
        self.beta = beta
        self.mask_zero_variance = mask_zero_variance
        self.scale = scale
        self.ratio = ratio
        super().__init__(policy, env, learning_rate, **kwargs)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if callable(self.clip_range) or not 0 < self.clip_range < 1:
            raise ValueError(f"clip_range must lie between 0 and 1 (a number, no schedule), got {self.clip_range}.")
        if self.clip_range_high is not None and not self.clip_range_high > 0:
            raise ValueError(f"clip_range_high must be positive or None (as clip_range), got {self.clip_range_high}.")
        if self.beta < 0:
            raise ValueError(f"beta must not be negative, got {self.beta}: it weighs a penalty.")
        for name, choices in (("scale", get_args(Scale)), ("ratio", get_args(Ratio))):
            if getattr(self, name) not in choices:
                raise ValueError(f"Unknown {name} {getattr(self, name)!r}: choose one of {choices}.")

    def _advantages(self, rollout: GroupRollout) -> Tensor:
        if rollout.probabilities is not None and self.scale == "std":
            return objectives.expected_advantages(rollout.scores, rollout.probabilities)
        advantages = objectives.group_advantages if self.scale == "std" else objectives.centred_advantages
        if rollout.behaviour is None:
            return advantages(rollout.scores)
        over_batch = advantages(rollout.returns.unsqueeze(0)).squeeze(0)
        return objectives.one_hot_scores(rollout.behaviour, over_batch, rollout.group_size)

    def freeze(self, rollout: GroupRollout) -> dict[str, Tensor]:
        """The advantages and the log-probabilities at sampling, per candidate or per decision."""
        advantages = self._advantages(rollout)
        frozen = {"advantages": advantages, "old_log_probs": rollout.old_log_probs}
        if rollout.probabilities is not None:
            frozen["probabilities"] = rollout.probabilities
        if self.ratio == "step":
            steps = advantages.unsqueeze(-1).expand_as(rollout.old_step_log_probs)
            frozen["advantages"] = steps if rollout.mask is None else steps * rollout.mask
            frozen["old_step_log_probs"] = rollout.old_step_log_probs
        return frozen

    def group_losses(self, evaluation: Evaluation, frozen: dict[str, Tensor]) -> Tensor:
        """Clipped surrogate with KL penalty of each group."""
        by_step = self.ratio == "step"
        weights = frozen.get("probabilities")
        return objectives.grpo_loss(
            evaluation.step_log_probs if by_step else evaluation.log_probs,
            frozen["old_step_log_probs" if by_step else "old_log_probs"],
            frozen["advantages"],
            self.clip_range,
            self.beta,
            self.clip_range_high,
            weights.unsqueeze(-1) if by_step and weights is not None else weights,
        )

    def group_weights(self, rollout: GroupRollout, frozen: dict[str, Tensor]) -> Tensor:
        """The mean over groups, or over the informative ones."""
        if not self.mask_zero_variance:
            return super().group_weights(rollout, frozen)
        informative = (~objectives.zero_variance(rollout.scores)).to(rollout.scores.dtype)
        return informative / informative.sum().clamp(min=1)

    def diagnostics(self, log_probs: Tensor, frozen: dict[str, Tensor]) -> dict[str, Tensor]:
        """``clip_fraction``: candidates whose ratio left the clipping range."""
        log_ratio = log_probs - frozen["old_log_probs"]
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        clipped = (log_ratio.exp() > 1 + high) | (log_ratio.exp() < 1 - self.clip_range)
        return {**super().diagnostics(log_probs, frozen), "train/clip_fraction": clipped.float().mean()}


class DrGRPO(GRPO):
    """GRPO "done right" (Liu et al. 2025): advantages are centred but not divided by σ; no KL penalty.

    Args:
        policy: See :class:`GRPO`.
        env: See there.
        learning_rate: A float or a schedule of the remaining progress.
        clip_range: ε of the clipped ratio.
        **kwargs: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
    """

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        clip_range: float = 0.2,
        **kwargs: Unpack[CommonArguments],
    ) -> None:
        super().__init__(policy, env, learning_rate, clip_range, beta=0.0, scale="none", ratio="step", **kwargs)


class GSPO(GroupAlgorithm):
    """Group Sequence Policy Optimization (Zheng et al. 2025): a clipped ratio of the whole candidate, per decision.

    Args:
        policy: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
        env: See there.
        learning_rate: A float or a schedule of the remaining progress.
        clip_range: Lower ε; small, since the ratio is the geometric mean over the decisions.
        clip_range_high: Upper ε.
        **kwargs: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
    """

    candidate_sets: ClassVar[tuple[str, ...]] = ("episodes", "actions")

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        clip_range: float = 3e-4,
        clip_range_high: float | None = 4e-4,
        **kwargs: Unpack[CommonArguments],
    ) -> None:
        self.clip_range = clip_range
        self.clip_range_high = clip_range_high
        super().__init__(policy, env, learning_rate, **kwargs)

    def freeze(self, rollout: GroupRollout) -> dict[str, Tensor]:
        """Advantages, log-probabilities at sampling and lengths."""
        return {
            "advantages": objectives.group_advantages(rollout.scores),
            "old_log_probs": rollout.old_log_probs,
            "lengths": rollout.lengths.to(torch.float32),
        }

    def group_losses(self, evaluation: Evaluation, frozen: dict[str, Tensor]) -> Tensor:
        """Clipped surrogate of each group."""
        return objectives.gspo_loss(
            evaluation.log_probs,
            frozen["old_log_probs"],
            frozen["advantages"],
            frozen["lengths"],
            self.clip_range,
            self.clip_range_high,
        )
