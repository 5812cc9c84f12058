"""Save, load and go on equals never having stopped, to the last bit (invariant 5; field reports 20 and 21)."""

import os
import random
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecNormalize
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tpo_gym import GRPO, TPO, make_vec_env
from tpo_gym.agents.callbacks import ResumeCallback
from tpo_gym.envs.registration import ENVIRONMENTS

DIGITS = {
    "features": np.random.default_rng(0).random((30, 4), dtype=np.float32),
    "labels": np.arange(30) % 3,
}
TOKENS = {"sequence_length": 3}
SMALL = {"d_model": 16, "n_layers": 1}
KWARGS = {"ClassificationBandit": DIGITS, **{name: TOKENS for name in ENVIRONMENTS if name.startswith("Token")}}


class Recorder(KVWriter):
    """Keeps every logged value except the times."""

    def __init__(self):
        self.rows = []

    def write(self, key_values, key_excluded, step=0):
        times = ("time/fps", "time/time_elapsed")
        self.rows.append((step, {k: v for k, v in key_values.items() if k not in times}))

    def close(self):
        pass


def recorded(model):
    recorder = Recorder()
    model.set_logger(Logger(folder=None, output_formats=[recorder]))
    return recorder.rows


def contents(model):
    """Everything that must agree: weights and optimizer state, as a flat list of tensors and numbers."""

    def flat(value):
        if isinstance(value, dict):
            return [x for key in value for x in flat(value[key])]
        if isinstance(value, (list, tuple)):
            return [x for item in value for x in flat(item)]
        return [value]

    return flat(model.get_parameters())


def assert_same(first, second):
    pairs = list(zip(contents(first), contents(second), strict=True))
    assert pairs
    for a, b in pairs:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    for name in ("num_timesteps", "_n_updates", "_iteration"):
        assert getattr(first, name) == getattr(second, name)


def scramble():
    """Disturb all random generators, as a new process would."""
    random.seed()
    np.random.seed()
    torch.seed()


def check_exact(make_model, make_env, path, n_steps, load=TPO.load):
    """Train twice as long at once, and with a save and a load in the middle; compare."""
    whole = make_model()
    rows = recorded(whole)
    whole.learn(2 * n_steps)
    first = make_model()
    first_rows = recorded(first)
    first.learn(n_steps).save(path)
    scramble()
    second = load(path, env=make_env())
    second_rows = recorded(second)
    second.learn(n_steps, reset_num_timesteps=False)
    assert_same(whole, second)
    assert len(rows) >= 4
    # Through repr, because a value that is nan everywhere agrees.
    assert repr(rows) == repr(first_rows + second_rows)
    return whole, second


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.parametrize("policy", ["MlpPolicy", "TransformerPolicy"])
def test_every_environment_of_ours(name, policy, tmp_path):
    if policy == "TransformerPolicy" and not name.startswith("Token"):
        pytest.skip("the transformer reads token tasks")

    def make_env():
        return gym.make_vec(f"tpo_gym/{name}-v0", num_envs=8, **KWARGS.get(name, {}))

    def make_model():
        kwargs = SMALL if policy == "TransformerPolicy" else {"net_arch": [8]}
        return TPO(policy, make_env(), group_size=4, policy_kwargs=kwargs, n_epochs=2, seed=3)

    per_batch = 8 * make_env().horizon
    check_exact(make_model, make_env, tmp_path / "model", 2 * per_batch)


def test_on_each_device(device, tmp_path):
    def make_env():
        return gym.make_vec("tpo_gym/TokenReversal-v0", num_envs=8, device=device, **TOKENS)

    def make_model():
        return TPO("TransformerPolicy", make_env(), group_size=4, policy_kwargs=SMALL, seed=3, device=device)

    check_exact(make_model, make_env, tmp_path / "model", 2 * 8 * 3)


@pytest.mark.parametrize("candidates", ["episodes", "actions", "all_actions"])
def test_candidate_sets(candidates, tmp_path):
    def make_env():
        return gym.make_vec("tpo_gym/ContextualBandit-v0", num_envs=8)

    def make_model():
        return TPO("TabularPolicy", make_env(), 0.1, group_size=4, candidates=candidates, seed=0)

    check_exact(make_model, make_env, tmp_path / "model", 16)


