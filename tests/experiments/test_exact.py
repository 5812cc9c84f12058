"""Population updates and steps of a fixed length, in the code that runs."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import pytest
import torch

import tpo_gym  # noqa: F401  (registers the environments)
from tpo_gym.agents import DG, GRPO, REINFORCE, RLOO, TPO, ClippedPG, CrossEntropy, GroupAlgorithm, NormalizedStep

N, A = 20, 10
LAMBDA = math.exp(10 / 3)
PROBABILITIES = torch.linspace(0.02, 0.95, N)


def coefficients(algorithm: type[GroupAlgorithm], p: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """What an update of every context is, as a multiple of e_y - π: the gradient that reaches the optimizer."""
    answers = torch.arange(N) % A
    env: Any = gym.make_vec("tpo_gym/ContextualBandit-v0", N, num_contexts=N, correct_actions=answers)
    model = algorithm("TabularPolicy", env, 1.0, candidates="exact", n_epochs=1, device="cpu", **arguments)
    table = model.policy.action_net.weight
    generator = torch.Generator().manual_seed(0)
    wrong = torch.randn(N, A, generator=generator).scatter(1, answers.unsqueeze(1), -torch.inf).softmax(-1)
    policy = (wrong * (1 - p).unsqueeze(1)).scatter(1, answers.unsqueeze(1), p.unsqueeze(1))
    with torch.no_grad():
        table.copy_(policy.log())
    gradients: list[torch.Tensor] = []
    model.policy.optimizer.register_step_pre_hook(lambda *_: gradients.append(table.grad.clone()))
    model.learn(N)
    direction = torch.zeros(N, A).scatter(1, answers.unsqueeze(1), 1.0) - policy
    update = -N * gradients[0]
    beta = (update * direction).sum(1) / direction.square().sum(1)
    assert torch.allclose(update, beta.unsqueeze(1) * direction, atol=1e-6)
    assert model.num_timesteps == N
    return beta


@pytest.mark.parametrize(
    ("algorithm", "arguments", "expected"),
    [
        (CrossEntropy, {}, lambda p: torch.ones_like(p)),
        (REINFORCE, {"baseline": None}, lambda p: p),
        (REINFORCE, {"baseline": 0.7}, lambda p: p),
        (ClippedPG, {"baseline": None}, lambda p: p),
        (DG, {"baseline": None}, lambda p: p / (1 + p)),
        (DG, {"baseline": None, "eta": 2.0}, lambda p: p * torch.sigmoid(-p.log() / 2)),
        (GRPO, {}, lambda p: (p / (1 - p)).sqrt()),
        (GRPO, {"ratio": "step", "beta": 0.0}, lambda p: (p / (1 - p)).sqrt()),
        (TPO, {}, lambda p: p * (LAMBDA - 1) / (1 - p + LAMBDA * p)),
    ],
)
def test_coefficients(algorithm: type[GroupAlgorithm], arguments: dict[str, Any], expected: Any) -> None:
    ours, exact = coefficients(algorithm, PROBABILITIES, **arguments), expected(PROBABILITIES)
    assert torch.allclose(ours, exact, atol=1e-6, rtol=1e-6)


def test_the_coefficients_at_one_tenth() -> None:
    values = [
        coefficients(algorithm, torch.full((N,), 0.1), **arguments)[0].item()
        for algorithm, arguments in ((TPO, {}), (DG, {"baseline": None}), (GRPO, {}), (CrossEntropy, {}))
    ]
    assert [round(value, 2) for value in values] == [0.73, 0.09, 0.33, 1.0]


def test_exact_mode_learns_and_counts_interactions() -> None:
    model = TPO(
        "TabularPolicy",
        "tpo_gym/ContextualBandit-v0",
        0.1,
        candidates="exact",
        policy_kwargs={"optimizer_class": NormalizedStep},
        seed=0,
    )
    model.learn(300 * 100)
    assert model.num_timesteps == 300 * 100
    assert model.rollout is not None
    assert torch.equal(model.rollout.candidates.observations, torch.arange(100))  # type: ignore[attr-defined]
    assert model.rollout.returns.mean() > 0.5


def test_exact_mode_needs_every_context_once() -> None:
    env: Any = gym.make_vec("tpo_gym/ContextualBandit-v0", 7)
    with pytest.raises(ValueError, match=r"all 100 contexts .* but there are 7 sub-environments: make 100"):
        TPO("TabularPolicy", env, candidates="exact")


@pytest.mark.parametrize(("env", "message"), [("CartPole-v1", "all known"), ("tpo_gym/TokenCopy-v0", "all known")])
def test_exact_mode_needs_a_known_task(env: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TPO("MlpPolicy", env, candidates="exact")


def test_exact_mode_is_refused_where_it_is_not_defined() -> None:
    with pytest.raises(ValueError, match="not defined for this algorithm"):
        RLOO("TabularPolicy", "tpo_gym/ContextualBandit-v0", candidates="exact")


def test_given_contexts() -> None:
    env: Any = gym.make_vec("tpo_gym/ContextualBandit-v0", 6, num_contexts=5)
    observations, _ = env.reset(seed=0, options={"group_size": 2, "contexts": [4, 0, 2]})
    assert observations.tolist() == [4, 4, 0, 0, 2, 2]
    assert torch.equal(env.labels, env.answers[observations])
    for options, message in (
        ({"contexts": [1, 2]}, r"shape \(2,\).*\(3,\)"),
        ({"contexts": [1, 2, 5]}, "holds 5"),
        ({"contexts": [1, 2, 3], "reset_mask": torch.ones(6, dtype=torch.bool)}, "both"),
    ):
        with pytest.raises(ValueError, match=message):
            env.reset(options=options)


def test_steps_have_one_length_over_all_parameters() -> None:
    parameters = [
        torch.nn.Parameter(torch.randn(3, 2)),
        torch.nn.Parameter(torch.randn(4)),
        torch.nn.Parameter(torch.zeros(1)),
    ]
    optimizer = NormalizedStep(parameters, lr=0.3)
    before = [p.detach().clone() for p in parameters]
    gradients = [torch.randn(3, 2) * 1e-12, torch.randn(4) * 1e-12]
    for p, g in zip(parameters, gradients, strict=False):
        p.grad = g
    optimizer.step()
    moved = torch.cat([(b - p.detach()).flatten() for b, p in zip(before, parameters, strict=True)])
    assert moved.norm().item() == pytest.approx(0.3, rel=1e-5)
    direction = torch.cat([g.flatten() for g in (*gradients, torch.zeros(1))])
    assert torch.allclose(moved / 0.3, direction / direction.norm(), atol=1e-5)


def test_a_gradient_of_zero_moves_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    NormalizedStep([parameter], lr=1.0).step()
    assert parameter.tolist() == [1.0, 1.0, 1.0]
