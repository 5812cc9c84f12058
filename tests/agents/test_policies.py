"""Policies: every space, the shapes of predict, and probabilities that are what they say."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecTransposeImage
from torch import nn

from tpo_gym.agents import TPO
from tpo_gym.agents.policies import ActorPolicy, CnnPolicy, MultiInputPolicy, TabularPolicy

VECTOR = spaces.Box(-1, 1, (3,), dtype=np.float32)
IMAGE = spaces.Box(0, 255, (36, 36, 3), dtype=np.uint8)
OBSERVATIONS: dict[str, spaces.Space] = {
    "box": VECTOR,
    "discrete": spaces.Discrete(3, start=-1),
    "multidiscrete": spaces.MultiDiscrete([3, 2], start=[1, -2]),
    "multibinary": spaces.MultiBinary(4),
    "image": IMAGE,
    "dict": spaces.Dict({"image": IMAGE, "state": VECTOR, "place": spaces.Discrete(3, start=-1)}),
}
ACTIONS: dict[str, spaces.Space] = {
    "discrete": spaces.Discrete(3, start=-1),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "shifted multidiscrete": spaces.MultiDiscrete([3, 2], start=[1, -2]),
    "multibinary": spaces.MultiBinary(3),
    "box": spaces.Box(-0.5, np.array([0.5, 2.0], dtype=np.float32)),
    "matrix": spaces.Box(-1, 1, (2, 2)),
    "scalar": spaces.Box(-1, 1, ()),
}
ALIASES = {"image": "CnnPolicy", "dict": "MultiInputPolicy"}


class SpacesEnv(gym.Env):
    """Two steps of random observations; checks every action."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.t += 1
        return self.observation_space.sample(), float(np.sum(action)), self.t == 2, False, {}


def make_model(observation: str, action: str, **kwargs: Any) -> TPO:
    env = SpacesEnv(OBSERVATIONS[observation], ACTIONS[action])
    return TPO(ALIASES.get(observation, "MlpPolicy"), env, group_size=2, n_contexts=2, n_epochs=1, seed=0, **kwargs)


@pytest.mark.parametrize(
    ("observation", "action"), [(name, "discrete") for name in OBSERVATIONS] + [("box", name) for name in ACTIONS]
)
def test_every_space_trains_and_predicts_arrays_of_the_actions_shape(observation: str, action: str) -> None:
    model = make_model(observation, action).learn(17)
    space, shape = ACTIONS[action], ACTIONS[action].shape
    one = OBSERVATIONS[observation].sample()
    for size in (1, 5):
        batch: Any = (
            {key: np.stack([value] * size) for key, value in one.items()}
            if isinstance(one, dict)
            else np.stack([one] * size)
        )
        for deterministic in (True, False):
            actions, state = model.predict(batch, deterministic=deterministic)
            assert state is None
            assert actions.shape == (size, *shape)
            assert all(space.contains(row.astype(space.dtype)) for row in actions)
    single, _ = model.predict(one, deterministic=True)
    assert isinstance(single, np.ndarray)
    assert single.shape == shape


def test_images_are_transposed_and_learned_from() -> None:
    model = make_model("image", "discrete")
    assert isinstance(model.env, VecTransposeImage)
    before = [parameter.clone() for parameter in model.policy.parameters()]
    model.learn(17)
    assert isinstance(model.policy, CnnPolicy)
    assert all(not torch.equal(*pair) for pair in zip(before, model.policy.parameters(), strict=True))


def test_an_observation_space_with_a_start_is_told_apart() -> None:
    space = spaces.Discrete(3, start=-1)
    values = torch.tensor([-1, 0, 1])
    table = TabularPolicy(space, spaces.Discrete(2), lambda _: 1e-3, init_std=1.0)
    assert len(torch.unique(table.all_log_probs(values), dim=0)) == 3
    nested = MultiInputPolicy(spaces.Dict({"place": space, "state": VECTOR}), spaces.Discrete(2), lambda _: 1e-3)
    assert len(torch.unique(nested.all_log_probs({"place": values, "state": torch.zeros(3, 3)}), dim=0)) == 3


