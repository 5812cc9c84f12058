"""What callbacks see of a step, as SB3's algorithms show it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tpo_gym.agents.rollouts import Observations


class EpisodeInfos(Sequence[dict[str, Any]]):
    """The infos of one step of a batched environment, made only when somebody reads them.

    As SB3's ``Monitor`` writes them: ``episode`` = {"r": return, "l": length, "t": seconds} where an episode ends, and
    ``is_success``.

    Args:
        rewards: Rewards of the episodes' steps up to this one, each ``(n_envs,)``.
        done: Whether the episodes, which have one length, end here.
        max_return: Return of a successful episode.
        start_time: When training began, in seconds.
    """

    def __init__(self, rewards: Sequence[Tensor], done: bool, max_return: float, start_time: float) -> None:
        self._rewards = rewards
        self._done = done
        self._max_return = max_return
        self._start_time = start_time

    def __len__(self) -> int:
        return len(self._rewards[0])

    def __getitem__(self, index: Any) -> Any:
        return self._infos[index]

    @cached_property
    def _infos(self) -> list[dict[str, Any]]:
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(len(self))]
        if self._done:
            seconds = round(time.time() - self._start_time, 6)
            returns = torch.stack(list(self._rewards)).sum(0).tolist()
            for info, value in zip(infos, returns, strict=True):
                info["episode"] = {"r": value, "l": len(self._rewards), "t": seconds}
                info["is_success"] = value >= self._max_return
        return infos


def as_numpy(values: Observations) -> np.ndarray | Tensor | dict[str, Any]:
    """Arrays that share memory with tensors on the CPU; other tensors as they are, since fetching them takes time."""
    if isinstance(values, dict):
        return {key: as_numpy(value) for key, value in values.items()}
    return values.numpy() if values.is_cpu else values
