"""Optimizer steps on a rollout batch, and its gradients in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpo_gym.agents.mail import Mail
from tpo_gym.agents.optimizers import take_step, total_norm
from tpo_gym.agents.rollouts import Evaluation, GroupRollout

if TYPE_CHECKING:
    from tpo_gym.agents.group_algorithm import GroupAlgorithm


def fit(model: GroupAlgorithm, rollout: GroupRollout, frozen: dict[str, Tensor], weights: Tensor) -> Tensor:
    """Take ``n_epochs`` optimizer steps on a rollout batch.

    Returns:
        The means over the epochs of the loss, the gradient's norm and the policy's entropy, ``(3,)``.
    """
    captured = model._captured if model._captured is not None and model._captured.prepared is not None else None
    epochs = []
    for _ in range(model.n_epochs):
        if captured is not None:
            loss, entropy, norm, _ = captured.backward(rollout)
        else:
            loss, entropy, norm = _backward_whole(model, rollout, frozen, weights)
        if model.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(model.policy.parameters(), model.max_grad_norm, norm)
        if Mail.is_here(norm):  # elsewhere that would wait for the device: checked after the epochs
            model._check_gradient(float(norm))
        if captured is not None:
            captured.step()
        else:
            take_step(model.policy.optimizer)
        epochs.append(torch.stack([loss, norm, entropy]))
        model._n_updates += 1
    return epochs[0] if len(epochs) == 1 else torch.stack(epochs).mean(0)


def _backward_whole(
    model: GroupAlgorithm, rollout: GroupRollout, frozen: dict[str, Tensor], weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the parameters their gradients; returns the loss, the entropy and the gradients' norm, detached."""
    parameters = list(model.policy.parameters())
    for parameter in parameters:
        parameter.grad = None  # as `zero_grad`, which takes longer
    sampled, model._sampled = model._sampled, None
    if sampled is not None:  # the pass that sampled serves the first epoch too
        loss, entropy = batch_loss(model, sampled, rollout, frozen, weights)
        loss.backward()
    else:
        loss, entropy = model._processes.accumulate_gradients(model, rollout, frozen, weights)
    norm = total_norm([p.grad for p in parameters if p.grad is not None])
    return loss.detach(), entropy.detach(), norm


def accumulate_gradients(
    model: GroupAlgorithm, rollout: GroupRollout, frozen: dict[str, Tensor], weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Add the gradient of ``Σ_g weights_g · loss_g - ent_coef · entropy`` to the policy's parameters.

    At most ``model.batch_size`` candidates are computed at once, whole groups where possible. A group that is larger is
    split: the loss's gradient on the group's log-probabilities comes from a pass without gradient, then
    ``Σ gradient · log π`` is backpropagated part by part, which is exact.

    Returns:
        The loss and the policy's mean entropy, detached scalars.
    """
    candidates, limit = rollout.candidates, model.batch_size
    unit_candidates = candidates.groups_per_unit * candidates.group_size
    splittable = hasattr(candidates, "part")
    if limit is None or candidates.n_units * unit_candidates <= limit:
        return _backward(model, rollout, frozen, weights, None)
    per_chunk = max(1, limit // unit_candidates)
    units = torch.arange(candidates.n_units, device=weights.device)
    loss = torch.zeros((), device=weights.device)
    entropy = torch.zeros((), device=weights.device)
    for chunk in units.split(per_chunk):
        if candidates.group_size > limit and splittable:
            chunk_loss, chunk_entropy = _backward_in_parts(model, rollout, frozen, weights, chunk, limit)
        else:
            chunk_loss, chunk_entropy = _backward(model, rollout, frozen, weights, chunk)
        loss += chunk_loss
        entropy += chunk_entropy * (len(chunk) / len(units))
    return loss, entropy


def batch_loss(
    model: GroupAlgorithm,
    policy: Any,
    rollout: GroupRollout,
    frozen: dict[str, Tensor],
    weights: Tensor,
    units: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``Σ_g weights_g · loss_g - ent_coef · entropy`` of the groups of these units (all: ``None``), and the entropy."""
    evaluation = rollout.candidates.evaluate(policy, units)
    losses = model.group_losses(evaluation, _rows(rollout, frozen, units))
    loss = (losses * rollout.groups_of(weights, units)).sum()
    if model.ent_coef:
        share = rollout.share if units is None else rollout.share * len(units) / rollout.candidates.n_units
        loss = loss - model.ent_coef * share * evaluation.entropy
    return loss, evaluation.entropy


@torch.no_grad()
def current_log_probs(model: GroupAlgorithm, rollout: GroupRollout) -> Tensor:
    """Log-probabilities of all candidates under the current policy, ``(B, K)``, within the same memory bound."""
    candidates = rollout.candidates
    model.policy.set_training_mode(False)
    if model.batch_size is None:
        return candidates.evaluate(model.policy).log_probs
    per_chunk = max(1, model.batch_size // (candidates.groups_per_unit * candidates.group_size))
    units = torch.arange(candidates.n_units, device=rollout.scores.device)
    if candidates.group_size > model.batch_size and hasattr(candidates, "part"):
        parts = _parts(candidates, model.batch_size)
        return torch.cat([torch.cat([p.evaluate(model.policy, u).log_probs for p in parts], 1) for u in units.split(1)])
    return torch.cat([candidates.evaluate(model.policy, chunk).log_probs for chunk in units.split(per_chunk)])


def _parts(candidates: Any, limit: int) -> list[Any]:
    """The candidates of every group in parts of at most ``limit``."""
    return [
        candidates.part(start, min(start + limit, candidates.group_size))
        for start in range(0, candidates.group_size, limit)
    ]


def _rows(rollout: GroupRollout, frozen: dict[str, Tensor], units: Tensor | None) -> dict[str, Tensor]:
    return {name: rollout.groups_of(value, units) for name, value in frozen.items()}


def _backward(
    model: GroupAlgorithm, rollout: GroupRollout, frozen: dict[str, Tensor], weights: Tensor, units: Tensor | None
) -> tuple[Tensor, Tensor]:
    compiled = model._compiled_loss if model._captured is None else None
    loss, entropy = (compiled or batch_loss)(model, model.policy, rollout, frozen, weights, units)
    loss.backward()
    return loss.detach(), entropy.detach()


def _backward_in_parts(
    model: GroupAlgorithm, rollout: GroupRollout, frozen: dict[str, Tensor], weights: Tensor, units: Tensor, limit: int
) -> tuple[Tensor, Tensor]:
    parts = _parts(rollout.candidates, limit)
    shares = [part.group_size / rollout.group_size for part in parts]
    with torch.no_grad():
        pieces = [part.evaluate(model.policy, units) for part in parts]
    log_probs = torch.cat([piece.step_log_probs for piece in pieces], 1).requires_grad_()
    entropy = torch.stack([share * piece.entropy for share, piece in zip(shares, pieces, strict=True)]).sum()
    losses = model.group_losses(Evaluation(log_probs, entropy), _rows(rollout, frozen, units))
    loss = (losses * rollout.groups_of(weights, units)).sum()
    (gradient,) = torch.autograd.grad(loss, log_probs)
    bonus = model.ent_coef * rollout.share * len(units) / rollout.candidates.n_units
    for part, share, slope in zip(parts, shares, gradient.split(limit, dim=1), strict=True):
        evaluation = part.evaluate(model.policy, units)
        ((evaluation.step_log_probs * slope).sum() - bonus * share * evaluation.entropy).backward()
    return loss.detach(), entropy
