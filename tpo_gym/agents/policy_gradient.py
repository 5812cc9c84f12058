"""Single-sample policy gradients over the same rollouts: REINFORCE, DG and the paper's critic-free PPO.

They are the case ``group_size=1``: every episode is a context of its own, so ``n_contexts`` is the batch.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor
from typing_extensions import Unpack

from tpo_gym.agents import objectives
from tpo_gym.agents.arguments import CommonArguments
from tpo_gym.agents.env_setup import EXHAUSTIVE_SETS, EnvLike
from tpo_gym.agents.group_algorithm import GroupAlgorithm, Schedule
from tpo_gym.agents.policies import ActorPolicy
from tpo_gym.agents.rollouts import Evaluation, GroupRollout

Credit = Literal["to_go", "own", "return"]


class REINFORCE(GroupAlgorithm):
    """Policy gradient ``-A · log π`` (Williams 1992; "PG" in TPO's paper).

    Args:
        policy: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`.
        env: See there.
        learning_rate: A float or a schedule of the remaining progress.
        credit: What a decision is credited with: the rewards from it on (``"to_go"``), its own reward (``"own"``, the
            paper's choice for dense rewards), or the whole episode's (``"return"``).
        **kwargs: See :class:`~tpo_gym.agents.group_algorithm.GroupAlgorithm`; here ``group_size=1, n_epochs=1`` by
            default. ``baseline`` is ``"auto"`` (``"expected"`` with ``"all_actions"``, else ``"batch"``), a number,
            ``None``, ``"batch"`` (mean over the batch at that step) or ``"expected"`` (``Σ π²``, one-step tasks).
    """

    min_group_size: ClassVar[int] = 1
    candidate_sets: ClassVar[tuple[str, ...]] = ("episodes", "all_actions", "exact")

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        credit: Credit = "to_go",
        **kwargs: Unpack[CommonArguments],
    ) -> None:
        self.credit = credit
        super().__init__(policy, env, learning_rate, **_single_sample(kwargs, n_epochs=1))

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if self.credit not in ("to_go", "own", "return"):
            raise ValueError(f'Unknown credit {self.credit!r}: choose "to_go", "own" or "return".')

    def _setup_groups(self) -> None:
        super()._setup_groups()
        if self.baseline == "expected" and self.candidate_set == "episodes":
            raise ValueError(
                'baseline="expected" is for one-step tasks with candidates="all_actions", but groups '
                'are formed of "episodes" here: use "batch", a number or None.'
            )

    def _advantages(self, rollout: GroupRollout) -> Tensor:
        """Advantage of each decision, ``(B, K, T)``."""
        if self.candidate_set in EXHAUSTIVE_SETS:
            return rollout.scores.unsqueeze(-1)  # the collector subtracted the baseline
        baseline = "batch" if self.baseline == "auto" else self.baseline
        assert rollout.step_rewards is not None and baseline != "expected"
        return objectives.step_advantages(rollout.step_rewards, rollout.mask, self.credit, baseline)

    def freeze(self, rollout: GroupRollout) -> dict[str, Tensor]:
        """The advantages and the log-probabilities at sampling, per decision."""
        frozen = {
            "advantages": self._advantages(rollout),
            "old_log_probs": rollout.old_log_probs,
            "old_step_log_probs": rollout.old_step_log_probs,
        }
        if rollout.probabilities is not None:
            frozen["probabilities"] = rollout.probabilities.unsqueeze(-1)
        return frozen

    def group_losses(self, evaluation: Evaluation, frozen: dict[str, Tensor]) -> Tensor:
        """Policy-gradient loss of each group: sum over decisions, mean over episodes."""
        weights = self._weights(evaluation, frozen) * frozen.get("probabilities", 1.0)
        return objectives.policy_gradient_loss(evaluation.step_log_probs, weights) / self._episodes(weights)

    def _weights(self, evaluation: Evaluation, frozen: dict[str, Tensor]) -> Tensor:
        return frozen["advantages"]

    def _episodes(self, tensor: Tensor) -> int:
        """Episodes per group: with every action as a candidate the one that is sampled."""
        return 1 if self.candidate_set in EXHAUSTIVE_SETS else tensor.shape[1]


class DG(REINFORCE):
    """Delightful policy gradient: the advantage gated by ``sigmoid(A · (-log π) / η)`` (TPO, section 3).

    One epoch by default: it has no trust region, and the paper's appendix E shows it fail with four.

    Args:
        policy: See :class:`REINFORCE`.
        env: See there.
        learning_rate: A float or a schedule of the remaining progress.
        eta: Temperature of the gate.
        credit: See :class:`REINFORCE`.
        **kwargs: See :class:`REINFORCE`.
    """

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        eta: float = 1.0,
        credit: Credit = "to_go",
        **kwargs: Unpack[CommonArguments],
    ) -> None:
        self.eta = eta
        super().__init__(policy, env, learning_rate, credit, **kwargs)

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if not self.eta > 0:
            raise ValueError(f"eta must be positive, got {self.eta}: it is the gate's temperature.")

    def _weights(self, evaluation: Evaluation, frozen: dict[str, Tensor]) -> Tensor:
        return objectives.dg_weights(evaluation.step_log_probs, frozen["advantages"], self.eta)


class ClippedPG(REINFORCE):
    """The paper's critic-free PPO: a clipped ratio per decision, advantages without a value function (section 3).

    Args:
        policy: See :class:`REINFORCE`.
        env: See there.
        learning_rate: A float or a schedule of the remaining progress.
        clip_range: ε of the clipped ratio.
        credit: See :class:`REINFORCE`.
        **kwargs: See :class:`REINFORCE`; here ``n_epochs=4`` by default.
    """

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        clip_range: float = 0.2,
        credit: Credit = "to_go",
        **kwargs: Unpack[CommonArguments],
    ) -> None:
        self.clip_range = clip_range
        super().__init__(policy, env, learning_rate, credit, **_single_sample(kwargs, n_epochs=4))

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if not 0 < self.clip_range < 1:
            raise ValueError(f"clip_range must lie between 0 and 1, got {self.clip_range}.")

    def group_losses(self, evaluation: Evaluation, frozen: dict[str, Tensor]) -> Tensor:
        """Clipped surrogate of each group: sum over decisions, mean over episodes."""
        losses = objectives.grpo_loss(
            evaluation.step_log_probs,
            frozen["old_step_log_probs"],
            frozen["advantages"],
            self.clip_range,
            beta=0.0,
            weights=frozen.get("probabilities"),
        )
        return losses / self._episodes(frozen["advantages"])


def _single_sample(kwargs: CommonArguments, n_epochs: int) -> CommonArguments:
    defaults: dict[str, Any] = {"group_size": 1, "n_epochs": n_epochs, "baseline": "auto"}
    return {**defaults, **kwargs}  # type: ignore[typeddict-item]
