"""An optimizer's step, captured as what comes before it is: see :meth:`GroupAlgorithm.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpo_gym.agents.captured import Captured
from tpo_gym.agents.optimizers import can_be_recorded, take_step


class CapturedStep:
    """Steps of an optimizer, recorded at the second one where it is a :class:`MuonAdamW` that nobody watches.

    (Adam's is one kernel already. The first step makes the states, or arranges those that were loaded.) A recording
    steps the tensors that there were when it was made, so it is made again where a training begins with others.

    Args:
        optimizer: Who steps.
        options: Arguments of ``torch.compile``.
        keep: As :class:`Captured` takes it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, options: dict[str, Any], keep: Callable[[], Callable[[], None]]
    ) -> None:
        self._optimizer, self._options, self._keep = optimizer, options, keep
        self._params: list[Tensor] = []  # those that step
        self._captured: Captured | None = None
        self._fixed: list[Any] = []

    def begin(self) -> None:
        """A training begins."""
        if self._captured is not None and not _same(self._fixed, self._now()):
            self._captured = None

    def __call__(self) -> None:
        """One step with the parameters' gradients."""
        if self._captured is not None:
            self._captured([p.grad for p in self._params])
            return
        take_step(self._optimizer)
        if can_be_recorded(self._optimizer):
            groups = self._optimizer.param_groups
            self._params = [p for group in groups for p in group["params"] if p.grad is not None]
            self._fixed = self._now()
            self._captured = Captured(self._step, self._options, self._keep)

    def _step(self, gradients: list[Tensor]) -> list[Tensor]:
        for p, gradient in zip(self._params, gradients, strict=True):
            p.grad = gradient
        self._optimizer.step()
        return []

    def _now(self) -> list[Any]:
        """What a recording depends on: settings but for the learning rate, and the tensors that are stepped."""
        settings = [
            {key: value for key, value in group.items() if key not in ("lr", "params")}
            for group in self._optimizer.param_groups
        ]
        states = {p: state for inner in getattr(self._optimizer, "_inner", []) for p, state in inner.state.items()}
        tensors = [value for p in self._params for value in states.get(p, {}).values() if isinstance(value, Tensor)]
        return [can_be_recorded(self._optimizer), settings, *self._params, *tensors]


def _same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(
        a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b for a, b in zip(before, now, strict=True)
    )
