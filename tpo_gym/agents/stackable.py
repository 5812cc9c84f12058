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


def repeats(model: GroupAlgorithm, stacked: bool = False) -> bool:
    """Whether every update surely consists of the same tensor operations, so that they can be recorded and replayed.

    That is known of this package's one-step tasks, policies and algorithms where nobody listens inside, and of its
    token tasks with a transformer where no shape depends on data.

    Args:
        model: The model.
        stacked: Whether its seeds are stacked, whose shapes never do.
    """
    policy = model.policy
    parts = (model, policy, native_env(model.env))
    fixed = isinstance(policy, TransformerPolicy) and (stacked or policy.fixed_shapes or policy.device.type != "cpu")
    return (
        (model.candidate_set in EXHAUSTIVE_SETS or fixed)
        and model.is_constant
        and not model.may_skip
        and has_one_mode(policy)
        and all(type(part).__module__.partition(".")[0] == "tpo_gym" for part in parts)
        and refusal(model) is None
        and not any(_has_hooks(module) for module in policy.modules())
    )


def _has_hooks(module: nn.Module) -> bool:
    on_module = (
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module._backward_hooks, module._backward_pre_hooks),
    )
    parameters = module.parameters(recurse=False)
    return any(on_module) or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