def cartpole_model(**kwargs):
    return TPO(
        "MlpPolicy", "CartPole-v1", group_size=2, n_contexts=2, policy_kwargs={"net_arch": [8]}, seed=1, **kwargs
    )


class Budget(BaseCallback):
    """Ends training after some rollout batches: CartPole's are of different lengths."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def _on_rollout_start(self):
        self.batches -= 1

    def _on_step(self):
        return self.batches >= 0


@pytest.mark.parametrize("kwargs", [{}, {"candidates": "actions", "lookahead": 1}], ids=["episodes", "actions"])
def test_cartpole(kwargs, tmp_path):
    whole = cartpole_model(**kwargs)
    rows = recorded(whole)
    whole.learn(10**9, callback=Budget(6))
    first = cartpole_model(**kwargs)
    first_rows = recorded(first)
    first.learn(10**9, callback=Budget(3))  # stopped within a batch, which the loaded model collects again
    first.save(tmp_path / "model")
    scramble()
    second = TPO.load(tmp_path / "model", env="CartPole-v1")
    second_rows = recorded(second)
    second.learn(10**9, reset_num_timesteps=False, callback=Budget(3))
    assert_same_weights_and_rows(whole, second, rows, first_rows + second_rows)


def assert_same_weights_and_rows(whole, second, rows, other_rows):
    for a, b in zip(contents(whole), contents(second), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert len(rows) >= 4
    assert repr(rows) == repr(other_rows)


def test_vec_normalize(tmp_path):
    def make_env():
        return VecNormalize(make_vec_env("CartPole-v1", n_envs=4, seed=0))

    def make_model():
        return TPO("MlpPolicy", make_env(), group_size=2, policy_kwargs={"net_arch": [8]}, seed=1)

    whole = make_model().learn(10**9, callback=Budget(5))
    first = make_model().learn(10**9, callback=Budget(2))
    first.save(tmp_path / "model")
    second = TPO.load(tmp_path / "model", env=make_env())
    second.learn(10**9, reset_num_timesteps=False, callback=Budget(3))
    for a, b in zip(contents(whole), contents(second), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert np.array_equal(whole.env.obs_rms.mean, second.env.obs_rms.mean)


def bandit_model(**kwargs):
    return TPO("TabularPolicy", "tpo_gym/ContextualBandit-v0", 0.1, n_contexts=8, seed=0, **kwargs)


def token_model(learning_rate=0.01, **kwargs):
    env = gym.make_vec("tpo_gym/TokenReversal-v0", num_envs=8, **TOKENS)
    return TPO("MlpPolicy", env, learning_rate, group_size=4, policy_kwargs={"net_arch": [8]}, seed=5, **kwargs)


def test_linear_schedule_is_exact_with_the_remaining_budget(tmp_path):
    schedule = LinearSchedule(0.1, 0.001, 1.0)
    whole = token_model(schedule).learn(240)
    token_model(schedule).learn(240, callback=ResumeCallback(tmp_path, every=4, keep=100))
    for file in tmp_path.iterdir():
        if file.name not in ("checkpoint_96_steps.zip",):
            file.unlink()
    model = TPO.resume(tmp_path)
    assert model.remaining_timesteps == 240 - 96
    model.learn(model.remaining_timesteps, reset_num_timesteps=False)
    assert_same(whole, model)


def test_saved_in_the_middle_of_a_rollout(tmp_path):
    """SB3's CheckpointCallback saves at any step; the file goes on from the last update boundary."""
    whole = token_model().learn(240)
    token_model().learn(120, callback=CheckpointCallback(5, str(tmp_path)))
    model = TPO.load(tmp_path / "rl_model_80_steps", env=gym.make_vec("tpo_gym/TokenReversal-v0", num_envs=8, **TOKENS))
    assert model.num_timesteps == 80
    model.learn(240 - 80, reset_num_timesteps=False)
    assert_same(whole, model)


