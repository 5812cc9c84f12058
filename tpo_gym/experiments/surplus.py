"""What a method does to the probability of the label beyond a one-vs-rest correction (section 3.3, appendix C)."""

from __future__ import annotations

import torch
from torch import Tensor

from tpo_gym.agents.collectors import baseline_value
from tpo_gym.agents.group_algorithm import GroupAlgorithm
from tpo_gym.agents.objectives import one_hot_scores
from tpo_gym.agents.rollouts import Evaluation, GroupRollout, StateCandidates

EDGES = (0.25, 0.5, 0.75)
"""Inner edges of the bins of wrong-class concentration."""
BIN_NAMES = ("0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1")


def expected_update(model: GroupAlgorithm, log_policy: Tensor, labels: Tensor) -> Tensor:
    """The step on the logits that the model's loss asks for, averaged over the sampled action by trying each.

    Args:
        model: A model with candidates "all_actions"; its objective is used, not its policy.
        log_policy: Log-probabilities of all actions, ``(N, A)``.
        labels: Right action of each context, ``(N,)``.

    Returns:
        Minus the gradient of each context's loss, ``(N, A)``.
    """
    n_contexts, n_actions = log_policy.shape
    total = torch.zeros_like(log_policy)
    for action in range(n_actions):
        index = torch.full_like(labels, action)
        reward = (labels == action).to(log_policy.dtype)
        baseline = baseline_value(model.baseline, log_policy.exp(), reward)
        rollout = GroupRollout(
            StateCandidates(log_policy, None, n_contexts, n_actions),
            log_policy.unsqueeze(-1),
            one_hot_scores(index, reward - baseline, n_actions),
            returns=reward,
            behaviour=index,
        )
        logits = log_policy.detach().clone().requires_grad_()
        current = torch.log_softmax(logits, -1)
        losses = model.group_losses(Evaluation(current.unsqueeze(-1), current.new_zeros(())), model.freeze(rollout))
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        total -= log_policy[:, action : action + 1].exp() * gradient
    return total


def surplus_gain(model: GroupAlgorithm, log_policy: Tensor, labels: Tensor) -> Tensor:
    """First-order gain in ``p_y`` minus the gain of the symmetric one-vs-rest surrogate, ``(N,)``.

    The surrogate is ``β(p_y) (e_y - π)``, with the ``β`` that the method has where the wrong classes share their
    probability equally.
    """
    rows, n_actions = labels.unsqueeze(1), log_policy.shape[1]
    p = log_policy.exp().gather(1, rows)
    direction = _direction(log_policy, labels)
    gain = p.squeeze(1) * (direction * expected_update(model, log_policy, labels)).sum(1)
    rest = torch.log1p(-p) - torch.log(log_policy.new_tensor(n_actions - 1))
    symmetric = rest.expand(-1, n_actions).scatter(1, rows, log_policy.gather(1, rows))
    even = _direction(symmetric, labels)
    beta = (even * expected_update(model, symmetric, labels)).sum(1) / even.square().sum(1)
    return gain - p.squeeze(1) * beta * direction.square().sum(1)


def surplus_by_concentration(model: GroupAlgorithm, log_policy: Tensor, labels: Tensor) -> Tensor:
    """Mean surplus gain of the misclassified contexts in each bin of concentration, ``(4,)``; NaN for an empty bin.

    The concentration is the share of the wrong classes' probability that the likeliest of them has.
    """
    wrong = log_policy.argmax(1) != labels
    log_policy, labels = log_policy[wrong].double(), labels[wrong]
    surplus = surplus_gain(model, log_policy, labels)
    policy = log_policy.exp()
    p = policy.gather(1, labels.unsqueeze(1))
    rival = policy.scatter(1, labels.unsqueeze(1), 0.0).amax(1)
    bins = torch.bucketize(rival / (1 - p.squeeze(1)), policy.new_tensor(EDGES), right=True)
    return torch.stack([surplus[bins == i].mean() for i in range(len(EDGES) + 1)])


def _direction(log_policy: Tensor, labels: Tensor) -> Tensor:
    """``e_y - π``."""
    return torch.zeros_like(log_policy).scatter(1, labels.unsqueeze(1), 1.0) - log_policy.exp()
