"""The SB3 face: SB3's algorithms, wrappers and habits over batched environments."""

import pickle

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor, VecNormalize

from tpo_gym import make_vec_env
from tpo_gym.envs import SB3VecEnv

TOKEN_ID = "tpo_gym/TokenReversal-v0"


def make_tokens(n_envs=4, **kwargs):
    return make_vec_env(TOKEN_ID, n_envs, **{"seed": 0, "sequence_length": 3, **kwargs})


@pytest.mark.parametrize("algorithm", [PPO, A2C])
def test_on_policy_algorithms_run_on_the_batched_face(task, algorithm, device):
    env = make_vec_env(task.id, 4, seed=0, device=device, **task.kwargs)
    kwargs = {"batch_size": 16} if algorithm is PPO else {}
    model = algorithm("MlpPolicy", env, n_steps=8, device="cpu", **kwargs).learn(64)
    assert len(model.ep_info_buffer) > 0
    assert len(model.ep_success_buffer) > 0


@pytest.mark.parametrize(
    ("algorithm", "kwargs"), [(PPO, {"n_steps": 8, "batch_size": 8}), (A2C, {}), (DQN, {"learning_starts": 8})]
)
def test_algorithms_run_on_a_single_environment(task, algorithm, kwargs):
    model = algorithm("MlpPolicy", task.make(), device="cpu", **kwargs).learn(24)
    assert model.num_timesteps >= 24


def test_arrays_have_the_dtype_of_the_space(task):
    env = make_vec_env(task.id, 3, seed=0, **task.kwargs)
    observation = env.reset()
    for _ in range(2 * env.get_attr("horizon")[0]):
        assert type(observation) is np.ndarray
        assert observation.dtype == env.observation_space.dtype
        assert observation.shape == (3, *env.observation_space.shape)
        observation, rewards, dones, infos = env.step(np.array([env.action_space.sample() for _ in range(3)]))
        assert (rewards.dtype, dones.dtype) == (np.float32, np.bool_)
        assert len(infos) == 3
        for info, done in zip(infos, dones, strict=True):
            assert info["TimeLimit.truncated"] is False
            assert ("episode" in info) == done
            if done:
                assert np.asarray(info["terminal_observation"]) in env.observation_space
                assert {"exact_match", "token_accuracy", "is_success"} <= set(info)


def test_episode_infos_add_up():
    env = make_tokens(2, reward="sequential")
    env.reset()
    total, ended = np.zeros(2), 0
    for step in range(9):
        before = env.batched.observations().numpy()
        actions = env.batched._target(slice(None), step).numpy().copy() if step < 3 else np.zeros(2, int)
        _, rewards, dones, infos = env.step(actions)
        total += rewards
        if dones.all():
            ended += 1
            for index, info in enumerate(infos):
                assert info["episode"]["r"] == total[index]
                assert info["episode"]["l"] == 3
                assert info["episode"]["t"] >= 0
                assert info["is_success"] is bool(total[index] == 3)
                terminal = before[index].copy()
                terminal[5] = actions[index]
                assert np.array_equal(info["terminal_observation"], terminal)
            total[:] = 0
    assert ended == 3


def test_seeds_repeat_and_later_resets_go_on():
    env = make_tokens(8)
    first = [env.reset() for _ in range(3)]
    assert not np.array_equal(first[0], first[1])
    env.seed(0)
    assert all(np.array_equal(a, env.reset()) for a in first)
    assert np.array_equal(make_tokens(8).reset(), first[0])


def test_options_reach_the_batch():
    env = make_tokens(8, sequence_length=6)
    env.set_options({"group_size": 4})
    observation = env.reset()
    assert (observation[:4] == observation[0]).all()
    assert (observation[4:] == observation[4]).all()
    env.set_options([{"group_size": 2}] + [{}] * 7)
    with pytest.raises(ValueError, match="same options"):
        env.reset()


