"""`python -m tpo_gym.train`: alone, resumed, and under torchrun; what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tpo_gym import GRPO, TPO
from tpo_gym.train import ALGORITHMS, main, parse

ROOT = Path(__file__).resolve().parent.parent
TOKENS = ["tpo_gym/TokenReversal-v0", "--env-args", "sequence_length=3", "reward=terminal", "--seed", "1", "--quiet"]
SIZES = ["--args", "n_contexts=6", "group_size=4", "--policy-args", "net_arch=[8]"]


def same(first, second, tolerance=0.0):
    pairs = list(zip(first.policy.parameters(), second.policy.parameters(), strict=True))
    assert pairs
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs)


def test_trains_as_the_class_does(tmp_path, capsys):
    words = [*TOKENS, *SIZES, "--args", "eta=0.5", "--timesteps", "288", "--save", str(tmp_path / "model")]
    words += ["--tensorboard", str(tmp_path / "runs"), "--log-interval", "1"]
    assert main(words) == 0
    assert "TPO on tpo_gym/TokenReversal-v0: 288 interactions, 16 updates; mean return" in capsys.readouterr().out
    env = gym.make("tpo_gym/TokenReversal-v0", sequence_length=3, reward="terminal")
    model = TPO("MlpPolicy", env, n_contexts=6, group_size=4, eta=0.5, policy_kwargs={"net_arch": [8]}, seed=1)
    assert same(model.learn(288), TPO.load(tmp_path / "model"))
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name == "TPO_1"
    logged = EventAccumulator(str(run)).Reload()
    assert [event.step for event in logged.Scalars("train/loss")] == [72, 144, 216, 288]


def test_any_algorithm_and_environment(tmp_path, capsys):
    words = ["--policy-args", "net_arch=[8]", "optimizer_class=torch.optim:SGD", "--timesteps", "1", "--quiet"]
    words += ["--args", "group_size=2", "n_contexts=2", "--save", str(tmp_path / "model")]
    assert main(["CartPole-v1", "--algorithm", "GRPO", "--env-args", "max_episode_steps=5", *words]) == 0
    model = GRPO.load(tmp_path / "model")
    assert isinstance(model.policy.optimizer, torch.optim.SGD)
    assert 4 <= model.num_timesteps <= 20
    assert model.predict(np.zeros(4, dtype=np.float32))[0] in (0, 1)
    assert {"TPO", "GRPO", "DrGRPO", "GSPO", "RLOO", "REBEL", "AWR", "DG", "REINFORCE", "CrossEntropy"} <= set(
        ALGORITHMS
    )


@pytest.mark.slow
def test_compiled(tmp_path):
    words = ["tpo_gym/ContextualBandit-v0", "--env-args", "num_contexts=5", "--args", "n_contexts=5", "--quiet"]
    words += ["--seed", "1", "--timesteps", "50", "--device", "cpu", "--save"]
    assert main([*words, str(tmp_path / "plain")]) == 0
    assert main([*words, str(tmp_path / "compiled"), "--compile"]) == 0
    assert same(TPO.load(tmp_path / "plain"), TPO.load(tmp_path / "compiled"), tolerance=1e-4)


def test_resumes_exactly_and_refuses_other_arguments(tmp_path, capsys):
    def run(timesteps, *more):
        folder = str(tmp_path / "checkpoints")
        return main([*TOKENS, *SIZES, "--timesteps", timesteps, "--checkpoints", folder, "--resume", *more])

    assert run("144", "--checkpoint-every", "1") == 0  # nothing there yet: it begins
    assert run("288", "--save", str(tmp_path / "two")) == 0
    assert main([*TOKENS, *SIZES, "--timesteps", "288", "--save", str(tmp_path / "one")]) == 0
    assert same(TPO.load(tmp_path / "one"), TPO.load(tmp_path / "two"))
    assert TPO.load(tmp_path / "two").num_timesteps == 288
    capsys.readouterr()
    assert run("288") == 0  # there is nothing left to do
    assert "288 interactions" in capsys.readouterr().out
    assert run("400", "--args", "eta=2") == 2
    assert "are of a training with eta=1.0, not 2: repeat its command" in capsys.readouterr().err
    assert run("400", "--algorithm", "GRPO") == 2
    assert "holds a TPO" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["CartPole-v1"], "--timesteps"),
        (["CartPole-v1", "--timesteps", "1.5"], "invalid"),
        (["CartPole-v1", "--timesteps", "0"], "--timesteps must be at least 1, got 0"),
        (["CartPole-v1", "--timesteps", "9", "--algorithm", "PPO"], "unknown algorithm 'PPO'; there are: AWR"),
        (["CartPole-v1", "--timesteps", "9", "--resume"], "name their folder with --checkpoints"),
        (["CartPole-v1", "--timesteps", "9", "--args", "eta"], "expected NAME=VALUE, got 'eta'"),
        (["CartPole-v1", "--timesteps", "9", "--args", "etta=1"], "TPO has no argument 'etta'; it has: anchor"),
        (["CartPole-v1", "--timesteps", "9", "--args", "seed=1"], "seed is no argument for --args: use --seed"),
        (["CartPole-v1", "--timesteps", "9", "--policy-args", "x=torch.optim:None1"], "names nothing"),
    ],
)
def test_command_line_errors(words, message, capsys):
    with pytest.raises(SystemExit) as error:
        parse(words)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["NoSuchThing-v0"], "NoSuchThing"),
        (["CartPole-v1", "--policy", "MlpPolice"], "MlpPolice"),
        (["CartPole-v1", "--args", "group_size=1"], "group_size=1: TPO compares the candidates"),
        (["CartPole-v1", "--env-args", "gravity=0"], "gravity"),
        (["tpo_gym/TokenCopy-v0", "--env-args", "reward=best"], "reward='best' is unknown"),
        (["CartPole-v1", "--device", "toaster"], "toaster"),
    ],
)
def test_what_cannot_be_made(words, message, capsys):
    assert main([*words, "--timesteps", "9", "--quiet"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert message in shown.err


@pytest.mark.slow
def test_torchrun(tmp_path):
    """Two processes: the result, the run and the files of one; stopped and resumed."""

    def run(n_processes, name, *more):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_processes)]
        done = subprocess.run(
            [sys.executable, *torchrun, "-m", "tpo_gym.train", *TOKENS, *SIZES, "--save", str(tmp_path / name), *more],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return done.returncode, done.stdout, done.stderr

    folder, runs = ["--checkpoints", str(tmp_path / "checkpoints")], ["--tensorboard", str(tmp_path / "runs")]
    code, shown, errors = run(2, "half", "--timesteps", "144", *folder, *runs, "--log-interval", "1")
    assert code == 0, errors
    assert shown.count("144 interactions, 8 updates") == 1
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["TPO_1"]
    code, _, errors = run(2, "two", "--timesteps", "288", *folder, *runs, "--resume", "--log-interval", "1")
    assert code == 0, errors
    assert main([*TOKENS, *SIZES, "--timesteps", "288", "--save", str(tmp_path / "one")]) == 0
    one, two = TPO.load(tmp_path / "one"), TPO.load(tmp_path / "two")
    assert same(one, two, 1e-5)
    assert (one.num_timesteps, one._n_updates) == (two.num_timesteps, two._n_updates) == (288, 16)
    (events,) = (tmp_path / "runs").iterdir()
    assert [event.step for event in EventAccumulator(str(events)).Reload().Scalars("train/loss")] == [72, 144, 216, 288]
    code, _, errors = run(2, "refused", "--timesteps", "9", "--args", "n_contexts=3")
    assert code != 0
    assert errors.count("error: 3 contexts per rollout batch cannot be shared equally by 2 processes") == 1
    assert "tpo_gym/train.py" not in errors  # no traceback but torchrun's own
