"""Weights of candidates: what lets an engine that sees single sequences train on whole groups, exactly.

Language-model engines cut a batch into micro-batches and share it out to machines, so that a group's softmax is never
in one place. But every objective here is a function of the candidates' log-probabilities alone. Its gradient on them,
from a pass without gradient over the whole group, is all the backward pass needs: the gradient of ``-Σ w · log π`` with
constant ``w``, added up over any split of the candidates, is the exact gradient of the objective.

Plain tensors, no engine: the trainer on TRL and the plug-in for verl both use this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from tpo_gym.agents import objectives

Method = Literal["target_po", "grpo", "gspo", "group_pg"]
GroupPolicy = Literal["sum", "mean", "ratio"]
METHODS: tuple[str, ...] = get_args(Method)
GROUP_POLICIES: tuple[str, ...] = get_args(GroupPolicy)


@dataclass(frozen=True)
class WeightOptions:
    """Which objective gives the weights, with its settings.

    Args:
        method: ``"target_po"``: Target Policy Optimization. ``"grpo"``: the clipped surrogate on each candidate's
            probability ratio, as TPO's paper compares with it. ``"gspo"``: the same on the ratio per token.
            ``"group_pg"``: standardized scores as weights.
        group_policy: For ``"target_po"``, the logits whose softmax over the group is ``p``. ``"sum"``: the candidate's
            log-probability (the paper). ``"mean"``: its mean per token. ``"ratio"``: ``log π_θ - log π_old``, uniform
            at the snapshot whatever the lengths, with a uniform anchor.
        eta: Temperature ``η > 0`` of the target.
        std_floor: Smallest deviation that scores are divided by; see :func:`~tpo_gym.agents.objectives.standardize`.
        clip_range: Lower ε of ``"grpo"`` and ``"gspo"``. ``None``: 0.2 and 3e-4, the defaults of the two papers.
        clip_range_high: Upper ε; ``None``: ``clip_range`` for ``"grpo"``, 4e-4 for ``"gspo"`` (or ``clip_range``, where
            that is given).
        old_kl_coef: Weight of ``"grpo"``'s penalty on the divergence from the policy at sampling (the paper: 0.04).

    Raises:
        ValueError: For a value outside its range, naming it.
    """

    method: Method = "target_po"
    group_policy: GroupPolicy = "ratio"
    eta: float = 1.0
    std_floor: float = 0.0
    clip_range: float | None = None
    clip_range_high: float | None = None
    old_kl_coef: float = 0.04

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"Unknown method {self.method!r}: choose one of {', '.join(map(repr, METHODS))}.")
        if self.group_policy not in GROUP_POLICIES:
            choices = ", ".join(map(repr, GROUP_POLICIES))
            raise ValueError(f"Unknown group_policy {self.group_policy!r}: choose one of {choices}.")
        if not self.eta > 0:
            raise ValueError(f"eta must be positive, got {self.eta}: it is the temperature that divides the scores.")
        if not self.std_floor >= 0:
            raise ValueError(f"std_floor must not be negative, got {self.std_floor}: it bounds a deviation from below.")
        if not self.old_kl_coef >= 0:
            raise ValueError(f"old_kl_coef must not be negative, got {self.old_kl_coef}: it weighs a penalty.")
        if self.clip_range is not None and not 0 < self.clip_range < 1:
            raise ValueError(f"clip_range must lie between 0 and 1, or be None, got {self.clip_range}.")
        if self.clip_range_high is not None and not self.clip_range_high > 0:
            raise ValueError(f"clip_range_high must be positive or None, got {self.clip_range_high}.")

    @property
    def needs_lengths(self) -> bool:
        """Whether the weights depend on the candidates' numbers of tokens."""
        return self.method == "gspo" or (self.method == "target_po" and self.group_policy == "mean")


class CandidateWeights(NamedTuple):
    """The result of :func:`candidate_weights`, all detached.

    ``weights`` ``(G, K)``, ``loss`` of each group ``(G,)``, and ``metrics``: scalars for a log (see there).
    """

    weights: Tensor
    loss: Tensor
    metrics: dict[str, Tensor]


