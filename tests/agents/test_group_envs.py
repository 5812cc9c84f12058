"""Groups on every kind of environment: one context per group, honest counts, every episode logged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import (
    DummyVecEnv,
    SubprocVecEnv,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

from tpo_gym import make_vec_env
from tpo_gym.agents import TPO
from tpo_gym.agents.copies import behave_alike, snapshot
from tpo_gym.agents.group_env import VecGroupEnv
from tpo_gym.agents.group_vec_env import GroupVecEnv
from tpo_gym.envs.vector_adapter import VectorEnvAdapter

MODES = list(AutoresetMode)


class ContextEnv(gym.Env):
    """Ends by chance or by action 1, at the latest after 6 steps; the return is the context, drawn in reset."""

    steps_taken = 0
    resets = 0

    def __init__(self, limit: int = 6) -> None:
        self.observation_space = spaces.Box(0, 1, (2,), dtype=np.float32)
        self.action_space = spaces.Discrete(2)
        self.limit = limit

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        type(self).resets += 1
        self.context, self.t = float(self.np_random.random()), 0
        return self._obs(), {"context": self.context}

    def step(self, action: Any) -> Any:
        type(self).steps_taken += 1
        self.t += 1
        terminated = bool(action == 1)
        truncated = self.t == self.limit
        reward = self.context if terminated or truncated else 0.0
        return self._obs(), reward, terminated, truncated, {"t": self.t}

    def _obs(self) -> np.ndarray:
        return np.array([self.context, self.t / self.limit], dtype=np.float32)


class UnseededEnv(ContextEnv):
    """Ignores its seed, as an environment does that draws from a generator of its own."""

    stream = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        _, info = super().reset(seed=seed)
        self.context = float(type(self).stream.random())
        return self._obs(), info


class UncopyableEnv(ContextEnv):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("holds a device")

    def __reduce__(self) -> Any:
        raise TypeError("holds a device")


class UncopyableUnseededEnv(UnseededEnv, UncopyableEnv):
    pass


def monitored() -> gym.Env:
    return Monitor(ContextEnv())


gym.register("test/Context-v0", entry_point=ContextEnv)
gym.register("test/Uncopyable-v0", entry_point=UncopyableEnv)
gym.register("test/UncopyableUnseeded-v0", entry_point=UncopyableUnseededEnv)

VECTORS: dict[str, Callable[[], Any]] = {
    "id": lambda: "test/Context-v0",
    "single": ContextEnv,
    "wrapped single": lambda: gym.wrappers.TimeLimit(ContextEnv(), 4),
    "uncopyable": lambda: "test/Uncopyable-v0",
    "unseeded single": UnseededEnv,
    "Dummy": lambda: DummyVecEnv([monitored] * 8),
    "Subproc": lambda: SubprocVecEnv([monitored] * 8, start_method="fork"),
    "VecMonitor": lambda: VecMonitor(DummyVecEnv([ContextEnv] * 8)),
    "VecNormalize": lambda: VecNormalize(DummyVecEnv([monitored] * 8)),
    "VecFrameStack": lambda: VecFrameStack(DummyVecEnv([monitored] * 8), 2),
    **{
        f"Sync {mode.value}": lambda m=mode: gym.vector.SyncVectorEnv([ContextEnv] * 8, autoreset_mode=m)
        for mode in MODES
    },
    "Async": lambda: gym.vector.AsyncVectorEnv([ContextEnv] * 8, context="fork"),
    "wrapped Sync": lambda: gym.wrappers.vector.RecordEpisodeStatistics(gym.vector.SyncVectorEnv([ContextEnv] * 8)),
}


@pytest.mark.parametrize("kind", VECTORS)
def test_a_reward_of_the_context_alone_gives_groups_without_variance(kind: str) -> None:
    env = VECTORS[kind]()
    model = TPO("MlpPolicy", env, group_size=4, n_contexts=2, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.learn(60)
    scores = model.rollout.scores
    assert (scores == scores[:, :1]).all()
    assert scores[0, 0] != scores[1, 0]  # two contexts, and unnormalized rewards
    assert len(set(model.rollout.mask.sum(-1).flatten().tolist())) > 1  # of different lengths
    model.env.close()


def test_ours_under_wrappers_form_groups_too() -> None:
    for env in (
        VecNormalize(make_vec_env("tpo_gym/ContextualBandit-v0", 8), norm_obs=False),
        gym.make_vec("tpo_gym/TokenReversal-v0", 8, sequence_length=3, vocab_size=2, autoreset_mode="NextStep"),
        gym.make_vec("tpo_gym/TokenReversal-v0", 8, sequence_length=3, vocab_size=2, autoreset_mode="Disabled"),
    ):
        model = TPO("MlpPolicy", env, group_size=4, candidates="episodes", seed=0).learn(50)
        candidates = model.rollout.candidates
        first = candidates.observations[candidates.index[:, :, 0]]
        assert (first == first[:, :1]).all()
        assert not (first[0] == first[1]).all()


def test_groups_that_begin_differently_are_reported_once() -> None:
    vec = DummyVecEnv([UnseededEnv] * 4)
    with pytest.warns(UserWarning, match=r"begin with different observations.*reset\(seed") as caught:
        TPO("MlpPolicy", vec, group_size=2, seed=0).learn(60)
    assert len(caught) == 1
    with pytest.warns(UserWarning, match="begin with different observations"):
        TPO("MlpPolicy", "test/UncopyableUnseeded-v0", group_size=2, n_contexts=2, seed=0).learn(20)


@pytest.mark.parametrize("group_size", [1, 4])
def test_only_running_sub_environments_are_stepped_and_all_steps_are_counted(group_size: int) -> None:
    vec = GroupVecEnv([monitored] * 8)
    env = VecGroupEnv(vec, torch.device("cpu"), np.random.default_rng(0))
    assert not group_size > 1 or vec.exact_copies
    env.start(group_size)
    ContextEnv.steps_taken = 0
    running, counted = np.ones(8, dtype=bool), 0
    rng = np.random.default_rng(0)
    while running.any():
        expected = int(running.sum())
        step = env.step(torch.as_tensor(rng.integers(2, size=8)))
        assert step.interactions == expected
        assert not step.dones[~running].any()
        assert (step.rewards[torch.as_tensor(~running)] == 0).all()
        counted += expected
        running &= ~step.dones
    assert ContextEnv.steps_taken == counted < 8 * 6


def test_num_timesteps_is_the_number_of_steps() -> None:
    model = TPO("MlpPolicy", ContextEnv(), group_size=4, n_contexts=2, seed=0)
    model.learn(1)  # the copies are tried out once, here
    ContextEnv.steps_taken = 0
    model.learn(100)
    assert model.num_timesteps == ContextEnv.steps_taken
    lengths = [info["l"] for info in model.ep_info_buffer]
    assert sum(lengths) == model.num_timesteps


@pytest.mark.parametrize("mode", MODES)
def test_a_vector_environment_counts_steps_and_logs_every_episode_under_each_autoreset_mode(mode: Any) -> None:
    class Episodes(BaseCallback):
        found: list[Any]

        def _on_training_start(self) -> None:
            self.found = []

        def _on_step(self) -> bool:
            self.found += [info for info in self.locals["infos"] if "episode" in info]
            return True

    vec = gym.vector.SyncVectorEnv([ContextEnv] * 4, autoreset_mode=mode)
    model, callback = TPO("MlpPolicy", vec, group_size=2, seed=0), Episodes()
    ContextEnv.steps_taken = ContextEnv.resets = 0
    model.learn(100, callback=callback)
    assert model.num_timesteps == ContextEnv.steps_taken
    assert len(callback.found) >= model.rollout.scores.numel()
    for info in callback.found:
        assert info["terminal_observation"].shape == (2,)
        assert not info["TimeLimit.truncated"] or info["t"] == 6
        assert info["episode"]["l"] == info["t"]
        assert info["episode"]["r"] == pytest.approx(float(info["terminal_observation"][0]), abs=1e-5)


def test_the_three_autoreset_modes_train_alike() -> None:
    def weights(mode: Any) -> torch.Tensor:
        vec = gym.vector.SyncVectorEnv([ContextEnv] * 4, autoreset_mode=mode)
        model = TPO("MlpPolicy", vec, group_size=2, seed=0)
        for _ in range(2):
            model.learn(1, reset_num_timesteps=False)
        return torch.cat([p.flatten() for p in model.policy.parameters()])

    same_step = weights(AutoresetMode.SAME_STEP)
    assert torch.equal(same_step, weights(AutoresetMode.DISABLED))
    assert torch.equal(same_step, weights(AutoresetMode.NEXT_STEP))


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_on_an_adapted_vector_environment(mode: Any) -> None:
    vec = VectorEnvAdapter(gym.vector.SyncVectorEnv([ContextEnv] * 3, autoreset_mode=mode))
    model = TPO("MlpPolicy", ContextEnv(), group_size=2, n_contexts=1, seed=0)
    returns, lengths = evaluate_policy(model, vec, n_eval_episodes=7, return_episode_rewards=True, deterministic=False)
    assert len(returns) == 7
    assert max(lengths) <= 6
    assert all(0 < value < 1 for value in returns)


def test_array_native_vector_environments() -> None:
    vec = gym.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")
    with pytest.raises(ValueError, match=r'one seed for all.*vectorization_mode="sync"'):
        TPO("MlpPolicy", vec, group_size=2, seed=0).learn(10)
    adapter = VectorEnvAdapter(vec)
    adapter.seed(3)
    first = adapter.reset()
    for _ in range(60):
        _, rewards, dones, infos = adapter.step(np.zeros(4, dtype=np.int64))
        for index, info in enumerate(infos):
            assert ("episode" in info) == dones[index]
            assert rewards[index] == (0 if info.get("reset_step") else 1)
    adapter.seed(3)
    assert np.array_equal(first, adapter.reset())


def test_asynchronous_environments_answer_questions_about_attributes() -> None:
    vec = VectorEnvAdapter(gym.vector.AsyncVectorEnv([ContextEnv] * 2, context="fork"))
    assert not vec.has_attr("nothing_like_this")
    with pytest.raises(AttributeError, match="nothing_like_this"):
        vec.get_attr("nothing_like_this")
    assert vec.get_attr("limit") == [6, 6]
    vec.set_attr("limit", 3)
    assert vec.get_attr("limit", indices=[1]) == [3]
    vec.close()
    with pytest.raises(ValueError, match="shared_memory=True"):
        VectorEnvAdapter(gym.vector.AsyncVectorEnv([ContextEnv] * 2, context="fork", shared_memory=False))


def test_a_group_env_is_a_vec_env_in_full() -> None:
    ours, sb3 = GroupVecEnv([monitored] * 3), DummyVecEnv([monitored] * 3)
    rng = np.random.default_rng(0)
    for env in (ours, sb3):
        env.seed(5)
    assert np.array_equal(ours.reset(), sb3.reset())
    for _ in range(20):
        actions = rng.integers(2, size=3)
        (obs, rewards, dones, infos), expected = ours.step(actions), sb3.step(actions)
        assert np.array_equal(obs, expected[0])
        assert np.array_equal(rewards, expected[1])
        assert np.array_equal(dones, expected[2])
        assert [info.get("episode", {}).get("l") for info in infos] == [
            info.get("episode", {}).get("l") for info in expected[3]
        ]
    assert ours.env_is_wrapped(Monitor) == [True] * 3


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "CartPole-v1", "Taxi-v4"])
def test_copies_are_exact(env_id: str) -> None:
    env = gym.make(env_id)
    env.reset(seed=1)
    env.step(0)
    assert behave_alike(env, snapshot(env)(), seed=2)


def test_slippery_candidates_that_act_alike_have_the_same_fate() -> None:
    model = TPO("MlpPolicy", "FrozenLake-v1", group_size=4, n_contexts=2, seed=0)
    env = model._group_env
    env.start(4)
    assert model.env.exact_copies
    observed = [env.step(torch.zeros(8, dtype=torch.int64) + 2).observations for _ in range(4)]
    paths = torch.stack(observed, 1)
    assert (paths.view(2, 4, -1) == paths.view(2, 4, -1)[:, :1]).all()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("lookahead", [0, 2])
def test_actions_are_scored_on_copies(lookahead: int, deterministic: bool) -> None:
    model = TPO(
        "MlpPolicy",
        ContextEnv(),
        candidates="actions",
        group_size=4,
        n_contexts=3,
        lookahead=lookahead,
        lookahead_deterministic=deterministic,
        seed=0,
    )
    ContextEnv.steps_taken = 0
    model.learn(1)
    rollout = model.rollout
    assert model.num_timesteps == ContextEnv.steps_taken  # the copies' steps are interactions
    assert rollout.scores.shape == rollout.candidates.actions.shape
    assert rollout.n_groups == len(rollout.candidates.observations)
    context, t = rollout.candidates.observations.T
    ends = (rollout.candidates.actions == 1) | (t.unsqueeze(1) > 0.8)
    assert (rollout.scores[ends] == context.unsqueeze(1).expand_as(ends)[ends]).all()
    if not lookahead:
        assert (rollout.scores[~ends] == 0).all()


def test_lookahead_sees_what_wrappers_show() -> None:
    vec = VecNormalize(DummyVecEnv([monitored] * 3))
    model = TPO("MlpPolicy", vec, candidates="actions", group_size=2, lookahead=2, seed=0).learn(30)
    assert ((model.rollout.scores >= 0) & (model.rollout.scores <= 1)).all()  # unnormalized


def test_actions_need_copies() -> None:
    kwargs: dict[str, Any] = {"candidates": "actions", "group_size": 2, "n_contexts": 2}
    with pytest.raises(
        ValueError, match=r'cannot be copied exactly \(TypeError: holds a device\).*candidates="episodes"'
    ):
        TPO("MlpPolicy", "test/Uncopyable-v0", **kwargs)
    with pytest.raises(ValueError, match="SubprocVecEnv keeps"):
        TPO("MlpPolicy", SubprocVecEnv([monitored] * 2, start_method="fork"), **kwargs)
    with pytest.raises(ValueError, match="VecFrameStack"):
        TPO("MlpPolicy", VecFrameStack(DummyVecEnv([monitored] * 2), 2), lookahead=1, **kwargs)
    with pytest.raises(ValueError, match="lookahead=1 is for candidates='actions'"):
        TPO("MlpPolicy", ContextEnv(), group_size=2, n_contexts=2, lookahead=1)
    with pytest.raises(ValueError, match="without stepping"):
        TPO("MlpPolicy", "tpo_gym/TokenReversal-v0", lookahead=1, **kwargs)
    with pytest.raises(ValueError, match="lookahead must be"):
        TPO("MlpPolicy", ContextEnv(), lookahead=-1, **kwargs)


def test_all_actions_on_a_one_step_task_of_another_package() -> None:
    model = TPO("MlpPolicy", ContextEnv(limit=1), candidates="all_actions", n_contexts=8, seed=0).learn(20)
    assert model.rollout.scores.shape == (8, 2)
    assert model.num_timesteps == 24
    with pytest.raises(ValueError, match="one-step environments"):
        TPO("MlpPolicy", ContextEnv(), candidates="all_actions", n_contexts=8, seed=0).learn(20)


def test_set_env_and_load_expand_as_the_constructor_does(tmp_path: Any) -> None:
    model = TPO("MlpPolicy", ContextEnv(), group_size=4, n_contexts=2, seed=0).learn(10)
    for env in ("test/Context-v0", ContextEnv()):
        model.set_env(env)
        assert model.env.num_envs == 8
        model.learn(10)
    model.save(tmp_path / "model")
    for env in ("test/Context-v0", ContextEnv()):
        loaded = TPO.load(tmp_path / "model", env=env)
        assert loaded.env.num_envs == loaded.n_envs == 8
        loaded.learn(10)


def test_vec_normalize_is_updated_in_training_and_found() -> None:
    vec = VecNormalize(DummyVecEnv([monitored] * 4))
    model = TPO("MlpPolicy", vec, group_size=2, seed=0)
    before = vec.obs_rms.count
    model.learn(50)
    assert vec.obs_rms.count > before
    assert model.get_vec_normalize_env() is vec
    observations = model.rollout.candidates.observations
    assert observations.min() < 0  # normalized; the environment's own lie in [0, 1]


@pytest.mark.parametrize("kind", ["id", "single", "Dummy", "VecNormalize", "Sync SameStep"])
def test_after_training_the_sub_environments_go_separate_ways(kind: str) -> None:
    model = TPO("MlpPolicy", VECTORS[kind](), group_size=4, n_contexts=2, seed=0).learn(20)
    model.env.reset()
    assert len({info["context"] for info in model.env.unwrapped.reset_infos}) == 8
    model.learn(20, reset_num_timesteps=False)
    assert (model.rollout.scores == model.rollout.scores[:, :1]).all()


def test_what_was_set_in_a_single_environment_holds_for_its_copies() -> None:
    env = gym.make("CartPole-v1")
    env.unwrapped.gravity = 3.0
    env.reset(seed=0)
    model = TPO("MlpPolicy", env, group_size=2, n_contexts=2)
    assert model.env.get_attr("gravity") == [3.0] * 4
    assert len(np.unique(model.env.reset(), axis=0)) == 4
