"""From settings to a model on its environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from stable_baselines3.common.utils import LinearSchedule
from torch import nn

from tpo_gym import agents
from tpo_gym.agents import ActorPolicy, GroupAlgorithm, NormalizedStep
from tpo_gym.agents.transformer import lecun_normal_
from tpo_gym.experiments.settings import Settings

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {"NormalizedStep": NormalizedStep}


class LecunMlpPolicy(ActorPolicy):
    """The reference's network for MNIST: 784-50-50-10 with ReLU, weights of variance 1/fan_in, zero biases, Adam."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name, value in (("net_arch", [50, 50]), ("activation_fn", nn.ReLU), ("ortho_init", False)):
            kwargs.setdefault(name, value)
        kwargs["optimizer_kwargs"] = {"eps": 1e-8, **(kwargs.get("optimizer_kwargs") or {})}
        super().__init__(*args, **kwargs)

    def _build(self) -> None:
        super()._build()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                lecun_normal_(module.weight, module.in_features)
                nn.init.zeros_(module.bias)


POLICIES: dict[str, type[ActorPolicy]] = {"LecunMlpPolicy": LecunMlpPolicy}


def pick_device(device: str) -> str:
    """The device to use; ``"auto"``: a GPU where there is one."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def make_env(settings: Settings, device: str = "cpu") -> Any:
    """The environment of a rollout batch."""
    n_envs = settings.batch * (settings.group_size if settings.candidates == "episodes" else 1)
    return gym.make_vec(f"tpo_gym/{settings.task}-v0", num_envs=n_envs, device=device, **settings.env)


def algorithm_class(settings: Settings) -> type[GroupAlgorithm]:
    """The algorithm's class."""
    found: type[GroupAlgorithm] = getattr(agents, settings.algorithm)
    return found


def algorithm_arguments(settings: Settings, device: str = "cpu") -> dict[str, Any]:
    """The algorithm's arguments but for environment and seed."""
    policy_arguments = dict(settings.policy_arguments)
    if "optimizer_class" in policy_arguments:
        policy_arguments["optimizer_class"] = OPTIMIZERS[policy_arguments["optimizer_class"]]
    rate, grouped = settings.learning_rate, settings.candidates in ("episodes", "actions")
    return {
        "policy": POLICIES.get(settings.policy, settings.policy),
        "learning_rate": LinearSchedule(rate, 0.0, 1.0) if settings.decay else rate,
        "n_epochs": settings.epochs,
        "candidates": settings.candidates,
        "policy_kwargs": policy_arguments,
        "device": device,
        **({"group_size": settings.group_size} if grouped else {}),
        **settings.arguments,
    }


def make_model(settings: Settings, seed: int, device: str = "cpu") -> GroupAlgorithm:
    """The algorithm on its environment."""
    arguments = algorithm_arguments(settings, device)
    return algorithm_class(settings)(arguments.pop("policy"), make_env(settings, device), seed=seed, **arguments)


def interactions(settings: Settings, model: GroupAlgorithm) -> int:
    """Interactions of the whole run, for ``learn``."""
    assert model.env is not None
    horizon = settings.env.get("sequence_length", 1)
    return settings.updates * model.env.num_envs * horizon
