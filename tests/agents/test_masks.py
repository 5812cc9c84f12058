"""Action masks: never sampled, and in every log-probability."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

from tpo_gym.agents import TPO
from tpo_gym.agents.masks import apply_masks, check_masks, sample_allowed
from tpo_gym.agents.objectives import tpo_target
from tpo_gym.agents.policies import ActorPolicy

SPACES = {
    "discrete": spaces.Discrete(4, start=2),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "multibinary": spaces.MultiBinary(3),
}
OBSERVATIONS = spaces.Box(-1, 1, (2,), dtype=np.float32)


def is_allowed(action: Any, mask: np.ndarray, space: spaces.Space) -> bool:
    """What a mask means, written out once more."""
    if isinstance(space, spaces.Discrete):
        return bool(mask[int(action) - space.start])
    if isinstance(space, spaces.MultiDiscrete):
        return bool(mask[int(action[0])] and mask[3 + int(action[1])])
    return all(mask[2 * i + int(bit)] for i, bit in enumerate(action))


class MaskedEnv(gym.Env):
    """Three steps with a mask that changes; raises on a forbidden action."""

    def __init__(self, kind: str = "discrete", dead_at: int | None = None, horizon: int = 3) -> None:
        self.observation_space, self.action_space = OBSERVATIONS, SPACES[kind]
        self.dead_at, self.horizon, self.t = dead_at, horizon, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        self._draw()
        return self._obs, {}

    def _draw(self) -> None:
        self._obs = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        entries = {"discrete": 4, "multidiscrete": 5, "multibinary": 6}
        kind = next(name for name, space in SPACES.items() if space == self.action_space)
        self._mask = self.np_random.random(entries[kind]) < 0.4
        blocks = {"discrete": [[0, 1, 2, 3]], "multidiscrete": [[0, 1, 2], [3, 4]]}.get(kind, [[0, 1], [2, 3], [4, 5]])
        for block in blocks:
            self._mask[self.np_random.choice(block)] = True

    def action_masks(self) -> np.ndarray:
        return np.zeros_like(self._mask) if self.t == self.dead_at else self._mask

    def step(self, action: Any) -> Any:
        if not is_allowed(action, self._mask, self.action_space):
            raise AssertionError(f"{action} is forbidden by {self._mask}")
        reward = float(np.sum(action))
        self.t += 1
        self._draw()
        return self._obs, reward, self.t == self.horizon, False, {}


@pytest.mark.parametrize("kind", SPACES)
def test_a_forbidden_action_is_never_taken_in_training(kind: str) -> None:
    model = TPO("MlpPolicy", MaskedEnv(kind), group_size=4, n_contexts=4, learning_rate=0.05, seed=0)
    model.learn(400)
    candidates = model.rollout.candidates
    assert candidates.action_masks is not None
    for action, mask in zip(candidates.actions.numpy(), candidates.action_masks.numpy(), strict=True):
        assert is_allowed(action, mask, SPACES[kind])
    assert torch.isfinite(model.rollout.old_log_probs).all()


@pytest.mark.parametrize("kind", SPACES)
def test_the_log_probability_at_sampling_is_the_one_before_the_first_update(kind: str) -> None:
    model = TPO("MlpPolicy", MaskedEnv(kind), group_size=4, n_contexts=4, n_epochs=1, learning_rate=1e-12, seed=0)
    model.learn(1)
    evaluated = model.rollout.candidates.evaluate(model.policy).log_probs
    torch.testing.assert_close(evaluated, model.rollout.old_log_probs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("candidates", ["actions", "all_actions"])
def test_masks_with_single_actions(candidates: str) -> None:
    env = MaskedEnv(horizon=1 if candidates == "all_actions" else 3)
    model = TPO("MlpPolicy", env, candidates=candidates, group_size=4, n_contexts=8, learning_rate=0.05, seed=0)
    model.learn(300)
    rollout = model.rollout
    assert rollout.candidates.action_masks.shape == (rollout.n_groups, 4)
    assert all(torch.isfinite(parameter).all() for parameter in model.policy.parameters())


@pytest.mark.parametrize("anchor", ["old", "none"])
def test_forbidden_actions_have_no_vote_among_all_actions(anchor: Any) -> None:
    model = TPO(
        "MlpPolicy", MaskedEnv(horizon=1), candidates="all_actions", n_contexts=32, anchor=anchor, n_epochs=1, seed=0
    ).learn(1)
    rollout, target = model.rollout, model._frozen["target"]
    allowed = rollout.candidates.action_masks
    assert not allowed.all()
    for scores, mask, q, old in zip(rollout.scores, allowed, target, rollout.old_log_probs, strict=True):
        expected = tpo_target(old[mask][None], scores[mask][None], anchor=anchor)[0]
        assert (q[~mask] == 0).all()
        torch.testing.assert_close(q[mask], expected)


@pytest.mark.parametrize(("wrap", "kwargs"), [(DummyVecEnv, {}), (SubprocVecEnv, {"start_method": "fork"})])
def test_masks_through_vector_environments(wrap: Any, kwargs: dict[str, str]) -> None:
    vec = wrap([lambda: Monitor(MaskedEnv(horizon=2)) for _ in range(4)], **kwargs)
    model = TPO("MlpPolicy", vec, group_size=2, seed=0).learn(50)
    assert model.rollout.candidates.action_masks is not None
    vec.close()


def test_masks_through_gymnasium_vector_environments() -> None:
    vec = gym.vector.SyncVectorEnv([lambda: MaskedEnv()] * 4, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    model = TPO("MlpPolicy", vec, group_size=2, seed=0).learn(50)
    assert model.rollout.candidates.action_masks is not None


def test_a_state_without_actions_names_the_sub_environment() -> None:
    vec = DummyVecEnv([MaskedEnv, MaskedEnv, lambda: MaskedEnv(dead_at=1), MaskedEnv])
    with pytest.raises(ValueError, match=r"Sub-environment 2 allows no action.*[Aa]llow at least one"):
        TPO("MlpPolicy", vec, group_size=2, seed=0).learn(50)


def test_masks_need_actions_that_can_be_counted() -> None:
    class Continuous(MaskedEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Box(-1, 1, (2,))

    with pytest.raises(ValueError, match="cannot be masked"):
        TPO("MlpPolicy", Continuous(), group_size=2, n_contexts=2)


def test_predict_with_masks() -> None:
    model = TPO("MlpPolicy", MaskedEnv(), group_size=2, n_contexts=2, seed=0)
    mask = np.array([False, False, True, False])
    for deterministic in (True, False):
        one, _ = model.predict(np.zeros(2, np.float32), deterministic=deterministic, action_masks=mask)
        assert one.shape == ()
        assert one == 4  # the space starts at 2
        many, _ = model.predict(np.zeros((5, 2), np.float32), action_masks=np.tile(mask, (5, 1)))
        assert many.tolist() == [4] * 5
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        model.predict(np.zeros(2, np.float32), action_masks=np.ones(3, bool))
    with pytest.raises(ValueError, match="allows no action"):
        model.policy.predict(np.zeros(2, np.float32), action_masks=np.zeros(4, bool))


@pytest.mark.parametrize("kind", SPACES)
def test_masked_probabilities_are_those_of_the_allowed_actions_renormalized(kind: str) -> None:
    space = SPACES[kind]
    policy = ActorPolicy(OBSERVATIONS, space, lambda _: 1e-3, ortho_init=False)
    env = MaskedEnv(kind)
    env.reset(seed=3)
    mask = env.action_masks()
    actions = {tuple(np.atleast_1d(sample_allowed(None, space, np.random.default_rng(i))).tolist()) for i in range(300)}
    table = torch.tensor(sorted(actions)).squeeze(-1)
    obs = torch.as_tensor(env._obs).expand(len(table), -1)
    free, _ = policy.evaluate_actions(obs, table)
    masked, entropy = policy.evaluate_actions(obs, table, torch.as_tensor(mask).expand(len(table), -1))
    allowed = torch.tensor([is_allowed(action, mask, space) for action in table.numpy()])
    expected = torch.where(allowed, free.exp(), torch.zeros(())) / free.exp()[allowed].sum()
    torch.testing.assert_close(masked.exp(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(entropy[0], -torch.special.xlogy(expected, expected).sum(), rtol=1e-4, atol=1e-5)


def test_gradients_stay_finite_under_masks() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    masks = torch.as_tensor(check_masks([[1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 1, 1]], spaces.Discrete(4), 3))
    log_probs = torch.log_softmax(apply_masks(logits, masks, spaces.Discrete(4)), -1)
    (log_probs.exp() * log_probs).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~masks] == 0).all()


@pytest.mark.parametrize("kind", SPACES)
def test_masked_distributions_are_those_of_sb3_contrib(kind: str) -> None:
    distributions = pytest.importorskip("sb3_contrib.common.maskable.distributions")
    space = SPACES[kind]
    policy = ActorPolicy(OBSERVATIONS, space, lambda _: 1e-3, ortho_init=False)
    env = MaskedEnv(kind)
    env.reset(seed=1)
    obs, mask = torch.as_tensor(env._obs)[None], torch.as_tensor(env.action_masks())[None]
    action, log_prob = policy(obs, action_masks=mask)
    logits = policy._head(obs).detach()
    if kind == "multibinary":  # sb3-contrib has two logits per bit
        logits = torch.stack([torch.zeros_like(logits), logits], -1).flatten(1)
    theirs = distributions.make_masked_proba_distribution(space).proba_distribution(logits)
    theirs.apply_masking(mask.numpy())
    torch.testing.assert_close(theirs.log_prob(policy._from_env(action)), log_prob.detach())


def test_the_action_masker_of_sb3_contrib() -> None:
    wrappers = pytest.importorskip("sb3_contrib.common.wrappers")
    env = wrappers.ActionMasker(gym.make("CartPole-v1"), lambda _: np.array([False, True]))
    model = TPO("MlpPolicy", env, group_size=2, n_contexts=2, seed=0).learn(20)
    assert (model.rollout.candidates.actions == 1).all()