def test_attributes_and_methods():
    env = make_tokens(3)
    env.reset()
    assert env.get_attr("max_return") == [3.0, 3.0, 3.0]
    assert env.get_attr("horizon", indices=[0, 2]) == [3, 3]
    assert env.get_attr("action_space", indices=0) == [env.action_space]
    assert not env.has_attr("no_such_attribute")
    env.set_attr("note", "hello")
    assert env.batched.note == "hello"
    with pytest.raises(ValueError, match="all of them"):
        env.set_attr("note", "bye", indices=[1])
    scores = env.env_method("score_actions", np.zeros(3, int), indices=[1])
    assert len(scores) == 1
    assert float(scores[0]) in (0.0, 1.0)
    assert env.env_is_wrapped(Monitor) == [True] * 3
    assert env.env_is_wrapped(gym.wrappers.TimeLimit, indices=0) == [False]


def test_pickles_go_on_alike():
    env = make_tokens(4)
    env.reset()
    env.step(np.zeros(4, int))
    twin = pickle.loads(pickle.dumps(env))
    for _ in range(5):
        for a, b in zip(env.step(np.ones(4, int))[:3], twin.step(np.ones(4, int))[:3], strict=True):
            assert np.array_equal(a, b)


@pytest.mark.filterwarnings("error")
def test_evaluate_policy_counts_the_same_with_and_without_a_monitor():
    model = PPO("MlpPolicy", make_tokens(4), n_steps=8, batch_size=16, device="cpu", seed=0)
    returns, lengths = evaluate_policy(model, make_tokens(4), 20, return_episode_rewards=True)
    assert lengths == [3] * 20
    with pytest.warns(UserWarning, match="already wrapped"):  # as over SB3's own make_vec_env
        monitor = VecMonitor(make_tokens(4))
    monitored, _ = evaluate_policy(model, monitor, 20, return_episode_rewards=True)
    assert returns == monitored
    evaluate_policy(model, Monitor(gym.make(TOKEN_ID, sequence_length=3)), 2)


def test_callbacks_and_wrappers(tmp_path):
    env = VecNormalize(make_vec_env("tpo_gym/MNISTBandit-v0", 4, split="test"))
    evaluation = VecNormalize(make_vec_env("tpo_gym/MNISTBandit-v0", 2, split="test"), training=False)
    callbacks = [
        EvalCallback(evaluation, n_eval_episodes=4, eval_freq=8, verbose=0, best_model_save_path=str(tmp_path)),
        CheckpointCallback(16, str(tmp_path)),
    ]
    model = PPO("MlpPolicy", env, n_steps=8, batch_size=16, device="cpu").learn(64, callback=callbacks)
    assert len(model.ep_info_buffer) == 64
    assert (tmp_path / "best_model.zip").exists()


def test_pictures_are_tiled():
    env = make_tokens(4, render_mode="rgb_array")
    env.reset()
    single = env.get_images()[0].shape
    assert env.render().shape == (2 * single[0], 2 * single[1], 3)
    with pytest.warns(UserWarning, match="render_mode"):
        assert make_tokens(2).get_images() == [None, None]


def test_module_prefix_and_other_environments():
    assert isinstance(make_vec_env(f"tpo_gym:{TOKEN_ID}", 2), SB3VecEnv)
    other = make_vec_env("CartPole-v1", 2, seed=0, max_episode_steps=5)
    assert isinstance(other, DummyVecEnv)
    assert other.reset().shape == (2, 4)


def test_refusals():
    with pytest.raises(ValueError, match="n_envs=0"):
        make_vec_env(TOKEN_ID, 0)
    with pytest.raises(ValueError, match="runs on the CPU only"):
        make_vec_env("CartPole-v1", 1, device="cuda")
    with pytest.raises(TypeError, match="BatchedEnv"):
        SB3VecEnv(gym.make(TOKEN_ID))
    with pytest.raises(ValueError, match="SameStep"):
        make_vec_env(TOKEN_ID, 2, autoreset_mode="NextStep")
    with pytest.raises(ValueError, match="reward='dense'"):
        make_vec_env(TOKEN_ID, 2, reward="dense")