def test_load_then_save_keeps_the_state(tmp_path):
    whole = bandit_model().learn(160)
    bandit_model().learn(80).save(tmp_path / "first")
    TPO.load(tmp_path / "first").save(tmp_path / "second")
    model = TPO.load(tmp_path / "second")
    model.set_env("tpo_gym/ContextualBandit-v0")
    assert_same(whole, model.learn(80, reset_num_timesteps=False))
    assert TPO.resume(tmp_path / "second").env.num_envs == 8


def test_a_model_that_never_learned(tmp_path):
    model = bandit_model()
    model.save(tmp_path / "model")
    whole = model.learn(80)
    loaded = TPO.load(tmp_path / "model", env="tpo_gym/ContextualBandit-v0")
    assert_same(whole, loaded.learn(80, reset_num_timesteps=False))


def test_loading_leaves_the_random_generators_alone(tmp_path):
    bandit_model().learn(80).save(tmp_path / "model")
    before = (random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state())
    model = TPO.load(tmp_path / "model", env="tpo_gym/ContextualBandit-v0")
    model.predict(np.zeros(1, dtype=np.int64), deterministic=True)
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert torch.equal(torch.get_rng_state(), before[2])


def test_a_loaded_model_that_starts_anew_begins_with_its_seed(tmp_path):
    bandit_model().learn(80).save(tmp_path / "model")
    runs = []
    for _ in range(2):
        scramble()
        runs.append(TPO.load(tmp_path / "model", env="tpo_gym/ContextualBandit-v0").learn(80))
    assert_same(*runs)
    assert runs[0].num_timesteps == 80


def test_another_environment_goes_on_with_a_warning(tmp_path):
    bandit_model().learn(80).save(tmp_path / "model")
    model = TPO.load(tmp_path / "model", env=gym.make_vec("tpo_gym/ContextualBandit-v0", num_envs=16))
    with pytest.warns(UserWarning, match="not bit for bit"):
        model.learn(80, reset_num_timesteps=False)
    assert model.num_timesteps == 160


def test_another_environment_set_later_discards_the_state(tmp_path):
    bandit_model().learn(80).save(tmp_path / "model")
    model = TPO.load(tmp_path / "model", env="tpo_gym/ContextualBandit-v0")
    model.set_env("tpo_gym/ContextualBandit-v0")
    model.learn(80, reset_num_timesteps=False)
    assert model.num_timesteps == 160


def test_learning_without_an_environment_says_so(tmp_path):
    bandit_model().save(tmp_path / "model")
    with pytest.raises(ValueError, match="set_env"):
        TPO.load(tmp_path / "model").learn(8)


def test_number_of_timesteps_can_be_overridden(tmp_path):
    bandit_model().learn(80).save(tmp_path / "model")
    model = TPO.load(tmp_path / "model", env="tpo_gym/ContextualBandit-v0", num_timesteps=8)
    assert model.learn(8, reset_num_timesteps=False).num_timesteps == 16


def scalars(folder, key="train/loss"):
    events = EventAccumulator(str(folder)).Reload()
    # Sorted, since files of one second are read in the order of a counter's digits: the 10th before the 9th.
    steps = sorted((event.step, event.value) for event in events.Scalars(key))
    return dict(steps), len(steps)


def test_tensorboard_shows_one_curve(tmp_path):
    logs = str(tmp_path / "runs")
    bandit_model(tensorboard_log=logs).learn(80, tb_log_name="mine").save(tmp_path / "model")
    bandit_model(tensorboard_log=logs).learn(80, tb_log_name="mine")  # another run, after it
    model = TPO.load(tmp_path / "model", env="tpo_gym/ContextualBandit-v0")
    model.learn(80, reset_num_timesteps=False)
    assert sorted(os.listdir(logs)) == ["mine_1", "mine_2"]
    steps, count = scalars(tmp_path / "runs" / "mine_1")
    assert list(steps) == list(range(8, 168, 8))
    assert count == 20
    whole = bandit_model(tensorboard_log=logs).learn(160, tb_log_name="whole")
    assert scalars(tmp_path / "runs" / "whole_1") == (steps, count)
    assert_same(whole, model)


