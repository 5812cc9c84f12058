"""Bandit and ContextualBandit: rewards, layouts, arguments."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

BANDIT = "tpo_gym/Bandit-v0"
CONTEXTUAL = "tpo_gym/ContextualBandit-v0"


def test_defaults_are_those_of_the_paper():
    env = gym.make(BANDIT)
    assert env.observation_space == spaces.Discrete(1)
    assert env.action_space == spaces.Discrete(100)
    env.reset()
    assert env.step(0)[1] == 1.0
    env = gym.make(CONTEXTUAL)
    assert env.observation_space == spaces.Discrete(100)
    assert env.action_space == spaces.Discrete(10)


def test_bandit_pays_for_the_correct_arm_alone(device):
    env = gym.make_vec(BANDIT, 4, num_actions=4, correct_action=2, device=device)
    observation, _ = env.reset()
    assert observation.tolist() == [0, 0, 0, 0]
    assert env.labels.tolist() == [2, 2, 2, 2]
    _, rewards, _, _, infos = env.step(torch.arange(4, device=device))
    assert rewards.tolist() == [0, 0, 1, 0]
    final = infos["final_info"]
    assert final["exact_match"].tolist() == final["is_success"].tolist() == [False, False, True, False]
    assert final["token_accuracy"].tolist() == [0, 0, 1, 0]
    assert infos["final_obs"].tolist() == [0, 0, 0, 0]


def test_contextual_bandit_pays_for_its_contexts_arm(device):
    answers = [3, 0, 1]
    env = gym.make_vec(CONTEXTUAL, 30, num_contexts=3, num_actions=4, correct_actions=answers, device=device)
    observation, _ = env.reset(seed=0)
    assert set(observation.tolist()) == {0, 1, 2}
    expected = torch.tensor(answers, device=device)[observation]
    assert torch.equal(env.labels, expected)
    assert env.step(expected)[1].sum() == 30
    assert env.step((env.labels + 1) % 4)[1].sum() == 0


def test_layouts_agree_whatever_the_seed():
    train, evaluation = gym.make_vec(CONTEXTUAL, 500), gym.make_vec(CONTEXTUAL, 500)
    other = gym.make_vec(CONTEXTUAL, 500, layout_seed=1)
    layouts = []
    for seed, env in enumerate((train, evaluation, other)):
        contexts, _ = env.reset(seed=seed)
        layouts.append(dict(zip(contexts.tolist(), env.labels.tolist(), strict=True)))
    common = layouts[0].keys() & layouts[1].keys() & layouts[2].keys()
    assert len(common) > 90
    assert all(layouts[0][context] == layouts[1][context] for context in common)
    assert any(layouts[0][context] != layouts[2][context] for context in common)
    assert set(layouts[0].values()) == set(range(10))


@pytest.mark.parametrize(
    ("env_id", "kwargs", "error", "match"),
    [
        (BANDIT, {"num_actions": 0}, ValueError, "num_actions=0"),
        (BANDIT, {"num_actions": "many"}, TypeError, "num_actions='many'"),
        (BANDIT, {"num_actions": True}, TypeError, "bool"),
        (BANDIT, {"num_actions": 3, "correct_action": 3}, ValueError, "correct_action=3"),
        (BANDIT, {"correct_action": -1}, ValueError, "correct_action=-1"),
        (CONTEXTUAL, {"num_contexts": 0}, ValueError, "num_contexts=0"),
        (CONTEXTUAL, {"num_actions": 1.5}, TypeError, "num_actions=1.5"),
        (CONTEXTUAL, {"layout_seed": -2}, ValueError, "layout_seed=-2"),
        (CONTEXTUAL, {"layout_seed": None}, TypeError, "layout_seed=None"),
        (CONTEXTUAL, {"num_contexts": 2, "correct_actions": [1]}, ValueError, r"shape \(1,\)"),
        (CONTEXTUAL, {"num_contexts": 2, "correct_actions": [0, 10]}, ValueError, r"correct_actions\[1\]=10"),
        (CONTEXTUAL, {"num_contexts": 2, "correct_actions": [-1, 1]}, ValueError, r"correct_actions\[0\]=-1"),
        (CONTEXTUAL, {"num_contexts": 2, "correct_actions": [0.0, 1.0]}, TypeError, "float64"),
    ],
)
def test_bad_arguments(env_id, kwargs, error, match):
    with pytest.raises(error, match=match):
        gym.make_vec(env_id, 1, **kwargs)
    with pytest.raises(error, match=match):
        gym.make(env_id, **kwargs)


def test_correct_actions_may_be_an_array():
    env = gym.make(CONTEXTUAL, num_contexts=2, correct_actions=np.array([4, 4], dtype=np.int32))
    env.reset()
    assert env.step(4)[1] == 1.0
