"""What can be stacked, see :mod:`tpo_gym.agents.stacked`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from tpo_gym.agents.env_setup import EXHAUSTIVE_SETS, native_env
from tpo_gym.agents.policies import TransformerPolicy

if TYPE_CHECKING:
    from tpo_gym.agents.group_algorithm import GroupAlgorithm

OWN_METHODS = ("learn", "train", "collect_rollouts", "_collect")
"""What an algorithm may not replace to be stacked, since all seeds go through it together."""


def refusal(model: GroupAlgorithm) -> str | None:
    """Why seeds of this model cannot be stacked; ``None`` where they can."""
    from tpo_gym.agents.group_algorithm import GroupAlgorithm

    native, policy = native_env(model.env), model.policy
    fused = isinstance(policy, TransformerPolicy) and hasattr(native, "score_sequences")
    replaced = [name for name in OWN_METHODS if getattr(type(model), name) is not getattr(GroupAlgorithm, name)]
    if replaced:
        return f"{type(model).__name__} has its own {replaced[0]}"
    if native is None:
        return f"{model.env} is not a plain environment of this package"
    if model.candidate_set not in EXHAUSTIVE_SETS and not fused:
        return (
            f"groups are formed of {model.candidate_set!r} with a {type(policy).__name__}, which acts step by step "
            "(stacked are candidates 'all_actions' and 'exact', and token tasks with a TransformerPolicy)"
        )
    if model.batch_size is not None:
        return f"batch_size={model.batch_size} would split a batch"
    for module in policy.modules():
        if isinstance(module, (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)):
            return f"the policy has a {type(module).__name__}, which draws or keeps something in training"
    return None


def has_one_mode(policy: nn.Module) -> bool:
    """Whether a policy surely computes the same in training and in evaluation.

    Of the modules of these three packages those that do not are refused.
    """
    packages = {type(module).__module__.partition(".")[0] for module in policy.modules()}
    return packages <= {"torch", "stable_baselines3", "tpo_gym"}