def candidate_weights(
    log_probs: Tensor,
    old_log_probs: Tensor,
    scores: Tensor,
    options: WeightOptions | None = None,
    *,
    lengths: Tensor | None = None,
    mask: Tensor | None = None,
) -> CandidateWeights:
    """Minus the gradient of the objective's mean over groups on each candidate's log-probability.

    With these weights as constants, the gradient of ``-Σ weights · log π`` over all candidates, in any order and split,
    is that of the objective. For ``"target_po"`` with the sum or the ratio they are ``(q - p) / G``. The target ``q``
    is a function of ``old_log_probs`` and ``scores`` only: over the epochs of one batch of rollouts it stays as it is,
    while ``p`` follows ``log_probs``. Source: *Target Policy Optimization*, arXiv 2604.06159, section 2; the formulas
    are :mod:`tpo_gym.agents.objectives`'s, differentiated.

    Args:
        log_probs: ``(G, K)`` log-probabilities of the candidates now, summed over their tokens: ``G`` groups of ``K``.
        old_log_probs: The same at sampling.
        scores: ``(G, K)``.
        options: The objective; ``None``: ``WeightOptions()``.
        lengths: Tokens of each candidate, ``(G, K)``. Needed where ``options.needs_lengths``.
        mask: Which candidates count, bool ``(G, K)``; the others get no weight and have no vote. ``None``: all.

    Returns:
        Weights, loss and metrics. Metrics are means over groups. All methods: ``active_groups`` (fraction whose scores
        differ), ``log_prob_spread`` (largest minus smallest log-probability of the group), ``loss``. ``"target_po"``:
        also ``cross_entropy``, ``fit_kl`` = KL(q‖p), ``max_p`` and ``tv`` = TV(p, q), the last one over the active
        groups (0 where there is none): near 0 at the first step after sampling, it says that the softmax has
        saturated.

    Raises:
        ValueError: If shapes differ, groups hold one candidate, lengths are missing, or a value is not finite.
    """
    options = options or WeightOptions()
    _check(log_probs, old_log_probs, scores, options, lengths, mask)
    if mask is not None:  # 0 times an excluded candidate's infinity would be NaN
        log_probs, old_log_probs, scores = (x.masked_fill(~mask, 0.0) for x in (log_probs, old_log_probs, scores))
    with torch.enable_grad():
        leaf = log_probs.detach().clone().requires_grad_()
        loss = _group_losses(leaf, old_log_probs, scores, options, lengths, mask)
        (gradient,) = torch.autograd.grad(loss.mean(), leaf)
    metrics = _metrics(log_probs.detach(), old_log_probs, scores, options, lengths, mask)
    metrics["loss"] = loss.detach().mean()
    if options.method == "target_po":
        metrics["cross_entropy"] = metrics["loss"]
    return CandidateWeights(-gradient, loss.detach(), metrics)


class SaturationWatch:
    """Notices when the group's softmax has saturated, so that the objective has no gradient though scores differ.

    Args:
        patience: Rollout batches in a row with a distance below ``threshold`` before it speaks, once; 0: never.
        threshold: Total variation distance between the target and the policy at sampling.
    """

    def __init__(self, patience: int, threshold: float = 0.01) -> None:
        if patience < 0:
            raise ValueError(f"patience must not be negative, got {patience}: it counts rollout batches; 0 is never.")
        self.patience = patience
        self.threshold = threshold
        self._count = 0

    def saturated(self, distance: float) -> bool:
        """Whether this rollout batch, in which some group is active, is the one to warn at."""
        self._count = self._count + 1 if distance < self.threshold else 0
        return self.patience > 0 and self._count == self.patience

    def message(self, options: WeightOptions) -> str:
        """What to tell the user."""
        others = " or ".join(repr(policy) for policy in GROUP_POLICIES if policy not in ("sum", options.group_policy))
        return (
            f"TV(q, p_old) has stayed below {self.threshold} for {self._count} rollout batches though scores differ: "
            f"with group_policy={options.group_policy!r} and eta={options.eta} the group's softmax is saturated, and "
            f"there is almost nothing to learn from. Use group_policy={others}, or a smaller eta."
        )


