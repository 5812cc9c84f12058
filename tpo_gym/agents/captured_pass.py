"""A single run's update, captured: see :meth:`GroupAlgorithm.compile`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tpo_gym.agents import collectors
from tpo_gym.agents.captured import Captured
from tpo_gym.agents.captured_step import CapturedStep
from tpo_gym.agents.distributed import OneProcess
from tpo_gym.agents.group_env import Step
from tpo_gym.agents.optimizers import total_norm
from tpo_gym.agents.resume_state import capture, restore
from tpo_gym.agents.rollouts import GroupRollout, tensors_of, with_tensors
from tpo_gym.agents.sampling_pass import SamplingPass
from tpo_gym.agents.stackable import repeats
from tpo_gym.agents.updates import batch_loss

if TYPE_CHECKING:
    from tpo_gym.agents.group_algorithm import GroupAlgorithm


class Derived(NamedTuple):
    """The loss of a batch and its gradient."""

    loss: Tensor
    entropy: Tensor
    norm: Tensor
    """Of the gradients."""
    gradients: list[Tensor | None]
    """One per parameter of the policy."""


class Prepared(NamedTuple):
    """What is known of a rollout batch before training."""

    frozen: dict[str, Tensor]
    weights: Tensor


class CapturedPass:
    """Collects and differentiates the rollout batches of a model whose updates are all alike, without callbacks.

    Args:
        model: The model, which :func:`~tpo_gym.agents.stackable.repeats`.
        options: Arguments of ``torch.compile``.
    """

    def __init__(self, model: GroupAlgorithm, options: dict[str, Any]) -> None:
        self._model = model
        self._settings = _settings(model)
        self._parameters = list(model.policy.parameters())
        self._template: GroupRollout | None = None
        self._steps: list[Step] = []  # of a rollout batch
        self._whole = Captured(self._compute, options, self._keep)
        self._later = Captured(self._differentiate, options)
        self.step = CapturedStep(model.policy.optimizer, options, self._keep)
        self.started = False
        """Whether the environment has begun: the first update of a training may reset it."""
        self.prepared: Prepared | None = None
        """Of the last rollout batch."""
        self._first: Derived | None = None

    def begin(self) -> None:
        """Training begins: whatever happened since the last one, its first update begins anew."""
        self.started, self.prepared, self._first = False, None, None
        self.step.begin()

    def serves(self, model: GroupAlgorithm) -> bool:
        """Whether the model is as it was when this was made."""
        return self._settings == _settings(model)

    def collect(self, on_step: collectors.OnStep) -> GroupRollout | None:
        """A rollout batch, with what training needs of it in :attr:`prepared`."""
        rewards, (own, candidates), self.prepared, self._first = self._whole()
        for step, step_rewards in zip(self._steps, rewards, strict=True):
            if not on_step(step._replace(rewards=step_rewards)):
                return None
        assert self._template is not None
        return with_tensors(self._template, own, candidates)

    def backward(self, rollout: GroupRollout) -> Derived:
        """Give the parameters their gradients, with the policy as it is now: known already in the first epoch."""
        assert self.prepared is not None
        derived, self._first = self._first, None
        if derived is None:
            derived = self._later(tensors_of(rollout), self.prepared.frozen, self.prepared.weights)
        for parameter, gradient in zip(self._parameters, derived.gradients, strict=True):
            parameter.grad = gradient
        return derived

    def _compute(self) -> tuple[list[Tensor], Any, Prepared, Derived]:
        model, policy = self._model, self._model.policy
        self._steps.clear()
        rewards: list[Tensor] = []

        def on_step(step: Step) -> bool:
            self._steps.append(step)
            rewards.append(step.rewards)
            return True

        sampler = SamplingPass(policy) if model._keeps_pass else None
        env, fused = model._group_env, sampler is None  # all other tasks that can be recorded complete sequences
        collected = collectors.collect(model, env, sampler or policy, on_step, fused, model._merges)
        assert collected is not None
        self._template = collected
        frozen = model.freeze(collected)
        weights = model.group_weights(collected, frozen)
        derived = self._derive(policy if sampler is None else sampler.known, collected, frozen, weights)
        return rewards, tensors_of(collected), Prepared(frozen, weights), derived

    def _differentiate(self, tensors: Any, frozen: dict[str, Tensor], weights: Tensor) -> Derived:
        assert self._template is not None
        return self._derive(self._model.policy, with_tensors(self._template, *tensors), frozen, weights)

    def _derive(self, policy: Any, rollout: GroupRollout, frozen: dict[str, Tensor], weights: Tensor) -> Derived:
        loss, entropy = batch_loss(self._model, policy, rollout, frozen, weights)
        parameters = self._parameters
        trained = [p for p in parameters if p.requires_grad]
        found = dict(zip(map(id, trained), torch.autograd.grad(loss, trained, allow_unused=True), strict=True))
        gradients = [None if found.get(id(p)) is None else found[id(p)].contiguous() for p in parameters]
        norm = total_norm([gradient for gradient in gradients if gradient is not None])
        return Derived(loss.detach(), entropy.detach(), norm, gradients)

    def _keep(self) -> Any:
        state = capture(self._model)
        return lambda: restore(self._model, state)


def _settings(model: GroupAlgorithm) -> dict[str, Any]:
    names = inspect.signature(type(model).__init__).parameters
    parts = (model.policy, model.policy.optimizer, model.env, model._group_env)
    return {
        **{name: getattr(model, name, None) for name in names},
        "parts": tuple(map(id, parts)),
        "trained": tuple((id(p), p.requires_grad) for p in model.policy.parameters()),
    }


def captured_pass(model: GroupAlgorithm, watched: bool) -> CapturedPass | None:
    """What captures this model's updates in the training that begins; ``None`` where that is not wanted or not sure.

    Args:
        model: Who learns.
        watched: Whether a callback listens.
    """
    if model._compile_options is None or watched or type(model._processes) is not OneProcess or not repeats(model):
        return None
    kept = model._recorded
    if kept is None or not kept.serves(model):
        kept = model._recorded = CapturedPass(model, model._compile_options)
    kept.begin()
    return kept
