"""The supervised oracle."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Unpack

from tpo_gym.agents import objectives
from tpo_gym.agents.arguments import CommonArguments
from tpo_gym.agents.env_setup import EnvLike, native_env
from tpo_gym.agents.group_algorithm import GroupAlgorithm, Schedule
from tpo_gym.agents.policies import ActorPolicy
from tpo_gym.agents.rollouts import Evaluation, GroupRollout


class CrossEntropy(GroupAlgorithm):
    """Supervised cross-entropy to the known labels ("CE" in TPO's paper): what full information would reach.

    For one-step tasks of ours whose environment names the right action of each context (``labels``). The policy still
    acts, so that interactions and errors are counted as for the other methods.

    Args:
        policy: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
        env: A task with ``labels``.
        learning_rate: A float or a schedule of the remaining progress.
        **kwargs: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`; here ``n_epochs=1`` by default.

    Raises:
        ValueError: If the environment has no labels.
    """

    candidate_sets: ClassVar[tuple[str, ...]] = ("all_actions", "exact")
    reads_labels = True

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        **kwargs: Unpack[CommonArguments],
    ) -> None:
        kwargs.setdefault("n_epochs", 1)
        super().__init__(policy, env, learning_rate, **kwargs)

    def _setup_groups(self) -> None:
        if not hasattr(type(native_env(self.env)), "labels"):
            raise ValueError(
                "CrossEntropy needs an environment that knows the right action of each context (a `labels` property), "
                f"which {self.env} does not. Use a bandit or classification task of tpo_gym."
            )
        super()._setup_groups()

    def freeze(self, rollout: GroupRollout) -> dict[str, Tensor]:
        """One-hot labels and the log-probabilities at sampling."""
        assert rollout.labels is not None
        labels = objectives.one_hot_scores(rollout.labels, torch.ones_like(rollout.scores[:, 0]), rollout.group_size)
        return {"labels": labels, "old_log_probs": rollout.old_log_probs}

    def group_losses(self, evaluation: Evaluation, frozen: dict[str, Tensor]) -> Tensor:
        """Negative log-likelihood of the labels."""
        return objectives.policy_gradient_loss(evaluation.log_probs, frozen["labels"])
