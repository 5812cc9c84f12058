"""The mathematics of grouped policy optimization, as pure functions of tensors.

Shapes: ``B`` groups (one per context) of ``K`` candidates. ``log_probs`` are candidate log-probabilities ``log π(y|x)``
of shape ``(B, K)`` (a sequence: the sum over its steps), ``scores`` are the candidates' scores, same shape. Losses come
back per group, shape ``(B,)``, so that the caller chooses how groups are averaged. Everything is computed in float32
(or float64 when given), whatever the input's precision, and has finite gradients for any finite input.

Optional ``mask`` arguments are boolean ``(B, K)``: an excluded candidate (``False``) has no vote. It enters neither the
mean nor the deviation of its group, neither the softmax nor the target.

Source of the equations: *Target Policy Optimization*, arXiv 2604.06159 ("TPO" below).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from tpo_gym.agents.categorical import log_softmax, softmax

Anchor = Literal["old", "ratio", "none"]
ANCHORS: tuple[str, ...] = get_args(Anchor)

# At or below this deviation a group's centred scores are used unscaled (the reference's rule).
STD_THRESHOLD = 1e-6
# Log-ratios are clamped before the exponential: clamping after it leaves NaN gradients behind.
MAX_LOG_RATIO = 20.0


def _as_float(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _group_moments(scores: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Centre ``scores`` within their group; return them with the population deviation ``(B, 1)``.

    The group's first score is subtracted first, so equal scores give exact zeros instead of rounding residue, and a
    spread within a few float ulps of the scores' size counts as rounding, not as variance.
    """
    scores = _as_float(scores)
    count: Tensor | int = scores.shape[-1]
    if mask is None:
        first = scores[..., :1]
        shifted = scores - first
        centred = shifted - shifted.sum(-1, keepdim=True) / count
    else:
        weights = mask.to(scores.dtype)
        scores = torch.where(mask, scores, torch.zeros_like(scores))
        first = scores.gather(-1, mask.to(torch.uint8).argmax(-1, keepdim=True))
        count = weights.sum(-1, keepdim=True).clamp(min=1)
        shifted = (scores - first) * weights
        centred = (shifted - shifted.sum(-1, keepdim=True) / count) * weights
    std = (centred.square().sum(-1, keepdim=True) / count).sqrt()
    residue = 8 * torch.finfo(scores.dtype).eps * scores.abs().amax(-1, keepdim=True)
    differs = (std > residue).to(scores.dtype)  # a product takes half the time of `masked_fill`
    return centred * differs, std * differs


