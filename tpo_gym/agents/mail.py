"""Numbers on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Read = Callable[[list[float]], None]


class Mail:
    """Carries what an update has to tell in one transfer, since each one makes the host wait for the device.

    What lies on the host already is read at once.
    """

    def __init__(self) -> None:
        self._letters: list[tuple[Tensor, Read]] = []

    @staticmethod
    def is_here(values: Tensor) -> bool:
        """Whether reading costs nothing."""
        return values.is_cpu

    def post(self, values: Tensor, read: Read) -> None:
        """Have ``read`` called with the numbers of ``values``, in the order of posting."""
        if self.is_here(values):
            read(values.flatten().tolist())
        else:
            self._letters.append((values.flatten().float(), read))

    def deliver(self) -> None:
        """Fetch and read all that waits."""
        if not self._letters:
            return
        letters, self._letters = self._letters, []
        numbers = torch.cat([values for values, _ in letters]).tolist()
        for values, read in letters:
            read(numbers[: len(values)])
            numbers = numbers[len(values) :]
