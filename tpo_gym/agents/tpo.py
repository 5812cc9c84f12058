"""Target Policy Optimization."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tpo_gym.agents import objectives
from tpo_gym.agents.collectors import Baseline
from tpo_gym.agents.env_setup import EXHAUSTIVE_SETS, EnvLike, is_ours
from tpo_gym.agents.group_algorithm import GroupAlgorithm, Schedule
from tpo_gym.agents.policies import ActorPolicy
from tpo_gym.agents.rollouts import Evaluation, GroupRollout

Auto = Literal["auto"]

AUTO: dict[str, dict[str, Any]] = {
    # Section 3.4: short candidates of one length, a transformer.
    "paper": dict(n_epochs=4, anchor="old", length_normalize=False, max_grad_norm=None),
    # Long episodes of unequal length: summed log-probabilities saturate the paper's softmax (docs/results/control).
    "control": dict(n_epochs=10, anchor="ratio", length_normalize=True, max_grad_norm=1.0),
}
"""What ``"auto"`` stands for: ``"paper"`` on tasks of this package and other bandits, ``"control"`` elsewhere."""


class TPO(GroupAlgorithm):
    """Target Policy Optimization (arXiv 2604.06159).

    Sample ``K`` candidates per context, standardize their scores to ``u``, form the target ``q ∝ p_old · exp(u / η)``
    over each group and fit the policy to it by cross-entropy. The gradient on the candidates' log-probabilities is
    ``p - q``: it vanishes where the policy matches the target. The loss therefore ends at the target's entropy, not at
    0; ``train/fit_kl`` is what falls.

    Args:
        policy: Alias (``MlpPolicy``, ``CnnPolicy``, ``MultiInputPolicy``, ``TabularPolicy``, ``TransformerPolicy``) or
            a subclass of :class:`~tpo_gym.agents.policies.ActorPolicy`.
        env: An id, an environment, or a vectorized environment (SB3's or Gymnasium's). With candidates ``"episodes"``
            its sub-environments are contexts x ``group_size``; with ``"actions"`` and ``"all_actions"`` each is one
            context. An id or a single environment is copied: ``n_contexts`` (x ``group_size``) times.
        learning_rate: A float or a schedule of the remaining progress.
        group_size: Candidates per context, ``K``. With ``"all_actions"`` every action of the space is one.
        n_contexts: Contexts per rollout batch where ``env`` is an id or a single environment. ``None``: 100 for tasks
            of this package (the paper's batch), else as many as make 32 episodes.
        n_epochs: Optimizer steps per rollout batch, each over the whole batch. Here and below ``"auto"`` is the paper's
            choice on tasks of this package, and one for control tasks on all others, see :data:`AUTO`.
        batch_size: Largest number of candidates computed at once. Bounds memory; the gradient is that of the whole
            batch whatever it is, also where it splits a group. ``None``: all at once.
        candidates: ``"episodes"``, ``"actions"``, ``"all_actions"``, or ``"auto"``: all actions for one-step tasks,
            actions where each one can be scored and every step pays, else episodes. ``"exact"``: no sampling, the
            expectation over all contexts and actions of a bandit (with ``n_epochs=1`` the population gradient).
        eta: Temperature ``η > 0``, a float or a schedule; smaller values make the target sharper.
        anchor: ``"old"``: the paper's form, ``p`` is the softmax of ``log π`` over the group. ``"ratio"``: ``p`` is the
            softmax of ``log π_θ - log π_old``, fitted to ``softmax(u / η)``. The stationary point is the same, but
            each sampled candidate weighs ``1 / K``, as it should since the candidates were drawn from ``π_old``.
            ``"none"``: the paper's ablation, fitting ``softmax(log π)`` to ``softmax(u / η)``.
        length_normalize: Divide each group's log-probabilities (or log-ratios) by the mean number of decisions of its
            candidates, so that long episodes do not saturate the group's softmax.
        skip_neutral: Take no step on a batch in which no group has a signal. Its gradient is zero at the snapshot, but
            Adam and Muon make steps of full size of whatever momentum and rounding leave. ``"auto"``: with
            ``anchor="ratio"``; the paper's forms step on every batch, as the reference does. Where successes are rare
            it may cost time (docs/experiments.md).
        std_floor: If positive, a group's scores are divided by at least this deviation, which softens groups whose
            scores hardly differ.
        max_grad_norm: Clip the gradient's norm to this; ``None``: no clipping.
        baseline: For ``"all_actions"`` and ``"exact"``: what is subtracted from the reward: a constant, ``"expected"``
            (``Σ π²``), ``"batch"`` (the batch's mean) or nothing (``None``).
        ent_coef: Weight of an entropy bonus in the loss.
        lookahead: For ``"actions"`` on environments that are copied to try an action: further steps of the copy, with
            the policy's actions, whose rewards count for the action's score. All steps of copies are interactions.
        lookahead_deterministic: Take the most likely action in these steps; else sample.
        stats_window_size: Episodes that the rollout statistics average.
        tensorboard_log: Folder of TensorBoard runs; ``None``: no logging.
        policy_kwargs: Arguments of the policy.
        verbose: 0: silent, 1: information, 2: debugging.
        seed: Seed of all random generators.
        device: Device of the policy and of training.
        _init_setup_model: Build the networks now.

    Raises:
        ValueError: For arguments that cannot work together, saying what to change.

    Example:
        >>> import tpo_gym
        >>> model = tpo_gym.TPO("TabularPolicy", "tpo_gym/Bandit-v0", learning_rate=0.1, n_contexts=100, seed=0)
        >>> model = model.learn(5_000)
    """

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        group_size: int = 8,
        n_contexts: int | None = None,
        n_epochs: int | Auto = "auto",
        batch_size: int | None = None,
        candidates: str = "auto",
        eta: float | Schedule = 1.0,
        anchor: objectives.Anchor | Auto = "auto",
        length_normalize: bool | Auto = "auto",
        skip_neutral: bool | Auto = "auto",
        std_floor: float = 0.0,
        max_grad_norm: float | Auto | None = "auto",
        baseline: Baseline = "expected",
        ent_coef: float = 0.0,
        lookahead: int = 0,
        lookahead_deterministic: bool = True,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
    ) -> None:
        auto = AUTO["paper" if env is None or candidates == "all_actions" or is_ours(env) else "control"]
        self.eta = eta
        self.anchor: objectives.Anchor = auto["anchor"] if anchor == "auto" else anchor
        self.length_normalize: bool = auto["length_normalize"] if length_normalize == "auto" else length_normalize
        self.skip_neutral = self.anchor == "ratio" if skip_neutral == "auto" else skip_neutral
        self.std_floor = std_floor
        super().__init__(
            policy,
            env,
            learning_rate,
            group_size=group_size,
            n_contexts=n_contexts,
            n_epochs=auto["n_epochs"] if n_epochs == "auto" else n_epochs,
            batch_size=batch_size,
            candidates=candidates,
            baseline=baseline,
            ent_coef=ent_coef,
            lookahead=lookahead,
            lookahead_deterministic=lookahead_deterministic,
            max_grad_norm=auto["max_grad_norm"] if max_grad_norm == "auto" else max_grad_norm,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=_init_setup_model,
        )

    merges_contexts = True

    def _check_arguments(self) -> None:
        super()._check_arguments()
        if self.std_floor < 0:
            raise ValueError(f"std_floor must not be negative, got {self.std_floor}: it bounds a deviation from below.")
        if not callable(self.eta) and not self.eta > 0:
            raise ValueError(f"eta must be positive, got {self.eta}: it is the temperature that divides the scores.")
        if self.anchor not in objectives.ANCHORS:
            raise ValueError(
                f"Unknown anchor {self.anchor!r}: choose one of {', '.join(map(repr, objectives.ANCHORS))}."
            )

    def _setup_groups(self) -> None:
        super()._setup_groups()
        if self.anchor == "ratio" and self.candidate_set in EXHAUSTIVE_SETS:
            raise ValueError(
                f'anchor="ratio" is for sampled candidates. With candidates={self.candidate_set!r} the set is '
                'exhaustive and the exact anchor is p_old: use anchor="old".'
            )

    @property
    def may_skip(self) -> bool:
        """See ``skip_neutral``."""
        return self.skip_neutral

    @property
    def is_constant(self) -> bool:
        """Whether ``eta`` is a number: see :attr:`GroupAlgorithm.is_constant`."""
        return not callable(self.eta)

    def wants_update(self, rollout: GroupRollout) -> bool:
        """Whether any group has a signal, where ``skip_neutral`` asks."""
        return not (self.skip_neutral and bool(objectives.zero_variance(rollout.scores, rollout.voters).all()))

    def freeze(self, rollout: GroupRollout) -> dict[str, Tensor]:
        """The targets ``q``, the log-probabilities at sampling and, if they matter, the lengths."""
        eta = self.eta
        if callable(eta):
            eta = float(eta(self._current_progress_remaining))
            self.logger.record("train/eta", eta)
        frozen = {"old_log_probs": rollout.old_log_probs}
        if self.length_normalize:
            frozen["lengths"] = rollout.lengths
        if rollout.voters is not None:
            frozen["mask"] = rollout.voters
        frozen["target"] = objectives.tpo_target(
            rollout.old_log_probs, rollout.scores, eta, self.anchor, self.std_floor, **_options(frozen)
        )
        return frozen

    def group_losses(self, evaluation: Evaluation, frozen: dict[str, Tensor]) -> Tensor:
        """Cross-entropy of each group to its target."""
        old = frozen["old_log_probs"]
        return objectives.tpo_loss(evaluation.log_probs, frozen["target"], old, self.anchor, **_options(frozen))

    def diagnostics(self, log_probs: Tensor, frozen: dict[str, Tensor]) -> dict[str, Tensor]:
        """``target_kl`` = KL(q‖p_old), ``fit_kl`` = KL(q‖p_θ), ``effective_candidates`` = exp H(q), group means."""
        target, old = frozen["target"], frozen["old_log_probs"]
        before = objectives.group_log_policy(old, old, self.anchor, **_options(frozen))
        after = objectives.group_log_policy(log_probs, old, self.anchor, **_options(frozen))
        entropy = -torch.special.xlogy(target, target).sum(-1)
        return {
            **super().diagnostics(log_probs, frozen),
            "train/target_kl": objectives.kl_divergence(target, before).mean(),
            "train/fit_kl": objectives.kl_divergence(target, after).mean(),
            "rollout/effective_candidates": entropy.exp().mean(),
        }


def _options(frozen: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the objective reads besides the log-probabilities, where there is any: lengths, and who has a vote."""
    return {name: frozen[name] for name in ("lengths", "mask") if name in frozen}
