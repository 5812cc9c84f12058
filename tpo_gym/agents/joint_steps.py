"""Steps of many seeds' optimizers at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from tpo_gym.agents.optimizers import MuonAdamW, NormalizedStep, normalized_steps
from tpo_gym.agents.stack import Networks


class JointSteps:
    """One step of all seeds' optimizers, in as few operations as one optimizer takes.

    An optimizer whose step on a number depends on that number alone serves all seeds on their joint tensors, and the
    seeds' own states become parts of its state; :class:`NormalizedStep` and :class:`MuonAdamW` have ways of their own.
    All others step one after the other. So do optimizers that are watched by hooks, those that have taken different
    numbers of steps, and from then on those of which one has rested.

    Args:
        optimizers: One per seed.
        networks: What they train.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], networks: Networks) -> None:
        self._all, self._networks = optimizers, networks
        self._names = {column[0]: name for name, column in networks.columns.items()}  # of the first seed's parameters
        self._whole: torch.optim.Optimizer | None = None
        self._parts: list[list[torch.optim.Optimizer]] = []
        first = optimizers[0]
        self._lengths = type(first) is NormalizedStep
        if type(first) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop):
            self._whole = self._on_joint_tensors()
        elif isinstance(first, MuonAdamW):
            self._parts = [list(part) for part in zip(*(o._inner for o in optimizers), strict=True)]  # type: ignore
        self._joint = [_join(part) for part in self._parts]
        self._shared = False

    @property
    def follow_first(self) -> bool:
        """Whether the learning rate of the first optimizer is that of all."""
        together = self._whole is not None or self._joint or self._lengths
        return bool(together) and not any(_is_watched(optimizer) for optimizer in self._all)

    def step(self, gradients: dict[str, Tensor], live: Sequence[bool]) -> None:
        """Step the seeds that are ``live``, whose parameters have these gradients, ``(S, ...)``."""
        together = self.follow_first
        if self._whole is not None and not (together and all(live)):
            self.part()
            together = False
        if not together:
            for optimizer, goes in zip(self._all, live, strict=True):
                if goes:
                    optimizer.step()
        elif self._lengths:
            weights, groups = self._networks.weights, self._all[0].param_groups
            rates = {self._names.get(p): group["lr"] for group in groups for p in group["params"]}
            steps = [(weights[name], g, rates[name]) for name, g in gradients.items() if name in rates]
            normalized_steps(steps, None if all(live) else torch.tensor(live, device=steps[0][1].device))
        elif self._whole is not None:
            for name, weight in self._networks.weights.items():
                weight.grad = gradients.get(name)
            _follow(self._whole, self._all[0])
            self._whole.step()
            if not self._shared:
                self._share_whole()
        else:
            for joint, part in zip(self._joint, self._parts, strict=True):
                _follow(joint, part[0])
                joint.step()
            if not self._shared:
                self._share()

    def part(self) -> None:
        """Give each optimizer a state of its own, where one has served all."""
        if self._whole is None:
            return
        for optimizer in self._all:
            _follow(optimizer, self._all[0])
            for state in optimizer.state.values():
                state.update((key, value.clone()) for key, value in state.items() if isinstance(value, Tensor))
        self._whole = None

    def _on_joint_tensors(self) -> torch.optim.Optimizer | None:
        """An optimizer of the joint tensors that goes on from the seeds' states; ``None`` where these differ."""
        joint = copy(self._all[0])
        joint.state = defaultdict(dict)
        joint.param_groups = []
        for groups in zip(*(optimizer.param_groups for optimizer in self._all), strict=True):
            if not all(p in self._names for p in groups[0]["params"]):
                return None
            weights = [self._networks.weights[self._names[p]] for p in groups[0]["params"]]
            joint.param_groups.append({**groups[0], "params": weights})
            for weight, *column in zip(weights, *(group["params"] for group in groups), strict=True):
                states = [optimizer.state.get(p, {}) for optimizer, p in zip(self._all, column, strict=True)]
                if any(s.keys() != states[0].keys() or s.get("step") != states[0].get("step") for s in states):
                    return None
                if states[0]:
                    joint.state[weight] = {key: _joined([state[key] for state in states], key) for key in states[0]}
        return joint

    def _share_whole(self) -> None:
        assert self._whole is not None
        self._shared = True
        for name, weight in self._networks.weights.items():
            state = self._whole.state.get(weight)
            if state:
                for i, (optimizer, p) in enumerate(zip(self._all, self._networks.columns[name], strict=True)):
                    optimizer.state[p] = {
                        key: value[i] if isinstance(value, Tensor) and key != "step" else value
                        for key, value in state.items()
                    }
            elif weight.requires_grad:
                self._shared = False

    def _share(self) -> None:
        """Let the optimizers have the state that was made in the first step with each seed's gradients."""
        self._shared = True
        for joint, part in zip(self._joint, self._parts, strict=True):
            for optimizer in part:
                for p in (p for group in optimizer.param_groups for p in group["params"]):
                    if p in joint.state:
                        optimizer.state[p] = joint.state[p]
                    elif p.requires_grad:
                        self._shared = False


def _follow(joint: torch.optim.Optimizer, first: torch.optim.Optimizer) -> None:
    for group, own in zip(joint.param_groups, first.param_groups, strict=True):
        group["lr"] = own["lr"]


def _joined(values: list[Any], key: str) -> Any:
    if not isinstance(values[0], Tensor):
        return values[0]
    return values[0].clone() if key == "step" else torch.stack(values)


def _join(optimizers: list[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    joint = copy(optimizers[0])
    joint.state = defaultdict(dict)
    for optimizer in optimizers:
        joint.state.update(optimizer.state)
    joint.param_groups = [
        {**groups[0], "params": [p for group in groups for p in group["params"]]}
        for groups in zip(*(optimizer.param_groups for optimizer in optimizers), strict=True)
    ]
    return joint


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