def test_events_after_the_checkpoint_are_superseded(tmp_path):
    """What a killed process logged after its last checkpoint does not appear twice."""
    logs = str(tmp_path / "runs")
    model = bandit_model(tensorboard_log=logs)
    model.learn(80, callback=CheckpointCallback(4, str(tmp_path)))
    model.logger.close()
    model = TPO.load(tmp_path / "rl_model_32_steps", env="tpo_gym/ContextualBandit-v0")
    model.learn(80, reset_num_timesteps=False)
    model.logger.close()
    steps, count = scalars(tmp_path / "runs" / "TPO_1")
    assert count == len(steps)
    assert list(steps) == list(range(8, 120, 8))


def test_models_that_share_a_folder_keep_their_runs(tmp_path):
    logs = str(tmp_path)
    first, second = bandit_model(tensorboard_log=logs), bandit_model(tensorboard_log=logs)
    first.learn(8)
    second.learn(8)
    first.learn(8, reset_num_timesteps=False)
    assert list(scalars(tmp_path / "TPO_1")[0]) == [8, 16]
    assert list(scalars(tmp_path / "TPO_2")[0]) == [8]


def test_best_model_of_eval_callback(tmp_path):
    evaluation = EvalCallback(
        make_vec_env("tpo_gym/ContextualBandit-v0", n_envs=2),
        best_model_save_path=str(tmp_path),
        eval_freq=3,
        verbose=0,
    )
    bandit_model().learn(80, callback=evaluation)
    assert TPO.load(tmp_path / "best_model").predict(np.zeros(1, dtype=np.int64))[0].shape == (1,)


# Autosave and resume.


def test_autosave_keeps_the_last_files(tmp_path):
    bandit_model().learn(80, callback=ResumeCallback(tmp_path, every=3, keep=2))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_72_steps.zip", "checkpoint_80_steps.zip"]


@pytest.mark.parametrize("place", ["rollout", "update"])
def test_an_interrupted_training_goes_on_exactly(place, tmp_path, monkeypatch):
    """Ctrl-C, in the middle of a rollout batch or of the epochs of an update."""
    model = token_model()
    original = type(model).group_losses
    calls = []

    def interrupt(*args):
        calls.append(args)
        if len(calls) == 15:
            raise KeyboardInterrupt
        return original(*args)

    class InRollout(BaseCallback):
        def _on_step(self):
            if self.n_calls == 11:
                raise KeyboardInterrupt
            return True

    callbacks = [ResumeCallback(tmp_path, every=2)]
    if place == "update":
        monkeypatch.setattr(type(model), "group_losses", interrupt)
    else:
        callbacks.append(InRollout())
    with pytest.raises(KeyboardInterrupt):
        model.learn(240, callback=callbacks)
    monkeypatch.undo()
    resumed = TPO.resume(tmp_path)
    assert resumed.num_timesteps == (48 if place == "update" else 88)
    resumed.learn(resumed.remaining_timesteps, reset_num_timesteps=False)
    assert_same(token_model().learn(240), resumed)


