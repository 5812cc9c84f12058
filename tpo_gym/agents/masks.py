"""Action masks in sb3-contrib's convention: ``True`` allows an action.

One row of a mask holds, side by side: for Discrete one entry per action; for MultiDiscrete the entries of each
dimension; for MultiBinary two entries per bit, for 0 and for 1.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

# As sb3-contrib: finite, so that differences of log-probabilities and gradients stay finite; exp of it is exactly 0.
MASKED_LOGIT = -1e8


def choices(space: spaces.Space) -> list[int]:
    """Number of values of each independent part of an action: the lengths of a mask's blocks.

    Args:
        space: The action space.

    Returns:
        One length per part.

    Raises:
        ValueError: If actions of this space cannot be masked.
    """
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.flatten()]
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    raise ValueError(
        f"Actions of {space} cannot be masked: masks need Discrete, MultiDiscrete or MultiBinary actions. Remove "
        "action_masks() from the environment, or change its action space."
    )


def check_masks(masks: Any, space: spaces.Space, n_rows: int, names: Sequence[int] | None = None) -> np.ndarray:
    """Bring masks into the form ``(n_rows, entries)``.

    Args:
        masks: Boolean masks of ``n_rows`` observations, of any shape with as many entries.
        space: The action space.
        n_rows: Number of observations.
        names: The sub-environments that the rows belong to, for the message; by default they are counted.

    Returns:
        Bool ``(n_rows, entries)``.

    Raises:
        ValueError: If a mask has another size, or leaves no action; the sub-environment (the row) is named.
    """
    blocks = choices(space)
    if isinstance(masks, Tensor):
        masks = masks.cpu().numpy()
    array = np.asarray(masks, dtype=bool)
    if array.size != n_rows * sum(blocks):
        raise ValueError(
            f"Action masks have shape {array.shape}, but {n_rows} observation(s) with actions {space} need "
            f"({n_rows}, {sum(blocks)}): one entry per action (MultiDiscrete: of all dimensions side by side; "
            "MultiBinary: two per bit, for 0 and for 1)."
        )
    array = array.reshape(n_rows, -1)
    for part, block in enumerate(np.split(array, np.cumsum(blocks)[:-1], axis=1)):
        dead = np.flatnonzero(~block.any(axis=1))
        if len(dead):
            name = dead[0] if names is None else names[dead[0]]
            where = f" in part {part} of the action" if len(blocks) > 1 else ""
            raise ValueError(
                f"Sub-environment {name} allows no action{where}: its action_masks() is False everywhere. Allow at "
                "least one action in every state, or end the episode there."
            )
    return array


def apply_masks(logits: Tensor, masks: Tensor, space: spaces.Space) -> Tensor:
    """The action head's output with forbidden actions at probability 0.

    Args:
        logits: ``(N, ...)`` float32: categorical logits, or one logit per bit for MultiBinary.
        masks: Bool ``(N, entries)``.
        space: The action space.

    Returns:
        Logits of the same shape.
    """
    if isinstance(space, spaces.MultiBinary):
        allowed = masks.view(logits.shape[0], -1, 2)
        logits = logits.masked_fill(~allowed[..., 1], MASKED_LOGIT)
        return logits.masked_fill(~allowed[..., 0], -MASKED_LOGIT)
    return logits.masked_fill(~masks, MASKED_LOGIT)


def sample_allowed(mask: np.ndarray | None, space: spaces.Space, rng: np.random.Generator) -> Any:
    """A random action of the space that one mask ``(entries,)`` allows (``None``: any action)."""
    if mask is None:
        space = copy.deepcopy(space)  # whoever samples from the original keeps its stream
        space.seed(int(rng.integers(2**31 - 1)))
        return space.sample()
    blocks = np.split(mask, np.cumsum(choices(space))[:-1])
    values = np.array([rng.choice(np.flatnonzero(block)) for block in blocks])
    if isinstance(space, spaces.Discrete):
        return space.start + values[0]
    if isinstance(space, spaces.MultiDiscrete):
        return (values.reshape(space.shape) + space.start).astype(space.dtype)
    return values.reshape(space.shape).astype(space.dtype)