def zero_variance(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Which groups carry no signal because all their scores are equal (up to float rounding): bool ``(B,)``."""
    return _group_moments(scores, mask)[1].squeeze(-1) == 0


def standardize(scores: Tensor, std_floor: float = 0.0, mask: Tensor | None = None) -> Tensor:
    """Standardized scores ``u = (s - mean) / σ`` with the population σ (TPO, section 2).

    Args:
        scores: ``(B, K)``.
        std_floor: If positive, divide by ``max(σ, std_floor)``: softens groups whose scores hardly differ, such as
            ``(0.001, 0, 0)``, which plain standardization blows up.
        mask: Candidates that count.

    Returns:
        ``(B, K)``. A group of equal scores gives 0; where ``σ <= 1e-6`` the centred scores are returned unscaled (so
        rewards scaled by 1e-8 give a vanishing, finite signal: rescale them).
    """
    centred, std = _group_moments(scores, mask)
    if std_floor > 0:
        return centred / std.clamp(min=std_floor)
    return centred / torch.where(std > STD_THRESHOLD, std, 1.0)


def _mean_length(lengths: Tensor, mask: Tensor | None) -> Tensor:
    counted = torch.ones_like(lengths, dtype=torch.bool) if mask is None else mask
    total = torch.where(counted, lengths, torch.zeros_like(lengths)).sum(-1, keepdim=True)
    return (total / counted.sum(-1, keepdim=True).clamp(min=1)).clamp(min=1)


def group_log_policy(
    log_probs: Tensor,
    old_log_probs: Tensor | None = None,
    anchor: Anchor = "old",
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Log of the policy over the group, ``log p``: shape ``(B, K)``, ``-inf`` where masked.

    ``anchor="old"`` and ``"none"``: ``softmax(log π)`` (TPO, section 2). ``anchor="ratio"``:
    ``softmax(log π_θ - log π_old)``, uniform at the snapshot whatever the candidates' log-probabilities are. With
    ``lengths`` ``(B, K)`` a group's logits are divided by the mean length of its candidates, so that long candidates,
    whose log-probabilities are sums of many terms, do not saturate the softmax.
    """
    logits = _as_float(log_probs)
    if anchor == "ratio":
        if old_log_probs is None:
            raise ValueError('anchor="ratio" needs old_log_probs, the log-probabilities at sampling.')
        logits = logits - _as_float(old_log_probs)
    if lengths is not None:
        logits = logits / _mean_length(lengths, mask)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return log_softmax(logits)


def mean_log_probs(log_probs: Tensor, lengths: Tensor) -> Tensor:
    """Each candidate's log-probability per decision: ``log π / length``. All ``(B, K)``.

    Given to the objectives below in place of ``log π``, it makes candidates of unequal length comparable: the group's
    policy is the softmax of per-decision means, and by the chain rule a candidate's gradient carries ``1 / length``.
    """
    return _as_float(log_probs) / lengths.clamp(min=1)


def tpo_target(
    old_log_probs: Tensor,
    scores: Tensor,
    eta: float = 1.0,
    anchor: Anchor = "old",
    std_floor: float = 0.0,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Target distribution ``q_i ∝ p_i^old · exp(u_i / η)`` over each group (TPO, section 2 and Proposition 1).

    Args:
        old_log_probs: Log-probabilities at sampling, ``(B, K)``.
        scores: Scores, ``(B, K)``.
        eta: Temperature η > 0; small values sharpen the target.
        anchor: ``"old"``: the paper's ``p_old``; ``"ratio"`` and ``"none"``: a uniform anchor.
        std_floor: See :func:`standardize`.
        mask: Candidates that count; an excluded one has ``q = 0``.
        lengths: See :func:`group_log_policy`.

    Returns:
        ``(B, K)``, detached; each row sums to 1. Equal to ``p_old`` for a group of equal scores.

    Raises:
        ValueError: If ``eta`` is not positive or ``anchor`` is unknown.
    """
    if not eta > 0:
        raise ValueError(f"eta must be positive, got {eta}: it is the temperature that divides the scores.")
    if anchor not in ANCHORS:
        raise ValueError(f"Unknown anchor {anchor!r}: choose one of {', '.join(map(repr, ANCHORS))}.")
    with torch.no_grad():
        tilt = standardize(scores, std_floor, mask) / eta
        if anchor == "old":
            tilt = group_log_policy(old_log_probs, mask=mask, lengths=lengths) + tilt
        elif mask is not None:
            tilt = tilt.masked_fill(~mask, -torch.inf)
        return softmax(tilt)


def tpo_loss(
    log_probs: Tensor,
    target: Tensor,
    old_log_probs: Tensor | None = None,
    anchor: Anchor = "old",
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Cross-entropy ``-Σ_i q_i log p_i`` of each group to its frozen target (TPO, section 2).

    Its gradient on ``log_probs`` is ``p - q``: zero exactly where the policy over the group matches the target. The
    value ends at the target's entropy, not at 0.

    Returns:
        ``(B,)``.
    """
    log_p = group_log_policy(log_probs, old_log_probs, anchor, mask, lengths)
    if mask is not None:
        log_p = log_p.masked_fill(~mask, 0.0)
    return -(target.detach() * log_p).sum(-1)


def group_advantages(scores: Tensor, eps: float = 1e-8, mask: Tensor | None = None) -> Tensor:
    """GRPO's advantages: ``(s - mean) / (σ + eps)`` within each group, with the population σ. Shape ``(B, K)``."""
    centred, std = _group_moments(scores, mask)
    return centred / (std + eps)


def expected_advantages(scores: Tensor, probabilities: Tensor, eps: float = 1e-8) -> Tensor:
    """Standardized scores where mean and deviation are expectations over a candidate drawn with ``probabilities``.

    The population form of :func:`group_advantages` (TPO, section 3.2). All ``(B, K)``.
    """
    scores, probabilities = _as_float(scores), _as_float(probabilities)
    centred = scores - (probabilities * scores).sum(-1, keepdim=True)
    return centred / ((probabilities * centred.square()).sum(-1, keepdim=True).sqrt() + eps)


def bounded(log_ratio: Tensor) -> Tensor:
    """``r = log π_θ - log π_old`` clamped to ±20, so that its exponential stays a number."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """``min(e^r A, clip(e^r, 1 - clip_low, 1 + clip_high) A)``, elementwise (PPO, Schulman et al. 2017, equation 7).

    ``r`` is :func:`bounded`. DAPO (Yu et al. 2025) sets ``clip_high > clip_low``.
    """
    ratio = log_ratio.exp()
    free, clipped = ratio * advantages, ratio.detach().clamp(1 - clip_low, 1 + clip_high) * advantages
    return torch.where(free <= clipped, free, clipped)  # the gradient takes a third of minimum's operations


def kl_penalty(log_ratio: Tensor) -> Tensor:
    """Estimate of KL(π_θ‖π_old), ``e^-r + r - 1``; ``r`` is :func:`bounded` (TPO, section 3)."""
    return torch.exp(-log_ratio) + log_ratio - 1


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_range: float = 0.2,
    beta: float = 0.04,
    clip_range_high: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """GRPO's clipped surrogate with a KL penalty, summed over each group (Shao et al. 2024; TPO, section 3).

    ``-Σ_i [min(e^r A, clip(e^r, 1 ± ε) A) - β (e^-r + r - 1)]`` with ``r = log π_θ - log π_old`` clamped to ±20.

    Args:
        log_probs: ``(B, K)``; the ratio is that of the whole candidate. A further dimension of decisions,
            ``(B, K, T)``, gives per-decision ratios; their terms are summed too.
        old_log_probs: Same shape, at sampling.
        advantages: ``(B, K)``, or with a last dimension that broadcasts.
        clip_range: ε of the clipping.
        beta: Weight of the KL penalty to the sampling policy.
        clip_range_high: Upper ε, if it differs (DAPO's "clip higher").
        weights: Weight of each term, which broadcasts as ``advantages`` does; ``None``: 1.

    Returns:
        ``(B,)``.
    """
    log_ratio = bounded(_as_float(log_probs) - _as_float(old_log_probs).detach())
    high = clip_range if clip_range_high is None else clip_range_high
    value = clipped_surrogate(log_ratio, advantages.detach(), clip_range, high)
    if beta:
        value = value - beta * kl_penalty(log_ratio)
    if weights is not None:
        value = value * weights.detach()
    return -value.flatten(1).sum(-1)


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    clip_range: float = 3e-4,
    clip_range_high: float | None = 4e-4,
) -> Tensor:
    """Clipped surrogate on the length-normalized ratio ``exp((log π_θ - log π_old) / length)``, mean over the group.

    Group Sequence Policy Optimization (Zheng et al. 2025, equations 5 and 7). ``lengths`` ``(B, K)``: decisions.
    """
    log_ratio = (_as_float(log_probs) - _as_float(old_log_probs).detach()) / lengths.clamp(min=1)
    high = clip_range if clip_range_high is None else clip_range_high
    return -clipped_surrogate(bounded(log_ratio), advantages.detach(), clip_range, high).mean(-1)


def centred_advantages(scores: Tensor) -> Tensor:
    """Dr. GRPO's advantages (Liu et al. 2025): ``s - mean`` within each group, not divided by σ. Shape ``(B, K)``."""
    return _group_moments(scores, None)[0]


def leave_one_out_advantages(scores: Tensor) -> Tensor:
    """RLOO's advantages (Ahmadian et al. 2024): the score minus the mean of the *other* candidates. ``(B, K)``.

    Raises:
        ValueError: For groups of one candidate, which leave no other.
    """
    size = scores.shape[-1]
    if size < 2:
        raise ValueError(f"Leaving one out needs at least two candidates per group, got {size}.")
    return centred_advantages(scores) * (size / (size - 1))


def policy_gradient_loss(log_probs: Tensor, weights: Tensor) -> Tensor:
    """``-Σ weights · log π`` over everything but the first dimension; the weights are constants. ``(B,)``.

    With advantages as weights this is REINFORCE (Williams 1992); with ``u`` it is TPO's Group PG (TPO, section 3.7).
    """
    return -(weights.detach() * _as_float(log_probs)).flatten(1).sum(-1)


def dg_weights(log_probs: Tensor, advantages: Tensor, eta: float = 1.0) -> Tensor:
    """Delightful policy gradient's weights ``sigmoid(A · (-log π) / η) · A``, detached (TPO, section 3)."""
    if not eta > 0:
        raise ValueError(f"eta must be positive, got {eta}.")
    surprisal = -_as_float(log_probs).detach()
    return torch.sigmoid(advantages * surprisal / eta) * advantages


def rebel_loss(log_probs: Tensor, old_log_probs: Tensor, scores: Tensor, eta: float = 1.0) -> Tensor:
    """REBEL (Gao et al. 2024, equation 1): regress log-ratio differences on score differences.

    The mean over all pairs of a group of ``((r_i - r_j) / η - (s_i - s_j))²`` with ``r = log π_θ - log π_old``.

    Returns:
        ``(B,)``.
    """
    residual = (_as_float(log_probs) - _as_float(old_log_probs).detach()) / eta - centred_advantages(scores)
    # The mean over ordered pairs i != j of (x_i - x_j)² is twice the unbiased variance of x.
    return 2 * residual.var(-1, correction=1)


def awr_weights(scores: Tensor, beta: float = 1.0, max_weight: float = 20.0) -> Tensor:
    """Weights ``min(exp(u / β), max_weight)`` of standardized scores (AWR, Peng et al. 2019). ``(B, K)``."""
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}: it is the temperature of the weights.")
    log_max = torch.log(torch.tensor(max_weight)).item()
    return (standardize(scores) / beta).clamp(max=log_max).exp()


def step_advantages(
    rewards: Tensor,
    mask: Tensor | None,
    credit: Literal["to_go", "own", "return"] = "to_go",
    baseline: float | Literal["batch"] | None = "batch",
) -> Tensor:
    """Advantage of each decision of single-sample methods (TPO, section 3, "Credit").

    Args:
        rewards: ``(B, K, T)``.
        mask: Decisions that exist, bool ``(B, K, T)``; ``None``: all.
        credit: What a decision is credited with: the rewards from it on (``"to_go"``), its own reward (``"own"``, the
            paper's choice for dense rewards), or the whole episode's (``"return"``).
        baseline: What is subtracted: ``"batch"``, the mean over all episodes that reach that step; a constant; or
            nothing (``None``).

    Returns:
        ``(B, K, T)``, 0 where the mask is false.

    Raises:
        ValueError: For an unknown ``credit``.
    """
    rewards = _as_float(rewards)
    if credit == "to_go":
        value = rewards.flip(-1).cumsum(-1).flip(-1)
    elif credit == "return":
        value = rewards.sum(-1, keepdim=True).expand_as(rewards)
    elif credit == "own":
        value = rewards
    else:
        raise ValueError(f'Unknown credit {credit!r}: choose "to_go", "own" or "return".')
    exists = torch.ones_like(value) if mask is None else mask.to(value.dtype)
    if baseline == "batch":
        value = value - (value * exists).sum((0, 1)) / exists.sum((0, 1)).clamp(min=1)
    elif baseline is not None:
        value = value - baseline
    return value * exists


def kl_divergence(q: Tensor, log_p: Tensor) -> Tensor:
    """``KL(q || p)`` over the last dimension, with ``0 log 0 = 0``. Shape ``(B,)``."""
    return (torch.special.xlogy(q, q) - torch.where(q > 0, q * log_p, torch.zeros_like(q))).sum(-1)


def total_variation(q: Tensor, p: Tensor) -> Tensor:
    """Total variation distance ``½ Σ |q_i - p_i|`` over the last dimension, between 0 and 1. Shape ``(B,)``."""
    return (q - p).abs().sum(-1) / 2


def one_hot_scores(actions: Tensor, advantages: Tensor, n_actions: int) -> Tensor:
    """Score vectors of bandit feedback: ``A`` at the sampled action, 0 elsewhere (TPO, section 3).

    Args:
        actions: Sampled action indices, ``(B,)``.
        advantages: Their advantages, ``(B,)``.
        n_actions: Number of actions ``K``.

    Returns:
        ``(B, K)``.
    """
    scores = advantages.new_zeros(actions.shape[0], n_actions)
    return scores.scatter(1, actions.unsqueeze(1), advantages.unsqueeze(1))
