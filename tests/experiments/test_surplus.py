"""MNIST's mechanism by enumeration, against the closed forms of the paper's appendix C."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tpo_gym.agents import GroupAlgorithm
from tpo_gym.experiments.build import make_model
from tpo_gym.experiments.registry import EXPERIMENTS
from tpo_gym.experiments.surplus import expected_update, surplus_by_concentration, surplus_gain

N, A = 40, 10
LAMBDA = math.exp(10 / 3)


@pytest.fixture(scope="module")
def models() -> dict[str, GroupAlgorithm]:
    return {cell.method: make_model(cell.settings, 0) for cell in EXPERIMENTS["mnist_mechanism"].cells()}


@pytest.fixture
def problem() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(N, A, generator=generator, dtype=torch.float64)
    return torch.log_softmax(logits, -1), torch.randint(A, (N,), generator=generator)


def direction(log_policy: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(labels, A) - log_policy.exp()


def symmetric(p: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    rest = ((1 - p) / (A - 1)).unsqueeze(1).expand(-1, A)
    return rest.scatter(1, labels.unsqueeze(1), p.unsqueeze(1)).log()


def test_pg_and_group_pg(models: dict[str, GroupAlgorithm], problem: Any) -> None:
    log_policy, labels = problem
    p = log_policy.exp().gather(1, labels.unsqueeze(1))
    pg, group_pg = (expected_update(models[name], *problem) for name in ("PG", "Group PG"))
    assert torch.allclose(pg, p * direction(*problem), atol=1e-9)
    assert torch.allclose(group_pg, 6 * pg, atol=1e-6)


def test_tpo(models: dict[str, GroupAlgorithm], problem: Any) -> None:
    log_policy, labels = problem
    policy = log_policy.exp()
    expected = torch.zeros_like(policy)
    for a in range(A):
        sign = torch.where(labels == a, 1.0, -1.0).double().unsqueeze(1)
        tilted = policy.clone()
        tilted[:, a] *= (sign.squeeze(1) * 10 / 3).exp()
        expected += policy[:, a : a + 1] * (tilted / tilted.sum(1, keepdim=True) - policy)
    assert torch.allclose(expected_update(models["TPO"], *problem), expected, atol=1e-6)


def test_dg(models: dict[str, GroupAlgorithm], problem: Any) -> None:
    log_policy, labels = problem
    policy = log_policy.exp()
    advantages = torch.nn.functional.one_hot(labels, A) - policy.square().sum(1, keepdim=True)
    weights = policy * advantages * torch.sigmoid(-advantages * log_policy)
    expected = weights - policy * weights.sum(1, keepdim=True)
    assert torch.allclose(expected_update(models["DG"], *problem), expected, atol=1e-9)


def test_symmetric_coefficients(models: dict[str, GroupAlgorithm]) -> None:
    """Appendix C's β of the symmetric one-vs-rest limit."""
    p = torch.linspace(0.01, 0.9, N, dtype=torch.float64)
    labels = torch.arange(N) % A
    q = (1 - p) / 9
    b = p**2 + 9 * q**2
    plus, gamma = p * (LAMBDA - 1) / (1 - p + LAMBDA * p), q * (LAMBDA - 1) / (LAMBDA * (1 - q) + q)
    expected = {
        "TPO": p * plus + p * gamma,
        "DG": p * (1 - b) * torch.sigmoid(-(1 - b) * p.log()) + p * b * torch.sigmoid(b * q.log()),
        "PG": p,
        "Group PG": 6 * p,
    }
    log_policy = symmetric(p, labels)
    v = direction(log_policy, labels)
    for name, beta in expected.items():
        update = expected_update(models[name], log_policy, labels)
        assert torch.allclose(update, beta.unsqueeze(1) * v, atol=1e-6), name


def test_surplus(models: dict[str, GroupAlgorithm], problem: Any) -> None:
    log_policy, labels = problem
    policy = log_policy.exp()
    p = policy.gather(1, labels.unsqueeze(1)).squeeze(1)
    q = (1 - p) / 9
    v = direction(*problem)
    plus, gamma = p * (LAMBDA - 1) / (1 - p + LAMBDA * p), q * (LAMBDA - 1) / (LAMBDA * (1 - q) + q)
    surrogate = p * (p * plus + p * gamma) * v.square().sum(1)
    gain = p * (v * expected_update(models["TPO"], *problem)).sum(1)
    assert torch.allclose(surplus_gain(models["TPO"], *problem), gain - surrogate, atol=1e-6)
    for name in ("PG", "Group PG"):
        assert torch.allclose(surplus_gain(models[name], *problem), torch.zeros(N, dtype=torch.float64), atol=1e-9)


def test_bins_hold_misclassified_contexts_only(models: dict[str, GroupAlgorithm]) -> None:
    # Concentrations 1/9 and 0.9; the third context is right and does not count.
    even = symmetric(torch.tensor([0.05], dtype=torch.float64), torch.tensor([0]))
    peaked = torch.full((1, A), 0.01, dtype=torch.float64)
    peaked[0, :2] = torch.tensor([0.1, 0.82])
    right = torch.full((1, A), 0.01, dtype=torch.float64)
    right[0, 0] = 0.91
    log_policy = torch.cat([even, peaked.log(), right.log()])
    binned = surplus_by_concentration(models["TPO"], log_policy, torch.zeros(3, dtype=torch.int64))
    each = surplus_gain(models["TPO"], log_policy, torch.zeros(3, dtype=torch.int64))
    assert binned[[0, 3]].tolist() == pytest.approx(each[:2].tolist(), abs=1e-9)
    assert binned[1:3].isnan().all()
    assert each[1] > 0.05  # where the mistake is concentrated, TPO gains more than one-vs-rest
