"""Other weights and regressions over the same groups: Group PG, RLOO, REBEL and AWR."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor
from typing_extensions import Unpack

from tpo_gym.agents import objectives
from tpo_gym.agents.arguments import CommonArguments
from tpo_gym.agents.env_setup import EnvLike
from tpo_gym.agents.group_algorithm import GroupAlgorithm, Schedule
from tpo_gym.agents.policies import ActorPolicy
from tpo_gym.agents.rollouts import Evaluation, GroupRollout


class WeightedGroups(GroupAlgorithm):
    """Base of methods whose loss is ``-Σ_i w_i log π_i`` with weights fixed at sampling."""

    @abstractmethod
    def weights(self, rollout: GroupRollout) -> Tensor:
        """The weights, ``(B, K)``."""

    def freeze(self, rollout: GroupRollout) -> dict[str, Tensor]:
        """The weights and the log-probabilities at sampling."""
        return {"weights": self.weights(rollout), "old_log_probs": rollout.old_log_probs}

    def group_losses(self, evaluation: Evaluation, frozen: dict[str, Tensor]) -> Tensor:
        """Weighted log-likelihood of each group."""
        return objectives.policy_gradient_loss(evaluation.log_probs, frozen["weights"])


class GroupPG(WeightedGroups):
    """TPO's ablation (section 3.7): the same candidates and ``u`` as a policy gradient, ``-Σ_i u_i log π_i``.

    With bandit feedback (``"all_actions"``) only the sampled action's term is kept.
    """

    candidate_sets: ClassVar[tuple[str, ...]] = ("episodes", "actions", "all_actions")

    def weights(self, rollout: GroupRollout) -> Tensor:
        """Standardized scores."""
        u = objectives.standardize(rollout.scores, mask=rollout.voters)
        if rollout.behaviour is None:
            return u
        sampled = u.gather(1, rollout.behaviour.unsqueeze(1)).squeeze(1)
        return objectives.one_hot_scores(rollout.behaviour, sampled, rollout.group_size)


class RLOO(WeightedGroups):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024), mean over the group; one epoch by default.

    Args:
        policy: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
        env: See there.
        learning_rate: A float or a schedule of the remaining progress.
        **kwargs: See there.
    """

    candidate_sets: ClassVar[tuple[str, ...]] = ("episodes", "actions")

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        **kwargs: Unpack[CommonArguments],
    ) -> None:
        kwargs.setdefault("n_epochs", 1)
        super().__init__(policy, env, learning_rate, **kwargs)

    def weights(self, rollout: GroupRollout) -> Tensor:
        """Leave-one-out advantages."""
        return objectives.leave_one_out_advantages(rollout.scores) / rollout.group_size


class AWR(WeightedGroups):
    """Exponentially weighted regression (Peng et al. 2019) on the group's standardized scores.

    ``-mean_i min(exp(u_i / β), max_weight) log π_i``: unlike TPO's target the weights do not sum to one.

    Args:
        policy: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
        env: See there.
        learning_rate: A float or a schedule of the remaining progress.
        beta: Temperature of the weights.
        max_weight: Their upper limit.
        **kwargs: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
    """

    candidate_sets: ClassVar[tuple[str, ...]] = ("episodes", "actions")

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        beta: float = 1.0,
        max_weight: float = 20.0,
        **kwargs: Unpack[CommonArguments],
    ) -> None:
        self.beta = beta
        self.max_weight = max_weight
        super().__init__(policy, env, learning_rate, **kwargs)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if not self.beta > 0:
            raise ValueError(f"beta must be positive, got {self.beta}: it is the temperature of the weights.")

    def weights(self, rollout: GroupRollout) -> Tensor:
        """Exponential weights over the group size."""
        return objectives.awr_weights(rollout.scores, self.beta, self.max_weight) / rollout.group_size


class REBEL(GroupAlgorithm):
    """REBEL (Gao et al. 2024): regress differences of log-ratios on differences of scores within the group.

    Args:
        policy: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
        env: See there.
        learning_rate: A float or a schedule of the remaining progress.
        eta: Scale of the log-ratio that a score difference asks for.
        **kwargs: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
    """

    candidate_sets: ClassVar[tuple[str, ...]] = ("episodes", "actions")

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        eta: float = 1.0,
        **kwargs: Unpack[CommonArguments],
    ) -> None:
        self.eta = eta
        super().__init__(policy, env, learning_rate, **kwargs)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if not self.eta > 0:
            raise ValueError(f"eta must be positive, got {self.eta}.")

    def freeze(self, rollout: GroupRollout) -> dict[str, Tensor]:
        """Scores and log-probabilities at sampling."""
        return {"scores": rollout.scores, "old_log_probs": rollout.old_log_probs}

    def group_losses(self, evaluation: Evaluation, frozen: dict[str, Tensor]) -> Tensor:
        """Squared error of each group, mean over its pairs."""
        return objectives.rebel_loss(evaluation.log_probs, frozen["old_log_probs"], frozen["scores"], self.eta)
