"""The pass over all actions that sampled a rollout batch, kept to be differentiated in the first epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tpo_gym.agents.distributed import OneProcess
from tpo_gym.agents.env_setup import EXHAUSTIVE_SETS, native_env
from tpo_gym.agents.stackable import has_one_mode, refusal, repeats

if TYPE_CHECKING:
    from tpo_gym.agents.group_algorithm import GroupAlgorithm


class Known:
    """A policy whose log-probabilities of all actions are known already."""

    def __init__(self, log_probs: Tensor) -> None:
        self._log_probs = log_probs

    def all_log_probs(self, obs: Tensor) -> Tensor:
        """See :meth:`ActorPolicy.all_log_probs`."""
        return self._log_probs


class SamplingPass:
    """A policy, for a collector of all actions, that remembers what it computed.

    Args:
        policy: The policy.
    """

    known: Known | None = None
    """The last pass, with its graph."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.action_start = policy.action_start

    def all_log_probs(self, obs: Tensor) -> Tensor:
        """See :meth:`ActorPolicy.all_log_probs`."""
        with torch.enable_grad():
            log_probs = self._policy.all_log_probs(obs)
        self.known = Known(log_probs)
        return log_probs.detach()


def is_kept(model: GroupAlgorithm, watched: bool) -> bool:
    """Whether nothing can come between the sampling pass and the first epoch that would make it another one.

    A callback may change the policy, a foreign module what it computes in training, a foreign environment anything.
    What is left draws from torch's generators alone.

    Args:
        model: Who learns.
        watched: Whether there is a callback.
    """
    return (
        not watched
        and model.candidate_set in EXHAUSTIVE_SETS
        and not model._merges
        and (model._compiled_loss is None or repeats(model))
        and type(model._processes) is OneProcess
        and has_one_mode(model.policy)
        and refusal(model) is None
        and type(native_env(model.env)).__module__.partition(".")[0] == "tpo_gym"
    )
