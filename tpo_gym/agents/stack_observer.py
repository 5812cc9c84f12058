"""Who watches stacked seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from tpo_gym.agents.group_algorithm import GroupAlgorithm
    from tpo_gym.agents.stacked import Stack


class StackObserver:
    """Watches stacked seeds as callbacks watch one, but once for all of them: that takes as long as for one."""

    def on_training_start(self, models: Sequence[GroupAlgorithm]) -> None:
        """The models are set up for training; their loggers may be replaced now."""

    def on_rollout_end(self, stack: Stack) -> None:
        """A rollout batch of every seed is there.

        The policies must stay as they are: the pass that sampled may be the one that is differentiated.
        """

    def before_step(self, stack: Stack, gradients: dict[str, Tensor]) -> None:
        """Every parameter's gradient, ``(S, ...)``; the step is not taken yet. Once per epoch."""

    def after_step(self, stack: Stack) -> None:
        """The step is taken: ``stack.networks.weights`` holds every parameter, ``(S, ...)``."""

    def on_training_end(self) -> None:
        """Training is over, and every model is as after a single run. Not called where an error or the user ends it."""

    def goes_on(self) -> bool:
        """Asked after every vector step: ``False`` ends the training of all seeds."""
        return True