def test_autosave_by_timesteps(tmp_path):
    bandit_model().learn(80, callback=ResumeCallback(tmp_path, every=20, unit="timesteps", keep=10))
    steps = sorted(int(name.split("_")[1]) for name in os.listdir(tmp_path))
    assert steps == [0, 24, 48, 72, 80]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"every": 0}, "every"), ({"keep": 0}, "keep"), ({"unit": "seconds"}, "unit"), ({"path": "a.zip"}, "folder")],
)
def test_autosave_arguments(kwargs, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ResumeCallback(**{"path": tmp_path, **kwargs})


@pytest.mark.parametrize(
    "env",
    [
        "tpo_gym/ContextualBandit-v0",
        "tpo_gym:tpo_gym/ContextualBandit-v0",
        "CartPole-v1",
        gym.make("CartPole-v1", max_episode_steps=20),
        gym.make_vec("tpo_gym/ContextualBandit-v0", num_envs=8, num_contexts=5, num_actions=3),
    ],
    ids=["ours", "with module", "third party", "single", "batched"],
)
def test_resume_makes_the_environment_again(env, tmp_path):
    model = GRPO("MlpPolicy", env, group_size=2, n_contexts=2, policy_kwargs={"net_arch": [8]}, seed=0)
    model.learn(100, callback=ResumeCallback(tmp_path))
    resumed = GRPO.resume(tmp_path)
    assert resumed.env.num_envs == model.env.num_envs
    assert resumed.observation_space == model.observation_space
    assert_same(model.learn(50, reset_num_timesteps=False), resumed.learn(50, reset_num_timesteps=False))
    if isinstance(env, gym.Env):
        assert resumed.env.get_attr("spec")[0].max_episode_steps == 20


def test_resume_wants_an_environment_that_it_cannot_make(tmp_path):
    model = TPO("MlpPolicy", gym.make_vec("tpo_gym/ClassificationBandit-v0", num_envs=8, **DIGITS), seed=0)
    model.learn(8, callback=ResumeCallback(tmp_path))
    with pytest.raises(ValueError, match="Pass env="):
        TPO.resume(tmp_path)
    env = gym.make_vec("tpo_gym/ClassificationBandit-v0", num_envs=8, **DIGITS)
    assert TPO.resume(tmp_path, env=env).num_timesteps == 8


def test_a_half_written_file_is_never_loaded(tmp_path):
    bandit_model().learn(80, callback=ResumeCallback(tmp_path, every=3, keep=2))
    good, newest = sorted(tmp_path.iterdir())
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="checkpoint_80_steps.zip is not a complete checkpoint"):
        assert TPO.resume(tmp_path).num_timesteps == 72
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        TPO.load(newest)
    good.unlink()
    with pytest.raises(ValueError, match="complete"):
        TPO.resume(tmp_path)
    newest.unlink()
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        TPO.resume(tmp_path)


def test_a_damaged_file_is_never_loaded(tmp_path):
    """Blocks that never reached the disk read as zeros; checksums tell."""
    bandit_model().save(tmp_path / "model")
    file = tmp_path / "model.zip"
    content = bytearray(file.read_bytes())
    at = content.find(b"storage") if b"storage" in content else len(content) // 2
    content[at : at + 64] = bytes(64)
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        TPO.load(file)


# Trains with autosave in a process that kills itself after some steps or while it writes a file, then in another one,
# and so on. They are forks of one that has imported everything, for the sake of time.
TRAINING = """
import os, signal, sys
from pathlib import Path
import torch
from stable_baselines3.common.callbacks import BaseCallback
from tpo_gym import TPO
from tpo_gym.agents.callbacks import ResumeCallback

torch.set_num_threads(1)
folder = Path(sys.argv[1])

class Kill(BaseCallback):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def _on_step(self):
        if self.n_calls == self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

def train(kill_after, kill_in_write):
    real_fsync, writes = os.fsync, []

    def fsync(descriptor):
        writes.append(descriptor)
        if len(writes) == kill_in_write:
            os.kill(os.getpid(), signal.SIGKILL)
        real_fsync(descriptor)

    os.fsync = fsync
    callbacks = [ResumeCallback(folder, every=2), Kill(kill_after)]
    try:
        model = TPO.resume(folder)
    except FileNotFoundError:
        model = TPO("MlpPolicy", "CartPole-v1", group_size=2, n_contexts=2, policy_kwargs={"net_arch": [8]}, seed=0)
        model.learn(800, callback=callbacks)
    else:
        model.learn(model.remaining_timesteps, callback=callbacks, reset_num_timesteps=False)
    model.save(folder / "final")

for attempt in sys.argv[2:]:
    child = os.fork()
    if child == 0:
        train(*map(int, attempt.split(",")))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX processes")
def test_a_killed_process_ends_where_it_would_have(tmp_path):
    rng = np.random.default_rng(0)
    # After a number of steps, in the first write of all, in later ones, and at last not at all.
    attempts = ["0,1", f"{rng.integers(10, 120)},0", "0,3", f"{rng.integers(10, 120)},0", "0,0"]
    command = [sys.executable, "-c", TRAINING, str(tmp_path), *attempts]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, env=env, capture_output=True, check=False, text=True)
    assert done.stdout.split() == ["-9"] * 4 + ["0"], done.stderr
    assert not list(tmp_path.glob(".*"))
    whole = TPO("MlpPolicy", "CartPole-v1", group_size=2, n_contexts=2, policy_kwargs={"net_arch": [8]}, seed=0)
    assert_same(whole.learn(800), TPO.load(tmp_path / "final"))
