"""What is logged of a rollout batch, beside SB3's keys."""

from __future__ import annotations

import torch
from torch import Tensor

from tpo_gym.agents.objectives import zero_variance
from tpo_gym.agents.rollouts import GroupRollout


def rollout_metrics(rollout: GroupRollout, max_return: float | None) -> dict[str, Tensor]:
    """Scalars of a rollout batch.

    ``rollout/zero_variance_groups``: fraction of groups whose scores are all equal. Where the environment names its
    ``max_return``: ``rollout/error`` = ``1 - mean return / max_return``, and ``rollout/groups_with_success``: fraction
    of groups in which a candidate succeeds (an episode with the full return; a single action with a positive score).
    """
    values = {"rollout/zero_variance_groups": zero_variance(rollout.scores).float().mean()}
    if max_return is not None:
        best = rollout.scores.amax(1)
        success = best >= max_return if rollout.step_rewards is not None else best > 0
        values["rollout/error"] = 1 - rollout.returns.mean() / max_return
        values["rollout/groups_with_success"] = success.float().mean()
    return values


def approximate_kl(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Estimate of KL(π_old‖π_θ) per candidate, ``e^r - 1 - r`` with ``r = log π_θ - log π_old`` (as SB3's PPO)."""
    log_ratio = log_probs - old_log_probs
    return (torch.expm1(log_ratio) - log_ratio).mean()
