"""What SB3's users, callbacks and own tests expect of an algorithm (docs/results/sb3_test_suite.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    EvalCallback,
    EveryNTimesteps,
    LogEveryNTimesteps,
    ProgressBarCallback,
    StopTrainingOnMaxEpisodes,
    StopTrainingOnNoModelImprovement,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize, VecVideoRecorder
from torch import nn

from tpo_gym import GRPO, TPO, make_vec_env
from tpo_gym.agents import group_algorithm

KEYS = {
    "rollout/ep_rew_mean",
    "rollout/ep_len_mean",
    "rollout/zero_variance_groups",
    "rollout/effective_candidates",
    "time/iterations",
    "time/fps",
    "time/time_elapsed",
    "time/total_timesteps",
    "train/learning_rate",
    "train/loss",
    "train/entropy",
    "train/approx_kl",
    "train/n_updates",
    "train/grad_norm",
    "train/target_kl",
    "train/fit_kl",
}
SUCCESS_KEYS = {"rollout/success_rate", "rollout/error", "rollout/groups_with_success"}


class WalkEnv(gym.Env):
    """Episodes of 3 to 6 steps; the second action pays 1."""

    observation_space = spaces.Box(-1, 1, (2,), dtype=np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(3, 7))
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        info = {"is_success": True} if self.left == 0 else {}
        return self._observe(), float(action), self.left == 0, False, info

    def _observe(self) -> np.ndarray:
        return np.array([self.left / 6, 1], dtype=np.float32)


class Recorder(KVWriter):
    """Keeps every row of the log."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        self.rows.append({**key_values, "step": step})

    def close(self) -> None:
        pass


