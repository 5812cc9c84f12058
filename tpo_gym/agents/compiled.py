"""The loss of a batch through ``torch.compile``: on a GPU its passes become CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Loss = Callable[..., tuple[Tensor, Tensor]]


class CompiledLoss:
    """Calls a compiled loss, and goes on without compilation, with a warning, where that fails.

    Args:
        loss: :func:`tpo_gym.agents.updates.batch_loss`.
        options: Arguments of ``torch.compile``.
    """

    def __init__(self, loss: Loss, options: dict[str, Any]) -> None:
        self._plain = loss
        self._compiled: Loss | None = torch.compile(loss, **options)

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor]:
        """As the plain loss."""
        if self._compiled is not None:
            try:
                torch.compiler.cudagraph_mark_step_begin()
                loss, entropy = self._compiled(*args)
            except Exception as error:
                warn_of_failure(error)
                self._compiled = None
            else:
                # The next replay writes where this one's results lie.
                return loss.clone(), entropy.clone()
        return self._plain(*args)


def warn_of_failure(error: Exception) -> None:
    """Tell that training goes on without compilation."""
    reason = (str(error).splitlines() or [""])[0][:200]
    warnings.warn(
        f"torch.compile failed ({type(error).__name__}: {reason}); training goes on without it, with the same result.",
        UserWarning,
        stacklevel=3,
    )
