"""The table of environments and their registration with Gymnasium."""

from __future__ import annotations

import gymnasium as gym

# Name of the environment, and of its single class -> module. The batched class has the prefix "Batched".
ENVIRONMENTS = {
    "Bandit": "bandits",
    "ContextualBandit": "bandits",
    "MNISTBandit": "classification",
    "ClassificationBandit": "classification",
    "TokenCopy": "tokens",
    "TokenFlip": "tokens",
    "TokenReversal": "tokens",
    "TokenReverseFlip": "tokens",
    "TokenReversalSparse": "tokens",
}

# Environments of questions and answers in text: they have a single face only. -> module
TEXT_ENVIRONMENTS = {"ReasoningGym": "text", "GSM8K": "text"}


def register_envs() -> None:
    """Registers every environment as ``tpo_gym/<name>-v0``; a second call changes nothing.

    Entry points are strings: nothing is imported before an environment is made, and a spec can be written as JSON.
    """
    for name, module in ENVIRONMENTS.items():
        env_id = f"tpo_gym/{name}-v0"
        if env_id not in gym.registry:
            gym.register(
                id=env_id,
                entry_point=f"tpo_gym.envs.{module}:{name}",
                vector_entry_point=f"tpo_gym.envs.{module}:Batched{name}",
            )
    for name, module in TEXT_ENVIRONMENTS.items():
        env_id = f"tpo_gym/{name}-v0"
        if env_id not in gym.registry:
            gym.register(id=env_id, entry_point=f"tpo_gym.envs.{module}:{name}")
