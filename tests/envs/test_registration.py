"""Ids, checkers, specs, and what importing the package costs."""

import json
import subprocess
import sys
import warnings

import gymnasium as gym
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as sb3_check_env

import tpo_gym
from tpo_gym.envs import ENVIRONMENTS, BatchedEnv, SingleEnv, register_envs


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_both_checkers_pass_without_a_warning(task):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = task.make(render_mode="rgb_array")  # with Gymnasium's default wrappers
        check_env(env.unwrapped)
        sb3_check_env(env.unwrapped)
        sb3_check_env(env)
        env.reset(seed=0)
        env.step(env.action_space.sample())
        env.close()


def test_specs_survive_json(task):
    spec = task.make().spec
    again = EnvSpec.from_json(spec.to_json())
    assert again.id == spec.id
    assert again.kwargs == spec.kwargs
    assert isinstance(gym.make(again).unwrapped, SingleEnv)
    assert json.loads(spec.to_json())["vector_entry_point"].startswith("tpo_gym.envs.")


def test_faces_of_an_id_agree_on_spaces(task):
    env, vec = task.make(), task.make_vec(3)
    assert isinstance(vec, BatchedEnv)
    assert env.observation_space == vec.single_observation_space
    assert env.action_space == vec.single_action_space
    assert (env.unwrapped.max_return, env.unwrapped.horizon) == (vec.max_return, vec.horizon)
    assert vec.spec.id == task.id


def test_sync_vector_env(task):
    vec = gym.make_vec(task.id, 2, vectorization_mode="sync", **task.kwargs)
    observation, _ = vec.reset(seed=0)
    assert observation in vec.observation_space
    observation, rewards, *_ = vec.step(vec.action_space.sample())
    assert observation in vec.observation_space
    assert rewards.shape == (2,)


def test_async_vector_env_with_spawn():
    vec = gym.make_vec("tpo_gym/TokenCopy-v0", 1, vectorization_mode="async", vector_kwargs={"context": "spawn"})
    try:
        observation, _ = vec.reset(seed=0)
        assert observation in vec.observation_space
        assert vec.step(vec.action_space.sample())[0] in vec.observation_space
    finally:
        vec.close()


def test_registering_twice_is_harmless():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_envs()
    assert all(f"tpo_gym/{name}-v0" in gym.registry for name in ENVIRONMENTS)


def test_module_prefix_in_a_process_that_never_imported_the_package():
    code = "import gymnasium; print(gymnasium.make('tpo_gym:tpo_gym/Bandit-v0').reset(seed=0)[0])"
    assert run_python(code) == "0"


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, tpo_gym, tpo_gym.envs; print([m for m in ('torch', 'stable_baselines3') if m in sys.modules])"
    assert run_python(code) == "[]"


def test_public_names():
    assert tpo_gym.make_vec_env is tpo_gym.envs.make_vec_env
    assert {"TPO", "GRPO", "make_vec_env"} <= set(dir(tpo_gym))
    assert "SB3VecEnv" in dir(tpo_gym.envs)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tpo_gym.no_such_name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tpo_gym.envs.no_such_name