class Watcher(BaseCallback):
    """Keeps what every step showed, and the order of events."""

    def _init_callback(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.steps_at: list[int] = []
        self.events: list[str] = []

    def _on_training_start(self) -> None:
        self.events.append("training_start")

    def _on_rollout_start(self) -> None:
        self.events.append("rollout_start")

    def _on_step(self) -> bool:
        self.seen.append(dict(self.locals))
        self.steps_at.append(self.num_timesteps)
        return True

    def _on_rollout_end(self) -> None:
        self.events.append("rollout_end")

    def _on_training_end(self) -> None:
        self.events.append("training_end")

    @property
    def episodes(self) -> list[dict[str, float]]:
        return [info["episode"] for step in self.seen for info in step["infos"] if "episode" in info]


def make_model(env: Any = None, **kwargs: Any) -> TPO:
    arguments: dict[str, Any] = {"group_size": 2, "n_contexts": 2, "n_epochs": 2, "learning_rate": 1e-4, "seed": 0}
    return TPO("MlpPolicy", WalkEnv() if env is None else env, **{**arguments, **kwargs})


def recorded(model: TPO) -> list[dict[str, Any]]:
    recorder = Recorder()
    model.set_logger(Logger(folder=None, output_formats=[recorder]))
    return recorder.rows


# Callbacks


def test_all_callbacks_of_sb3_work_together(tmp_path: Path) -> None:
    model = make_model()
    checkpoint = CheckpointCallback(save_freq=5, save_path=str(tmp_path / "every"))
    on_event = CheckpointCallback(save_freq=1, save_path=str(tmp_path / "events"), name_prefix="event")
    watcher = Watcher()
    evaluation = EvalCallback(
        Monitor(WalkEnv()),
        callback_on_new_best=StopTrainingOnRewardThreshold(reward_threshold=100),
        callback_after_eval=StopTrainingOnNoModelImprovement(max_no_improvement_evals=1000),
        best_model_save_path=str(tmp_path / "best"),
        log_path=str(tmp_path / "best"),
        eval_freq=4,
        n_eval_episodes=2,
        verbose=0,
    )
    every = EveryNTimesteps(n_steps=30, callback=on_event)
    callbacks = [checkpoint, evaluation, every, LogEveryNTimesteps(20), StopTrainingOnMaxEpisodes(100), watcher]
    model.learn(100, callback=CallbackList([*callbacks, ProgressBarCallback()]))
    model.learn(100, callback=callbacks, progress_bar=True)
    assert model.num_timesteps >= 100
    assert watcher.n_calls == checkpoint.n_calls == evaluation.n_calls
    assert watcher.locals["infos"] is checkpoint.locals["infos"]
    assert on_event.n_calls > 1
    names = [file for folder in ("every", "events") for file in (tmp_path / folder).glob("*_steps.zip")]
    assert len(names) > 4
    for name in (*names, tmp_path / "best" / "best_model.zip"):
        loaded = TPO.load(name, env=WalkEnv())  # most were saved in the middle of a rollout
        assert loaded.predict(WalkEnv().reset(seed=0)[0])[0] in (0, 1)
    loaded.learn(20, reset_num_timesteps=False)


@pytest.mark.parametrize("log_interval", [None, 1])
def test_log_every_n_timesteps_logs_each_update_once(log_interval: int | None) -> None:
    model = make_model()
    rows = recorded(model)
    model.learn(100, callback=LogEveryNTimesteps(1), log_interval=log_interval)
    assert "train/loss" not in rows[0]  # before the first update
    assert {"time/total_timesteps", "time/fps"} <= rows[0].keys()
    assert ("time/iterations" in rows[-1]) == (log_interval == 1)
    updates = [row["train/n_updates"] for row in rows if "train/n_updates" in row]
    assert len(updates) > 3
    assert updates == sorted(set(updates))
    for row in rows:
        assert ("train/n_updates" in row) == ("train/fit_kl" in row) == ("rollout/zero_variance_groups" in row)


def test_steps_are_shown_once_each_and_in_order() -> None:
    watcher = Watcher()
    model = make_model(DummyVecEnv([WalkEnv] * 4)).learn(40, callback=watcher)
    assert len(watcher.seen) == watcher.n_calls == model.num_timesteps // 4
    assert watcher.steps_at == list(range(4, model.num_timesteps + 1, 4))
    assert watcher.events[0] == "training_start"
    assert watcher.events[-1] == "training_end"
    assert watcher.events[1:-1] == ["rollout_start", "rollout_end"] * (len(watcher.events) // 2 - 1)


def test_stopping_callbacks_stop() -> None:
    episodes = StopTrainingOnMaxEpisodes(max_episodes=1)
    model = make_model().learn(10_000, callback=episodes)
    assert model.num_timesteps < 40
    assert episodes.n_episodes >= 4  # one per sub-environment, as SB3 counts
    reached = EvalCallback(
        Monitor(WalkEnv()),
        callback_on_new_best=StopTrainingOnRewardThreshold(reward_threshold=-1),
        eval_freq=1,
        n_eval_episodes=1,
        verbose=0,
    )
    assert make_model().learn(10_000, callback=reached).num_timesteps < 10
    stuck = StopTrainingOnNoModelImprovement(max_no_improvement_evals=2)
    evaluation = EvalCallback(Monitor(WalkEnv()), callback_after_eval=stuck, eval_freq=3, n_eval_episodes=3, verbose=0)
    assert make_model(learning_rate=0.0).learn(10_000, callback=evaluation).num_timesteps < 10_000


@pytest.mark.parametrize("answer", [False, np.bool_(False), torch.tensor(False)])
def test_a_false_answer_stops_at_once_and_the_model_goes_on_later(answer: Any) -> None:
    calls = []

    def stop(_locals: dict[str, Any], _globals: dict[str, Any]) -> Any:
        calls.append(1)
        return answer

    model = make_model().learn(1000, callback=stop)
    assert len(calls) == 1
    assert model.num_timesteps == 4
    assert model._n_updates == 0
    model.learn(20)
    assert model._n_updates > 0


def test_keyboard_interrupt_leaves_a_usable_model_and_a_flushed_log() -> None:
    class Interrupt(BaseCallback):
        ended = False

        def _on_step(self) -> bool:
            if self.num_timesteps > 50:
                raise KeyboardInterrupt
            return True

        def _on_training_end(self) -> None:
            self.ended = True

    model, interrupt = make_model(), Interrupt()
    rows = recorded(model)
    with pytest.raises(KeyboardInterrupt):
        model.learn(1000, callback=interrupt, log_interval=1000)
    assert interrupt.ended
    assert rows[-1]["train/n_updates"] == model._n_updates > 0
    assert model.predict(WalkEnv().reset(seed=0)[0])[0] in (0, 1)
    steps = model.num_timesteps
    assert model.learn(20, reset_num_timesteps=False).num_timesteps >= steps + 20


# What a callback sees


NATIVE: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "all actions": ("TabularPolicy", "tpo_gym/Bandit-v0", {}, {}),
    "actions": ("MlpPolicy", "tpo_gym/TokenReversal-v0", {"sequence_length": 3}, {"candidates": "actions"}),
    "episodes": ("MlpPolicy", "tpo_gym/TokenReversal-v0", {"sequence_length": 3}, {"candidates": "episodes"}),
    "tokens": ("TransformerPolicy", "tpo_gym/TokenReversal-v0", {"sequence_length": 3}, {"candidates": "actions"}),
    "sequences": ("TransformerPolicy", "tpo_gym/TokenReversal-v0", {"sequence_length": 3}, {"candidates": "episodes"}),
}


@pytest.mark.parametrize("name", NATIVE)
def test_callbacks_see_numpy_and_infos_of_our_tasks(name: str) -> None:
    policy, env_id, options, kwargs = NATIVE[name]
    watcher, model = Watcher(), TPO(policy, make_vec_env(env_id, n_envs=8, **options), group_size=4, seed=0, **kwargs)
    model.learn(1, callback=watcher)
    length = len(watcher.seen)
    assert length == model.rollout.candidates.n_units // 8 if name == "actions" else length in (1, 3)
    for t, step in enumerate(watcher.seen):
        last = t == length - 1
        assert step["dones"].tolist() == [last] * 8
        assert np.mean(step["rewards"]) <= 1
        assert model.observation_space.contains(step["new_obs"][0])
        assert len(step["infos"]) == 8
        assert all(("episode" in info) == ("is_success" in info) == last for info in step["infos"])
    assert [episode["l"] for episode in watcher.episodes] == [length] * 8
    returns = [episode["r"] for episode in watcher.episodes]
    assert returns == pytest.approx(model.rollout.returns.tolist())
    assert np.mean(returns) == pytest.approx(np.mean([info["r"] for info in model.ep_info_buffer]))
    success = [info["is_success"] for info in watcher.seen[-1]["infos"]]
    assert success == list(model.ep_success_buffer)


@pytest.mark.parametrize("make", [WalkEnv, lambda: DummyVecEnv([lambda: Monitor(WalkEnv())] * 4)], ids=["env", "vec"])
def test_callbacks_see_numpy_and_infos_of_other_environments(make: Callable[[], Any]) -> None:
    watcher, model = Watcher(), make_model(make())
    model.learn(40, callback=watcher)
    for step in watcher.seen:
        assert isinstance(step["infos"], list)
        assert np.mean(step["rewards"]) <= 1
        assert step["dones"].tolist() == ["episode" in info for info in step["infos"]]
        assert model.observation_space.contains(step["new_obs"][0])
    assert len(watcher.episodes) >= 8


# Logs


@pytest.mark.parametrize("env", [None, "tpo_gym/TokenReversal-v0"])
def test_the_log_has_all_keys_and_the_last_update(env: str | None) -> None:
    model = make_model(env)
    rows = recorded(model)
    model.learn(200)
    assert KEYS | (SUCCESS_KEYS if env else {"rollout/success_rate"}) <= rows[-1].keys()
    assert all(math.isfinite(value) for value in rows[-1].values())
    assert rows[-1]["step"] == rows[-1]["time/total_timesteps"] == model.num_timesteps
    assert rows[-1]["train/n_updates"] == model._n_updates == 2 * len(rows)


def test_the_logged_mean_return_is_that_of_sb3() -> None:
    def last_row(model: Any) -> tuple[dict[str, Any], list[dict[str, float]]]:
        rows, watcher = recorded(model), Watcher()
        model.learn(400, callback=watcher)
        return rows[-1], watcher.episodes

    vec_env = DummyVecEnv([lambda: Monitor(WalkEnv())] * 4)
    ppo = PPO("MlpPolicy", vec_env, n_steps=20, n_epochs=1, seed=0, stats_window_size=20, device="cpu")
    for model in (ppo, make_model(stats_window_size=20), make_model(vec_env, stats_window_size=20)):
        row, episodes = last_row(model)
        if isinstance(model, PPO):
            episodes = list(model.ep_info_buffer)  # PPO logs before the last update, TPO after it
        assert len(episodes) >= 20
        assert row["rollout/ep_rew_mean"] == pytest.approx(np.mean([episode["r"] for episode in episodes[-20:]]))
        assert row["rollout/ep_len_mean"] == pytest.approx(np.mean([episode["l"] for episode in episodes[-20:]]))


def test_log_interval_counts_rollout_batches() -> None:
    model = make_model()
    rows = recorded(model)
    model.learn(200, log_interval=3)
    assert [row["time/iterations"] for row in rows] == list(range(3, 3 * len(rows) + 1, 3))
    rows.clear()
    model.learn(40, log_interval=None)
    assert rows == []


def test_runs_are_numbered(tmp_path: Path) -> None:
    model = make_model(tensorboard_log=str(tmp_path))
    model.learn(10)
    model.learn(10, reset_num_timesteps=False)
    assert [folder.name for folder in tmp_path.iterdir()] == ["TPO_1"]
    model.learn(10)
    model.learn(10, tb_log_name="other")
    assert {folder.name for folder in tmp_path.iterdir()} == {"TPO_1", "TPO_2", "other_1"}


# Training


def test_total_timesteps_is_a_lower_bound_and_learn_can_be_repeated() -> None:
    model = make_model()
    assert 50 <= model.learn(50).num_timesteps < 50 + 4 * 6
    first = model.num_timesteps
    assert first + 30 <= model.learn(30, reset_num_timesteps=False).num_timesteps < first + 30 + 4 * 6
    assert 20 <= model.learn(20).num_timesteps < 20 + 4 * 6


def test_set_random_seed_repeats_actions_and_training() -> None:
    model = make_model()
    observation, runs = WalkEnv().reset(seed=0)[0], []
    for _ in range(2):
        model.set_random_seed(7)
        runs.append([int(model.predict(observation)[0]) for _ in range(20)])
    assert runs[0] == runs[1]
    assert 0 < sum(runs[0]) < 20
    first, second = make_model().learn(50), make_model().learn(50)
    for a, b in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_parameters_go_from_one_model_to_another() -> None:
    source, target = make_model(seed=1).learn(20), make_model(seed=2)
    target.set_parameters(source.get_parameters())
    for a, b in zip(source.policy.parameters(), target.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    assert target.policy.optimizer.state_dict()["state"].keys() == source.policy.optimizer.state_dict()["state"].keys()
    with pytest.raises(ValueError, match="unknown"):
        target.set_parameters({**source.get_parameters(), "unknown": {}})
    with pytest.raises(ValueError, match="expected"):
        target.set_parameters({"policy": source.get_parameters()["policy"]})
    target.set_parameters({"policy": source.get_parameters()["policy"]}, exact_match=False)


@torch.no_grad()
def test_evaluate_actions_agrees_with_get_distribution() -> None:
    env = gym.make("Pendulum-v1")
    policy = TPO("MlpPolicy", env, seed=0).policy
    observations, _ = policy.obs_to_tensor(np.stack([env.observation_space.sample() for _ in range(10)]))
    actions = torch.as_tensor(np.stack([env.action_space.sample() for _ in range(10)]))
    log_probs, entropy = policy.evaluate_actions(observations, actions)
    distribution = policy.get_distribution(observations)
    assert torch.allclose(log_probs, distribution.log_prob(actions))
    assert torch.allclose(entropy, distribution.entropy())


class Doubled(BaseFeaturesExtractor):
    """Twice the observation."""

    def __init__(self, observation_space: spaces.Box, factor: float = 1.0) -> None:
        super().__init__(observation_space, features_dim=observation_space.shape[0])
        self.factor = factor

    def forward(self, observations: torch.Tensor) -> torch.Tensor:
        return observations * self.factor


def test_networks_and_optimizers_of_ones_own() -> None:
    policy_kwargs = {
        "features_extractor_class": Doubled,
        "features_extractor_kwargs": {"factor": 2.0},
        "activation_fn": nn.ReLU,
        "net_arch": {"pi": [5], "vf": [7]},
        "optimizer_class": torch.optim.AdamW,
        "optimizer_kwargs": {"weight_decay": 0.1},
    }
    model = make_model(policy_kwargs=policy_kwargs).learn(20)
    assert model.policy.features_extractor.factor == 2
    assert [type(layer) for layer in model.policy.mlp] == [nn.Linear, nn.ReLU]
    assert model.policy.mlp[0].out_features == 5
    assert isinstance(model.policy.optimizer, torch.optim.AdamW)
    assert model.policy.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_the_old_form_of_net_arch_is_read_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"before version 1.8"):
        model = make_model(policy_kwargs={"net_arch": [{"pi": [5], "vf": [7]}]})
    assert model.policy.mlp[0].out_features == 5


def test_a_schedule_of_the_clip_range_is_refused() -> None:
    with pytest.raises(ValueError, match="no schedule"):
        GRPO("MlpPolicy", WalkEnv(), clip_range=lambda _: 0.2)  # type: ignore[arg-type]


# Environments


def test_vec_normalize_is_found_and_kept_in_step_by_evaluations() -> None:
    train_env = VecNormalize(DummyVecEnv([lambda: Monitor(WalkEnv())] * 4))
    eval_env = VecNormalize(DummyVecEnv([lambda: Monitor(WalkEnv())]), training=False, norm_reward=False)
    model = make_model(train_env)
    assert model.get_vec_normalize_env() is train_env
    model.learn(40, callback=EvalCallback(eval_env, eval_freq=1, n_eval_episodes=1, verbose=0))
    assert train_env.obs_rms.count > 40
    np.testing.assert_allclose(eval_env.obs_rms.mean, train_env.obs_rms.mean)
    assert make_model().get_vec_normalize_env() is None


def test_set_env_needs_as_many_sub_environments() -> None:
    model = make_model(DummyVecEnv([WalkEnv] * 4)).learn(10)
    model.set_env(DummyVecEnv([WalkEnv] * 4))
    model.learn(10)
    model.set_env(WalkEnv())
    model.learn(10)
    with pytest.raises(AssertionError, match="number of environments"):
        model.set_env(DummyVecEnv([WalkEnv] * 6))
    steps = model.num_timesteps
    model.set_env(model.get_env(), force_reset=False)
    assert model.learn(10, reset_num_timesteps=False).num_timesteps >= steps + 10


def test_a_monitor_that_writes_a_file_can_be_grouped(tmp_path: Path) -> None:
    env = Monitor(WalkEnv(), filename=str(tmp_path / "run"), info_keywords=("is_success",))
    watcher, model = Watcher(), make_model(env)
    model.learn(40, callback=watcher)
    assert len((tmp_path / "run.monitor.csv").read_text().splitlines()) > 3  # the first sub-environment's episodes
    assert all(episode["is_success"] for episode in watcher.episodes)
    assert len(model.get_env().envs) == 4


def test_a_rollout_that_does_not_end_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_algorithm, "LONG_EPISODE", 3)
    with pytest.warns(UserWarning, match="TimeLimit"):
        make_model().learn(1)


