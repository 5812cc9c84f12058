"""Target Policy Optimization: environments on any device, and algorithms in the style of Stable-Baselines3.

Importing the package registers the environments ``tpo_gym/...``; torch is loaded when something needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tpo_gym.envs.registration import register_envs

if TYPE_CHECKING:
    from tpo_gym.agents import (
        AWR,
        DG,
        GRPO,
        GSPO,
        REBEL,
        REINFORCE,
        RLOO,
        TPO,
        ClippedPG,
        CrossEntropy,
        DrGRPO,
        GroupPG,
        MuonAdamW,
        ResumeCallback,
        TransformerExtractor,
        train_seeds,
    )
    from tpo_gym.envs.sb3 import make_vec_env

__version__ = "0.1.0"
__all__ = [
    "AWR",
    "DG",
    "GRPO",
    "GSPO",
    "REBEL",
    "REINFORCE",
    "RLOO",
    "TPO",
    "ClippedPG",
    "CrossEntropy",
    "DrGRPO",
    "GroupPG",
    "MuonAdamW",
    "ResumeCallback",
    "TransformerExtractor",
    "__version__",
    "make_vec_env",
    "train_seeds",
]

# Public name -> module that holds it, imported on first use.
_MODULES = {name: "tpo_gym.agents" for name in __all__ if name not in ("__version__", "make_vec_env")}
_MODULES["make_vec_env"] = "tpo_gym.envs.sb3"


def __getattr__(name: str) -> Any:
    """Imports a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *_MODULES})


register_envs()
