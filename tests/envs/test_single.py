"""The single-environment face against the batched one, and Gymnasium's habits."""

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.error import ResetNeeded

TOKEN_ID = "tpo_gym/TokenReversal-v0"


def play(env, actions):
    """Returns all that an action sequence leads to, resetting where an episode ends."""
    out = []
    for action in actions:
        out.append(env.step(action))
        if out[-1][2]:
            out.append(env.reset())
    return out


def assert_same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_values_are_plain(task):
    env = task.make()
    observation, info = env.reset(seed=0)
    assert info == {}
    for step in range(env.unwrapped.horizon):
        assert observation in env.observation_space
        assert not isinstance(observation, torch.Tensor)
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)
        assert terminated is (step == env.unwrapped.horizon - 1)
        assert truncated is False
    assert {key: type(value) for key, value in info.items()} == {
        "exact_match": bool,
        "token_accuracy": float,
        "is_success": bool,
    }


def test_same_dynamics_as_the_batched_face(task):
    env = task.make().unwrapped
    twin = task.make_vec(1)
    for seed in range(3):
        observation, _ = env.reset(seed=seed)
        twin.reset()
        twin.set_state(env.batched.get_state())
        assert np.array_equal(observation, twin.observations()[0])
        for step in range(env.horizon):
            action = (seed + step) % int(env.action_space.n)
            observation, reward, terminated, _, info = env.step(action)
            _, rewards, terminations, _, infos = twin.step(np.array([action]))
            assert np.array_equal(observation, infos["final_obs"][0] if terminated else twin.observations()[0])
            assert (reward, terminated) == (rewards.item(), terminations.item())
        assert info == {key: infos["final_info"][key].item() for key in info}


def test_same_seed_same_rollout(task):
    first, second = task.make(), task.make()
    first.action_space.seed(0)
    actions = [first.action_space.sample() for _ in range(10)]
    assert np.array_equal(first.reset(seed=5)[0], second.reset(seed=5)[0])
    assert_same(play(first, actions), play(second, actions))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"])
def test_copies_in_the_middle_of_an_episode_go_on_alike(task, clone):
    env = task.make()
    env.reset(seed=1)
    if env.unwrapped.horizon > 1:
        env.step(0)
    twin = clone(env)
    assert_same(play(env, [1, 0, 1, 1, 0, 0, 1, 0, 1]), play(twin, [1, 0, 1, 1, 0, 0, 1, 0, 1]))
    assert_same([env.reset()[:1]], [twin.reset()[:1]])


def test_resets_after_a_seed_vary_and_repeat():
    """An environment that reseeds itself in reset repeats one episode (SofaGym #36)."""
    env = gym.make(TOKEN_ID)
    runs = []
    for _ in range(2):
        env.reset(seed=3)
        runs.append([tuple(env.reset()[0]) for _ in range(5)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 5


def test_scores_are_what_a_step_would_pay(task):
    env = task.make().unwrapped
    env.reset(seed=0)
    count = int(env.action_space.n)
    scores = env.score_actions(range(count))
    assert scores.shape == (count,)
    for action in range(count):
        assert env.score_actions(action) == scores[action] == copy.deepcopy(env).step(action)[1]


def test_bad_actions_and_forgotten_resets():
    env = gym.make(TOKEN_ID, sequence_length=1).unwrapped
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.reset()
    for bad, error in ((2, ValueError), (-1, ValueError), (0.5, TypeError), ([0, 1], ValueError)):
        with pytest.raises(error, match="action"):
            env.step(bad)
    with pytest.raises(ValueError, match="not in"):
        env.score_actions([0, 2])
    env.step(np.array([1]))
    with pytest.raises(ResetNeeded, match="finished"):
        env.step(0)


def test_arguments_of_the_batched_face_are_refused():
    with pytest.raises(TypeError, match="make_vec"):
        gym.make(TOKEN_ID, num_envs=3)
    with pytest.raises(TypeError, match="make_vec"):
        gym.make(TOKEN_ID, autoreset_mode="SameStep")
    with pytest.raises(TypeError, match="no_such_argument"):
        gym.make(TOKEN_ID, no_such_argument=3)


def test_str_names_the_environment():
    assert "tpo_gym/TokenReversal-v0" in str(gym.make(TOKEN_ID).unwrapped)