@pytest.mark.parametrize("action", ["discrete", "shifted multidiscrete", "multibinary"])
def test_the_frequency_of_an_action_is_the_exponential_of_its_log_probability(action: str) -> None:
    torch.manual_seed(0)
    policy = ActorPolicy(VECTOR, ACTIONS[action], lambda _: 1e-3, ortho_init=False)
    n = 40_000
    obs = torch.tensor([[0.3, -0.7, 0.5]]).expand(n, -1)
    with torch.no_grad():
        actions, log_probs = policy(obs)
        candidates, candidate_log_probs = policy.sample_candidates(obs[:2], 20)
    values, which, counts = torch.unique(actions, dim=0, return_inverse=True, return_counts=True)
    assert len(values) == {"discrete": 3, "shifted multidiscrete": 6, "multibinary": 8}[action]
    probabilities = torch.stack([log_probs[which == i][0].exp() for i in range(len(values))])
    torch.testing.assert_close(probabilities.sum(), torch.tensor(1.0))
    torch.testing.assert_close(counts / n, probabilities, rtol=0, atol=4 * (0.25 / n) ** 0.5)
    again, _ = policy.candidate_log_probs(obs[:2], candidates)
    torch.testing.assert_close(again, candidate_log_probs)


def test_log_probabilities_of_a_box_are_the_gaussians() -> None:
    policy = ActorPolicy(VECTOR, ACTIONS["box"], lambda _: 1e-3, log_std_init=0.3)
    obs = torch.randn(7, 3)
    actions, log_probs = policy(obs)
    mean, std = policy._head(obs), policy.log_std.exp()
    expected = (-0.5 * ((actions - mean) / std) ** 2 - policy.log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
    torch.testing.assert_close(log_probs, expected)


@pytest.mark.parametrize("observation", ["box", "discrete"])
def test_log_probabilities_are_float32_when_the_network_is_bf16(observation: str) -> None:
    policy = ActorPolicy(OBSERVATIONS[observation], spaces.Discrete(5), lambda _: 1e-3).to(torch.bfloat16)
    obs = torch.randn(4, 3) if observation == "box" else torch.tensor([-1, 0, 1, 1])
    log_probs = policy.all_log_probs(obs)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(4), rtol=0, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = ActorPolicy(VECTOR, ACTIONS["box"], lambda _: 1e-3)
        assert mixed(torch.randn(4, 3))[1].dtype == torch.float32


def test_dropout_and_batch_norm_rest_in_predict() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.norm(x))

    model = TPO(
        "MlpPolicy",
        SpacesEnv(VECTOR, ACTIONS["box"]),
        policy_kwargs={"net_arch": [8], "activation_fn": Noisy, "ortho_init": False},
        group_size=2,
        n_contexts=2,
        seed=0,
    ).learn(17)
    buffers = [buffer.clone() for buffer in model.policy.buffers()]
    obs = np.ones(3, dtype=np.float32)
    first, _ = model.predict(obs, deterministic=True)
    model.policy.set_training_mode(True)
    for _ in range(100):
        assert np.array_equal(model.predict(obs, deterministic=True)[0], first)
    assert buffers
    assert all(torch.equal(*pair) for pair in zip(buffers, model.policy.buffers(), strict=True))


@pytest.mark.parametrize("name", ["use_sde", "squash_output"])
def test_state_dependent_noise_and_squashing_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=True.*Leave {name} out"):
        make_model("box", "box", policy_kwargs={name: True})


@pytest.mark.parametrize("space", [spaces.MultiBinary([2, 2]), spaces.Tuple([spaces.Discrete(2)])])
def test_actions_that_sb3s_distributions_do_not_know_are_refused(space: spaces.Space) -> None:
    if isinstance(space, spaces.Tuple):
        with pytest.raises(AssertionError, match="only supports"):
            TPO("MlpPolicy", SpacesEnv(VECTOR, space), group_size=2, n_contexts=2)
        return
    with pytest.raises(ValueError, match="cannot act in"):
        TPO("MlpPolicy", SpacesEnv(VECTOR, space), group_size=2, n_contexts=2)


def test_a_dummy_vec_env_of_images_works_with_a_channel_first_space() -> None:
    space = spaces.Box(0, 255, (3, 36, 36), dtype=np.uint8)
    vec = DummyVecEnv([lambda: SpacesEnv(space, ACTIONS["discrete"])] * 4)
    assert TPO("CnnPolicy", vec, group_size=2, seed=0).learn(8).num_timesteps == 8
