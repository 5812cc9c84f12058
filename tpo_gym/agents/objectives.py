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
    weights = torch.ones_like(scores) if mask is None else mask.to(scores.dtype)
    if mask is not None:
        scores = torch.where(mask, scores, torch.zeros_like(scores))
        first = scores.gather(-1, mask.to(torch.uint8).argmax(-1, keepdim=True))
    else:
        first = scores[..., :1]
    count = weights.sum(-1, keepdim=True).clamp(min=1)
    shifted = (scores - first) * weights
    centred = (shifted - shifted.sum(-1, keepdim=True) / count) * weights
    std = (centred.square().sum(-1, keepdim=True) / count).sqrt()
    residue = 8 * torch.finfo(scores.dtype).eps * (scores * weights).abs().amax(-1, keepdim=True)
    constant = std <= residue
    return centred.masked_fill(constant, 0.0), std.masked_fill(constant, 0.0)


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
    return torch.where(std > STD_THRESHOLD, centred / std.clamp(min=STD_THRESHOLD), centred)


def group_log_policy(
    log_probs: Tensor, old_log_probs: Tensor | None = None, anchor: Anchor = "old", mask: Tensor | None = None
) -> Tensor:
    """Log of the policy over the group, ``log p``: shape ``(B, K)``, ``-inf`` where masked.

    ``anchor="old"`` and ``"none"``: ``softmax(log π)`` (TPO, section 2). ``anchor="ratio"``:
    ``softmax(log π_θ - log π_old)``, uniform at the snapshot whatever the candidates' log-probabilities are.
    """
    logits = _as_float(log_probs)
    if anchor == "ratio":
        if old_log_probs is None:
            raise ValueError('anchor="ratio" needs old_log_probs, the log-probabilities at sampling.')
        logits = logits - _as_float(old_log_probs)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def tpo_target(
    old_log_probs: Tensor,
    scores: Tensor,
    eta: float = 1.0,
    anchor: Anchor = "old",
    std_floor: float = 0.0,
    mask: Tensor | None = None,
) -> Tensor:
    """Target distribution ``q_i ∝ p_i^old · exp(u_i / η)`` over each group (TPO, section 2 and Proposition 1).

    Args:
        old_log_probs: Log-probabilities at sampling, ``(B, K)``.
        scores: Scores, ``(B, K)``.
        eta: Temperature η > 0; small values sharpen the target.
        anchor: ``"old"``: the paper's ``p_old``; ``"ratio"`` and ``"none"``: a uniform anchor.
        std_floor: See :func:`standardize`.
        mask: Candidates that count; an excluded one has ``q = 0``.

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
            tilt = group_log_policy(old_log_probs, mask=mask) + tilt
        elif mask is not None:
            tilt = tilt.masked_fill(~mask, -torch.inf)
        return torch.softmax(tilt, dim=-1)


def tpo_loss(
    log_probs: Tensor,
    target: Tensor,
    old_log_probs: Tensor | None = None,
    anchor: Anchor = "old",
    mask: Tensor | None = None,
) -> Tensor:
    """Cross-entropy ``-Σ_i q_i log p_i`` of each group to its frozen target (TPO, section 2).

    Its gradient on ``log_probs`` is ``p - q``: zero exactly where the policy over the group matches the target. The
    value ends at the target's entropy, not at 0.

    Returns:
        ``(B,)``.
    """
    log_p = group_log_policy(log_probs, old_log_probs, anchor, mask)
    if mask is not None:
        log_p = log_p.masked_fill(~mask, 0.0)
    return -(target.detach() * log_p).sum(-1)


def group_advantages(scores: Tensor, eps: float = 1e-8, mask: Tensor | None = None) -> Tensor:
    """GRPO's advantages: ``(s - mean) / (σ + eps)`` within each group, with the population σ. Shape ``(B, K)``."""
    centred, std = _group_moments(scores, mask)
    return centred / (std + eps)


def grpo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip_range: float = 0.2, beta: float = 0.04
) -> Tensor:
    """GRPO's clipped surrogate with a KL penalty, summed over each group (Shao et al. 2024; TPO, appendix).

    With ``r = log π_θ - log π_old`` clamped to ±20: ``-Σ_i [min(e^r A, clip(e^r, 1 ± ε) A) - β (e^-r + r - 1)]``.

    Args:
        log_probs: ``(B, K)``; the ratio is that of the whole candidate.
        old_log_probs: ``(B, K)``, at sampling.
        advantages: ``(B, K)``.
        clip_range: ε of the clipping.
        beta: Weight of the KL penalty to the sampling policy.

    Returns:
        ``(B,)``.
    """
    log_ratio = (_as_float(log_probs) - _as_float(old_log_probs).detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    advantages = advantages.detach()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_range, 1 + clip_range) * advantages)
    if beta:
        surrogate = surrogate - beta * ((-log_ratio).exp() + log_ratio - 1)
    return -surrogate.sum(-1)


def kl_divergence(q: Tensor, log_p: Tensor) -> Tensor:
    """``KL(q || p)`` over the last dimension, with ``0 log 0 = 0``. Shape ``(B,)``."""
    return (torch.special.xlogy(q, q) - torch.where(q > 0, q * log_p, torch.zeros_like(q))).sum(-1)


def one_hot_scores(actions: Tensor, advantages: Tensor, n_actions: int) -> Tensor:
    """Score vectors of bandit feedback: ``A`` at the sampled action, 0 elsewhere (TPO, section 3).

    Args:
        actions: Sampled action indices, ``(B,)``.
        advantages: Their advantages, ``(B,)``.
        n_actions: Number of actions ``K``.

    Returns:
        ``(B, K)``.
    """
    scores = torch.zeros(actions.shape[0], n_actions, device=advantages.device, dtype=advantages.dtype)
    return scores.scatter_(1, actions.unsqueeze(1), advantages.unsqueeze(1))
