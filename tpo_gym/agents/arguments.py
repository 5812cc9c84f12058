"""Arguments that all group algorithms share, and their checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch

from tpo_gym.agents.collectors import Baseline

if TYPE_CHECKING:
    from tpo_gym.agents.group_algorithm import GroupAlgorithm


class CommonArguments(TypedDict, total=False):
    """Arguments that every algorithm passes on to its base as they are."""

    group_size: int
    n_contexts: int | None
    n_epochs: int
    batch_size: int | None
    candidates: str
    baseline: Baseline
    ent_coef: float
    max_grad_norm: float | None
    lookahead: int
    lookahead_deterministic: bool
    stats_window_size: int
    tensorboard_log: str | None
    policy_kwargs: dict[str, Any] | None
    verbose: int
    seed: int | None
    device: torch.device | str
    _init_setup_model: bool


def check_common_arguments(model: GroupAlgorithm) -> None:
    """Check the arguments of a model that is being made.

    Raises:
        ValueError: Naming the argument, its value and what to pass instead.
    """
    for name in ("group_size", "n_contexts", "n_epochs"):
        value = getattr(model, name)
        if not _is_integer(value) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}.")
    if model.group_size < model.min_group_size:
        raise ValueError(
            f"group_size={model.group_size}: {type(model).__name__} compares the candidates of a group, "
            f"so it needs at least {model.min_group_size}."
        )
    if model.batch_size is not None and (not _is_integer(model.batch_size) or model.batch_size < 1):
        raise ValueError(
            f"batch_size must be a positive integer or None (everything at once), got {model.batch_size!r}."
        )
    if model.max_grad_norm is not None and not model.max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be positive or None (no clipping), got {model.max_grad_norm!r}.")
    if not _is_integer(model.lookahead) or model.lookahead < 0:
        raise ValueError(f"lookahead must be a number of steps, 0 or more, got {model.lookahead!r}.")
    baseline = model.baseline
    if (isinstance(baseline, str) and baseline not in ("auto", "expected", "batch")) or baseline != baseline:
        raise ValueError(f'baseline must be a number, None, "expected" or "batch", got {baseline!r}.')


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
