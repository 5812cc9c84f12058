"""The environments: each task is a batched torch environment, with adapters to Gymnasium's and SB3's interfaces."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpo_gym.envs.batched import BatchedEnv
    from tpo_gym.envs.registration import ENVIRONMENTS, register_envs
    from tpo_gym.envs.sb3 import SB3VecEnv, make_vec_env
    from tpo_gym.envs.single import SingleEnv

__all__ = ["ENVIRONMENTS", "BatchedEnv", "SB3VecEnv", "SingleEnv", "make_vec_env", "register_envs"]

# Loaded on first use, so that importing the package costs no torch.
_MODULES = {
    "BatchedEnv": "tpo_gym.envs.batched",
    "ENVIRONMENTS": "tpo_gym.envs.registration",
    "register_envs": "tpo_gym.envs.registration",
    "SB3VecEnv": "tpo_gym.envs.sb3",
    "make_vec_env": "tpo_gym.envs.sb3",
    "SingleEnv": "tpo_gym.envs.single",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *_MODULES})
