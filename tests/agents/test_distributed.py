"""Two processes give what one gives: the same numbers up to the rounding of sums, for every kind of rollout batch."""

import contextlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Normal

from tpo_gym import TPO
from tpo_gym.agents.distributed import distribute, join
from tpo_gym.agents.exchange import Exchange
from tpo_gym.agents.shards import SharedNoise

WORKER = Path(__file__).with_name("distributed_worker.py")
ROOT = WORKER.parents[2]
worker = runpy.run_path(str(WORKER))

# Muon and Adam make steps of full size also where a gradient is rounding alone.
TOLERANCE = {"muon": 5e-3}


def launch(*command, n_processes=2, cwd=ROOT):
    """Runs a Python program under torchrun."""
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_processes), *command],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What each of two processes ends with, and the folder that they wrote to."""
    folder = tmp_path_factory.mktemp("two")
    done = launch(str(WORKER), str(folder))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [torch.load(folder / f"results-{rank}.pt", weights_only=False) for rank in (0, 1)], folder


def close(first, second, tolerance=1e-5):
    assert len(first["parameters"]) == len(second["parameters"]) > 0
    for a, b in zip(first["parameters"], second["parameters"], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert first["counters"] == second["counters"]
    assert all(torch.equal(a, b) for a, b in zip(first["random"], second["random"], strict=True))
    assert np.allclose(first["episodes"], second["episodes"])


@pytest.mark.slow
@pytest.mark.parametrize("name", worker["CASES"])
def test_two_processes_give_the_result_of_one(two, name):
    results, _ = two
    one = worker["train"](worker["CASES"][name]())
    start = worker["CASES"][name]()
    before = torch.nn.utils.parameters_to_vector(start.policy.parameters())
    assert (torch.cat([p.flatten() for p in one["parameters"]]) - before).abs().max() > 1e-4
    tolerance = TOLERANCE.get(name, 1e-5)
    close(one, results[0][name], tolerance)
    rows, others = one["logs"], results[0][name]["logs"]
    assert len(rows) == len(others) >= 2
    for row, other in zip(rows, others, strict=True):
        assert row.keys() == other.keys()
        for key, value in row.items():
            assert value == pytest.approx(other[key], rel=100 * tolerance, abs=10 * tolerance, nan_ok=True), key


@pytest.mark.slow
def test_all_processes_hold_the_same_weights(two):
    first, second = two[0]
    for name in [*worker["CASES"], "unseeded"]:
        pairs = zip(first[name]["parameters"], second[name]["parameters"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), name
        assert first[name]["counters"] == second[name]["counters"]
        assert first[name]["logs"]
        assert repr(first[name]["logs"]) == repr(second[name]["logs"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tpo", "cartpole", "masked"])
def test_save_and_load_in_two_processes_is_exact(two, name):
    (first, _), folder = two
    whole, resumed = first[name], first[f"{name} resumed"]
    assert all(torch.equal(a, b) for a, b in zip(whole["parameters"], resumed["parameters"], strict=True))
    assert whole["counters"][:3] == resumed["counters"][:3]
    assert repr(whole["logs"][1:]) == repr(resumed["logs"])
    # The file is that of one process, and goes on in one too.
    env = "Masked-v0" if name == "masked" else "CartPole-v1" if name == "cartpole" else worker["terminal"]()
    alone = worker["train"](TPO.load(folder / name, env=env), 2, reset_num_timesteps=False)
    for a, b in zip(whole["parameters"], alone["parameters"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert alone["counters"][:3] == whole["counters"][:3]


@pytest.mark.slow
def test_what_cannot_be_shared_is_refused_everywhere(two):
    messages = {
        "contexts": "3 contexts per rollout batch cannot be shared equally by 2 processes: make it 2 or 4",
        "vec_env": "cannot share a DummyVecEnv: pass the environment's id",
        "normalize": "cannot share an environment in VecNormalize",
        "lookahead": "use lookahead_deterministic=True",
        "disagreement": "another training than process",
    }
    for results in two[0]:
        assert results["refused"].keys() == messages.keys()
        for name, message in messages.items():
            assert message in results["refused"][name]
    assert "total_timesteps 10 here, 11 there" in two[0][0]["refused"]["disagreement"]


@pytest.mark.slow
def test_one_logger_one_writer_one_end(two):
    results, folder = two
    assert results[0]["ended by one"] == results[1]["ended by one"] == 2
    assert [run.name for run in (folder / "runs").iterdir()] == ["DG_1"]
    assert len(list((folder / "runs").glob("*/events.out.tfevents.*"))) == 1
    files = sorted(file.name for file in (folder / "checkpoints").iterdir())
    assert files == ["checkpoint_120_steps.zip", "checkpoint_60_steps.zip"]
    assert TPO.__name__ not in files
    model = worker["DG"].resume(folder / "checkpoints", env=worker["tokens"](20))
    assert (model.num_timesteps, model.remaining_timesteps) == (120, 0)


class Rank(Exchange):
    """One of two processes, without the other."""

    def __init__(self, rank):
        self.rank, self.size = rank, 2


DRAWS = {
    "one of each row": lambda n: torch.multinomial(torch.linspace(1, 2, 5 * n).view(n, 5), 1),
    "many of each row": lambda n: torch.multinomial(torch.ones(n, 5), 7, replacement=True),
    "categorical": lambda n: Categorical(logits=torch.zeros(n, 4)).sample(),
    "normal": lambda n: Normal(torch.zeros(n, 3), torch.ones(n, 3)).rsample(),
    "bernoulli": lambda n: Bernoulli(logits=torch.zeros(n, 3)).sample(),
    "by shape": lambda n: torch.rand(n, 3),
    "in place": lambda n: torch.empty(n, 3).exponential_(),
    "integers": lambda n: torch.randint(100, (n, 2)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_processes_draw_their_rows_of_one_stream(name):
    def draw(n, *modes):
        torch.manual_seed(0)
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            # Rows that are alike in both processes, so that the results can be put side by side.
            return DRAWS[name](n), torch.get_rng_state()

    parts = [draw(6, SharedNoise(Rank(rank))) for rank in (0, 1)]
    noise = SharedNoise(Rank(1))
    alone, _ = draw(6, noise, noise.paused())
    assert torch.equal(alone, draw(6)[0])
    if name == "one of each row":  # its rows differ: those of two processes are twice the same six
        whole, state = draw_twice(), torch.get_rng_state()
    else:
        whole, state = draw(12)
    assert torch.equal(torch.cat([part for part, _ in parts]), whole)
    assert all(torch.equal(after, state) for _, after in parts)
    assert not torch.equal(parts[0][0], parts[1][0])


def draw_twice():
    torch.manual_seed(0)
    return torch.multinomial(torch.linspace(1, 2, 30).view(6, 5).repeat(2, 1), 1)


def test_without_torchrun(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match="not started by torchrun"):
        join()
    model = TPO("TabularPolicy", "tpo_gym/Bandit-v0", n_contexts=4)
    with pytest.raises(RuntimeError, match="start the program with torchrun"):
        distribute(model)
    assert model.learn(4).num_timesteps == 4
