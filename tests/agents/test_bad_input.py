"""Bad input: each an error that says what was wrong, with which value, and what to do."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import ActorCriticPolicy

from tpo_gym import agents
from tpo_gym.agents import GRPO, TPO


def bandits(num_envs=16):
    return gym.make_vec("tpo_gym/ContextualBandit-v0", num_envs=num_envs)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        (dict(group_size=1), "group_size=1: TPO compares .* needs at least 2"),
        (dict(group_size=0), "group_size must be a positive integer, got 0"),
        (dict(group_size=2.5), "group_size must be a positive integer, got 2.5"),
        (dict(group_size=5, candidates="episodes"), "16 sub-env.* group_size=5: the remainder is 1.* 15 or 20"),
        (dict(candidates="episode"), "Unknown candidates 'episode'"),
        (dict(n_epochs=0), "n_epochs must be a positive integer, got 0"),
        (dict(n_contexts=0), "n_contexts must be a positive integer, got 0"),
        (dict(batch_size=0), "batch_size must be a positive integer or None"),
        (dict(eta=0), "eta must be positive, got 0"),
        (dict(eta=float("nan")), "eta must be positive, got nan"),
        (dict(anchor="new"), "Unknown anchor 'new'"),
        (dict(anchor="ratio"), 'anchor="ratio" is for sampled candidates'),
        (dict(max_grad_norm=-1), "max_grad_norm must be positive or None"),
        (dict(std_floor=-0.1), "std_floor must not be negative"),
        (dict(baseline="mean"), "baseline must be a number"),
        (dict(lookahead=-1), "lookahead must be a number of steps"),
    ],
)
def test_arguments_of_tpo(kwargs, match):
    with pytest.raises(ValueError, match=match):
        TPO("MlpPolicy", bandits(), **kwargs)


@pytest.mark.parametrize(
    ("cls", "kwargs", "match"),
    [
        ("GRPO", dict(clip_range=0), "clip_range must lie between 0 and 1"),
        ("GRPO", dict(beta=-1), "beta must not be negative"),
        ("GRPO", dict(ratio="token"), "Unknown ratio 'token'"),
        ("GRPO", dict(scale="mad"), "Unknown scale 'mad'"),
        ("GRPO", dict(clip_range_high=-0.1), "clip_range_high must be positive"),
        ("AWR", dict(beta=0), "beta must be positive"),
        ("REBEL", dict(eta=0), "eta must be positive"),
        ("DG", dict(eta=-1), "eta must be positive"),
        ("REINFORCE", dict(credit="all"), "Unknown credit 'all'"),
        ("ClippedPG", dict(clip_range=1.5), "clip_range must lie between 0 and 1"),
        ("RLOO", dict(candidates="all_actions"), "not defined for this algorithm"),
        ("REINFORCE", dict(candidates="actions"), "not defined for this algorithm"),
        ("REINFORCE", dict(candidates="episodes", baseline="expected"), 'baseline="expected"'),
    ],
)
def test_arguments_of_the_others(cls, kwargs, match):
    with pytest.raises(ValueError, match=match):
        getattr(agents, cls)("MlpPolicy", bandits(), **kwargs)


def test_all_actions_need_one_step_and_discrete_actions():
    tokens = gym.make_vec("tpo_gym/TokenCopy-v0", num_envs=8, sequence_length=3)
    with pytest.raises(ValueError, match="one-step tasks, but episodes last 3 steps"):
        TPO("MlpPolicy", tokens, candidates="all_actions")
    with pytest.raises(ValueError, match="needs Discrete actions, got Box"):
        TPO("MlpPolicy", "Pendulum-v1", candidates="all_actions")
    model = TPO("MlpPolicy", "CartPole-v1", candidates="all_actions")
    with pytest.raises(ValueError, match="episodes went on"):
        model.learn(10)


def test_a_policy_that_cannot_serve_the_space():
    with pytest.raises(ValueError, match="TabularPolicy needs Discrete observations"):
        TPO("TabularPolicy", "CartPole-v1")
    with pytest.raises(ValueError, match="transformer reads token tasks"):
        TPO("TransformerPolicy", "CartPole-v1")
    with pytest.raises(ValueError, match="Policy ResNet unknown"):
        TPO("ResNet", bandits())
    with pytest.raises(TypeError, match=r"subclass of tpo_gym\.agents\.ActorPolicy"):
        TPO(ActorCriticPolicy, bandits())


def test_labels_are_needed():
    with pytest.raises(ValueError, match="`labels` property"):
        agents.CrossEntropy("MlpPolicy", gym.make_vec("tpo_gym/TokenCopy-v0", num_envs=4))


class BadReward(gym.Env):
    """Three steps; the reward of the last one is broken in one of 16 sub-environments."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, reward):
        self.reward = reward

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self.t += 1
        reward = self.reward if self.t == 3 else 0.0
        return np.zeros(2, np.float32), reward, self.t == 3, False, {}


@pytest.mark.parametrize("cls", [TPO, GRPO])
@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf"), None])
def test_a_reward_that_is_no_number_stops_the_run(cls, reward):
    model = cls("MlpPolicy", BadReward(reward), group_size=4, n_contexts=4)
    weights = torch.nn.utils.parameters_to_vector(model.policy.parameters()).clone()
    with pytest.raises(ValueError, match=r"[Cc]andidate 0 of context 0"):
        model.learn(100)
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.policy.parameters()), weights)


def test_one_bad_score_of_many_is_named(monkeypatch):
    env = gym.make_vec("tpo_gym/TokenReversal-v0", num_envs=12, sequence_length=2, reward="terminal")
    score = type(env).score_sequences

    def spoiled(self, prompts, tokens):
        rewards = score(self, prompts, tokens)
        rewards[7, -1] = torch.nan
        return rewards

    monkeypatch.setattr(type(env), "score_sequences", spoiled)
    model = TPO("TransformerPolicy", env, group_size=4)
    with pytest.raises(ValueError, match=r"candidate 3 of context 1 is nan \(1 of 12 scores"):
        model.learn(10)


def test_a_gradient_that_is_no_number_stops_the_run_before_the_step():
    model = TPO("MlpPolicy", bandits())
    weight = model.policy.action_net.weight
    weight.register_hook(lambda gradient: gradient * torch.nan)
    before = weight.detach().clone()
    with pytest.raises(FloatingPointError, match=r"norm is nan after 0 updates.*learning_rate \(now 0.001\)"):
        model.learn(1_000)
    assert torch.equal(weight, before)
