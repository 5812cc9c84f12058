"""Every environment in a small version, and helpers that several test modules use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch

import tpo_gym  # noqa: F401  (registers the environments)
from tpo_gym.envs import ENVIRONMENTS, BatchedEnv

SMALL: dict[str, dict[str, Any]] = {
    "Bandit": {"num_actions": 3, "correct_action": 1},
    "ContextualBandit": {"num_contexts": 50, "num_actions": 4},
    "MNISTBandit": {"split": "test"},
    "ClassificationBandit": {},
}
TOKENS = {"sequence_length": 4, "vocab_size": 3}


class Task(NamedTuple):
    """An environment id and arguments that keep it small."""

    id: str
    kwargs: dict[str, Any]

    def make(self, **kwargs: Any) -> gym.Env:
        return gym.make(self.id, **self.kwargs, **kwargs)

    def make_vec(self, num_envs: int, **kwargs: Any) -> BatchedEnv:
        return gym.make_vec(self.id, num_envs, **self.kwargs, **kwargs)


@pytest.fixture(scope="session")
def npz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file of labelled examples."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("data") / "examples.npz"
    np.savez(path, features=rng.normal(size=(40, 6)), labels=np.arange(40) % 4)
    return path


@pytest.fixture(params=list(ENVIRONMENTS))
def task(request: pytest.FixtureRequest, npz: Path) -> Task:
    """Each registered environment in turn."""
    kwargs = SMALL.get(request.param, TOKENS)
    if request.param == "ClassificationBandit":
        kwargs = {"path": str(npz)}
    return Task(f"tpo_gym/{request.param}-v0", kwargs)


@pytest.fixture
def random_actions() -> Callable[[BatchedEnv], torch.Tensor]:
    """A function that draws one valid action per sub-environment from a fixed stream."""
    rng = np.random.default_rng(0)
    return lambda env: torch.as_tensor(rng.integers(env.single_action_space.n, size=env.num_envs)).to(env.device)