@pytest.mark.parametrize("algorithm", [TPO, GRPO])
def test_evaluate_policy_on_the_training_environment(algorithm: type[TPO]) -> None:
    model = algorithm("MlpPolicy", WalkEnv(), group_size=2, n_contexts=2, seed=0).learn(20)
    mean, _ = evaluate_policy(model, model.get_env(), n_eval_episodes=8)
    assert 0 <= mean <= 6
    assert model.learn(20).num_timesteps >= 20


def test_videos_of_our_tasks(tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    env = make_vec_env("tpo_gym/TokenReversal-v0", n_envs=4, sequence_length=4, render_mode="rgb_array")
    recorder = VecVideoRecorder(env, str(tmp_path), record_video_trigger=lambda step: step == 0, video_length=4)
    TPO("MlpPolicy", recorder, group_size=2, seed=0).learn(40)
    recorder.close()
    assert [file.suffix for file in tmp_path.iterdir()] == [".mp4"]


def test_looking_changes_nothing_and_shows_what_the_policy_sees_next() -> None:
    """Observations are made when a callback reads them: the next batch's contexts, and the same training."""
    shown: list[np.ndarray] = []
    seen: list[torch.Tensor] = []

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            shown.append(self.locals["new_obs"].copy())
            self.locals["new_obs"][:] = -1  # the callback's own memory
            return True

        def _on_rollout_end(self) -> None:
            seen.append(self.model.rollout.candidates.observations.clone())  # type: ignore[attr-defined]

    def train(callback: BaseCallback | None) -> TPO:
        env: Any = gym.make_vec("tpo_gym/MNISTBandit-v0", 10, split="test")
        return TPO("MlpPolicy", env, candidates="all_actions", seed=0).learn(40, callback)

    watched, alone = train(Look()), train(None)
    assert len(shown) == len(seen) == 4
    for image, observation in zip(shown, seen[1:], strict=False):
        np.testing.assert_array_equal(image, observation.numpy())
    for p, q in zip(watched.policy.parameters(), alone.policy.parameters(), strict=True):
        assert torch.equal(p, q)
