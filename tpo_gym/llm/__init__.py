"""Target Policy Optimization for language models, on the engines that train them.

Nothing here is imported by the rest of the package, and importing this package loads no engine: names are resolved on
first use. Needs the extra ``llm``: ``pip install "tpo-gym[llm]"``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpo_gym.llm.trl import TargetPOConfig, TargetPOTrainer
    from tpo_gym.llm.weights import WeightOptions, candidate_weights

__all__ = ["TargetPOConfig", "TargetPOTrainer", "WeightOptions", "candidate_weights"]

# Public name -> module that holds it, imported on first use.
_MODULES = {
    "TargetPOConfig": "tpo_gym.llm.trl",
    "TargetPOTrainer": "tpo_gym.llm.trl",
    "WeightOptions": "tpo_gym.llm.weights",
    "candidate_weights": "tpo_gym.llm.weights",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """Lists the public names, loaded or not."""
    return sorted({*globals(), *_MODULES})