def _logits(
    log_probs: Tensor, old_log_probs: Tensor, options: WeightOptions, lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What the target policy's softmax reads, now and at sampling."""
    if options.group_policy == "mean" and lengths is not None:
        return objectives.mean_log_probs(log_probs, lengths), objectives.mean_log_probs(old_log_probs, lengths)
    return log_probs, old_log_probs


def _anchor(options: WeightOptions) -> objectives.Anchor:
    return "ratio" if options.group_policy == "ratio" else "old"


def _group_losses(
    log_probs: Tensor,
    old_log_probs: Tensor,
    scores: Tensor,
    options: WeightOptions,
    lengths: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """Loss of each group, ``(G,)``, differentiable in ``log_probs``."""
    if options.method == "target_po":
        new, old = _logits(log_probs, old_log_probs, options, lengths)
        anchor = _anchor(options)
        target = objectives.tpo_target(old, scores, options.eta, anchor, options.std_floor, mask)
        return objectives.tpo_loss(new, target, old, anchor, mask)
    if options.method == "group_pg":
        return objectives.policy_gradient_loss(log_probs, objectives.standardize(scores, options.std_floor, mask))
    advantages = objectives.group_advantages(scores, mask=mask)
    low, high = options.clip_range, options.clip_range_high
    if options.method == "gspo":
        assert lengths is not None  # checked before
        low, high = (3e-4, high or 4e-4) if low is None else (low, high)
        return objectives.gspo_loss(log_probs, old_log_probs, advantages, lengths, low, high)
    votes = None if mask is None else mask.to(advantages.dtype)
    low = 0.2 if low is None else low
    return objectives.grpo_loss(log_probs, old_log_probs, advantages, low, options.old_kl_coef, high, votes)


@torch.no_grad()
def _metrics(
    log_probs: Tensor,
    old_log_probs: Tensor,
    scores: Tensor,
    options: WeightOptions,
    lengths: Tensor | None,
    mask: Tensor | None,
) -> dict[str, Tensor]:
    active = ~objectives.zero_variance(scores, mask)
    counted = torch.ones_like(log_probs, dtype=torch.bool) if mask is None else mask
    highest = log_probs.masked_fill(~counted, -torch.inf).amax(-1)
    lowest = log_probs.masked_fill(~counted, torch.inf).amin(-1)
    metrics = {
        "active_groups": active.to(scores.dtype).mean(),
        "log_prob_spread": (highest - lowest).mean(),
    }
    if options.method == "target_po":
        new, old = _logits(log_probs, old_log_probs, options, lengths)
        anchor = _anchor(options)
        target = objectives.tpo_target(old, scores, options.eta, anchor, options.std_floor, mask)
        log_p = objectives.group_log_policy(new, old, anchor, mask)
        distance = objectives.total_variation(target, log_p.exp())
        metrics["tv"] = (distance * active).sum() / active.sum().clamp(min=1)
        metrics["max_p"] = log_p.exp().amax(-1).mean()
        metrics["fit_kl"] = objectives.kl_divergence(target, log_p).mean()
    return metrics


def _check(
    log_probs: Tensor,
    old_log_probs: Tensor,
    scores: Tensor,
    options: WeightOptions,
    lengths: Tensor | None,
    mask: Tensor | None,
) -> None:
    if log_probs.ndim != 2 or log_probs.shape[1] < 2:
        raise ValueError(
            f"log_probs must be (groups, candidates) with at least two candidates, got {tuple(log_probs.shape)}."
        )
    named = {"old_log_probs": old_log_probs, "scores": scores, "lengths": lengths, "mask": mask}
    for name, value in named.items():
        if value is not None and value.shape != log_probs.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, log_probs {tuple(log_probs.shape)}: both (G, K).")
    if lengths is None and options.needs_lengths:
        what = "method='gspo'" if options.method == "gspo" else "group_policy='mean'"
        raise ValueError(f"{what} needs lengths, the number of tokens of each candidate.")
    if mask is not None and not bool(mask.any(-1).all()):
        row = int((~mask.any(-1)).nonzero()[0])
        raise ValueError(f"Group {row} has no candidate that counts (its mask is all False): leave such groups out.")
    for name, value in (("log_probs", log_probs), ("old_log_probs", old_log_probs), ("scores", scores)):
        bad = ~torch.isfinite(value)
        if mask is not None:
            bad &= mask
        if bool(bad.any()):
            row, column = bad.nonzero()[0].tolist()
            raise ValueError(
                f"{name} of candidate {column} in group {row} is {value[row, column].item()}: "
                f"every candidate needs a finite number. Correct the "
                f"{'reward function' if name == 'scores' else 'model (or its precision)'}, or mask the candidate."
            )
