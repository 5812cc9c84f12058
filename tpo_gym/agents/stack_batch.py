"""What stacked seeds compute in an update: functions of tensors ``(S, ...)``, a rollout batch of every seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from tpo_gym.agents import collectors
from tpo_gym.agents.group_algorithm import GroupAlgorithm
from tpo_gym.agents.group_env import Step
from tpo_gym.agents.metrics import rollout_metrics
from tpo_gym.agents.rollouts import GroupRollout, StateCandidates, tensors_of, with_tensors
from tpo_gym.agents.sampling_pass import Known
from tpo_gym.agents.stack import JoinedEnv, Networks, SeedNoise, map_tensors
from tpo_gym.agents.updates import batch_loss

Tensors = tuple[dict[str, Tensor], dict[str, Tensor]]
"""The tensors of a rollout batch and of its candidates."""


class Gradients(NamedTuple):
    """Of one epoch."""

    losses: Tensor
    """``(S,)``."""
    norms: Tensor
    """Of the gradients before clipping, ``(S,)``."""
    entropies: Tensor
    """``(S,)``."""
    of: dict[str, Tensor]
    """Every trained parameter's gradient, clipped, ``(S, ...)``, in memory as the parameter."""


class Batch(NamedTuple):
    """All that an update computes before its first step."""

    tensors: Tensors
    frozen: dict[str, Tensor]
    weights: Tensor
    """Of the groups, ``(S, B)``."""
    gradients: Gradients


class StackBatch:
    """Collects and differentiates rollout batches of all seeds.

    Args:
        networks: The seeds' policies.
        env: Their environments.
        generators: Their random numbers.
        lead: The model whose methods and settings are those of all.
    """

    def __init__(
        self, networks: Networks, env: JoinedEnv, generators: Sequence[torch.Generator], lead: GroupAlgorithm
    ) -> None:
        self.lead = lead
        self.n_steps = 0
        """Vector steps of the last :meth:`whole` rollout batch."""
        self.noise = SeedNoise(generators)
        self._networks, self._env = networks, env
        self._n_seeds = len(generators)
        self._template: GroupRollout | None = None
        self._known: Tensor | None = None

    def collect(self, on_step: collectors.OnStep) -> Tensors | None:
        """A rollout batch of every seed; ``None`` if ``on_step`` ended the training."""
        self._networks.set_training_mode(False)
        with self.noise:
            rollout = collectors.collect(self.lead, self._env, self._networks, on_step, fused=True, merge=False)
        if rollout is None:
            return None
        self._known = self._networks.known(getattr(rollout.candidates, "observations", None))
        return self._split(rollout)

    def whole(self) -> Batch:
        """Collect a rollout batch and differentiate its loss."""
        self.n_steps = 0

        def on_step(step: Step) -> bool:
            self.n_steps += 1
            return True

        tensors = self.collect(on_step)
        assert tensors is not None
        self._networks.set_training_mode(True)
        frozen = self.freeze(tensors)
        weights = self.weigh(tensors, frozen)
        return Batch(tensors, frozen, weights, self.gradients(tensors, frozen, weights))

    def keep(self) -> Callable[[], None]:
        """Remember what collecting changes; returns what undoes it."""
        state = self._env.env.get_state()
        generators = [*self.noise.generators, *self._env.generators]
        states = [generator.get_state() for generator in generators]

        def undo() -> None:
            self._env.env.set_state(state)
            for generator, own in zip(generators, states, strict=True):
                generator.set_state(own)

        return undo

    def freeze(self, tensors: Tensors) -> dict[str, Tensor]:
        """See :meth:`GroupAlgorithm.freeze`."""
        return vmap(lambda *own: self.lead.freeze(self._rebuild(own)))(*tensors)

    def weigh(self, tensors: Tensors, frozen: dict[str, Tensor]) -> Tensor:
        """See :meth:`GroupAlgorithm.group_weights`."""
        return vmap(lambda *own: self.lead.group_weights(self._rebuild(own[:2]), own[2]))(*tensors, frozen)

    def gradients(self, tensors: Tensors, frozen: dict[str, Tensor], weights: Tensor) -> Gradients:
        """Differentiate the loss of every seed's batch."""

        def loss_of(policy: Any, own: Any, candidates: Any, frozen: Any, weights: Tensor) -> tuple[Tensor, Tensor]:
            return batch_loss(self.lead, policy, self._rebuild((own, candidates)), frozen, weights)

        known, self._known = self._known, None
        if known is None:
            losses, entropies = self._networks.each(loss_of, *tensors, frozen, weights)
        else:  # the pass that sampled serves the first epoch too
            losses, entropies = vmap(lambda p, *own: loss_of(Known(p), *own))(known, *tensors, frozen, weights)
        trained = {name: value for name, value in self._networks.weights.items() if value.requires_grad}
        found = torch.autograd.grad(losses.sum(), list(trained.values()), allow_unused=True)
        # Fused optimizers walk through memory, whatever the strides are, so gradients must lie as their parameters do.
        gradients = {name: value.contiguous() for name, value in zip(trained, found, strict=True) if value is not None}
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in gradients.values()]).norm(dim=0)
        if self.lead.max_grad_norm is not None:
            scale = (self.lead.max_grad_norm / (norms + 1e-6)).clamp(max=1)  # as torch.nn.utils.clip_grads_with_norm_
            for value in gradients.values():
                value.mul_(scale.view(-1, *[1] * (value.ndim - 1)))
        return Gradients(losses.detach(), norms, entropies.detach(), gradients)

    def metrics(self, tensors: Tensors, frozen: dict[str, Tensor], max_return: float) -> tuple[list[str], Tensor]:
        """Names of what is logged of a rollout batch and of the policies that were fitted, and values ``(S, ...)``."""
        names: list[str] = []

        def of(policy: Any, own: Any, candidates: Any, frozen: Any) -> Tensor:
            rollout = self._rebuild((own, candidates))
            log_probs = rollout.candidates.evaluate(policy).log_probs
            values = {**rollout_metrics(rollout, max_return), **self.lead.diagnostics(log_probs, frozen)}
            names[:] = values
            return torch.stack(list(values.values()))

        return names, self._networks.each(of, *tensors, frozen)

    def rollout(self, tensors: Tensors, i: int) -> GroupRollout:
        """One seed's part."""
        return self._rebuild(map_tensors(itemgetter(i), tensors))

    def _rebuild(self, tensors: Any) -> GroupRollout:
        assert self._template is not None
        return with_tensors(self._template, *tensors)

    def _split(self, rollout: GroupRollout) -> Tensors:
        """The tensors of each seed's part; what the seeds have in common becomes the template."""
        n, candidates = self._n_seeds, rollout.candidates
        tensors: Tensors = map_tensors(lambda value: value.unflatten(0, (n, -1)), tensors_of(rollout))
        if isinstance(candidates, StateCandidates):
            rollout = replace(rollout, candidates=replace(candidates, n_units=candidates.n_units // n))
        self._template = rollout
        if not (self.lead._merges and self.lead.candidate_set == "all_actions"):
            return tensors
        merged: list[GroupRollout] = []

        def merge(*tensors: Any) -> Tensors:
            merged.append(collectors.merge_contexts(self._rebuild(tensors), lambda values: values.mean(0)))
            return tensors_of(merged[0])

        tensors = vmap(merge)(*tensors)
        self._template = merged[0]
        return tensors
