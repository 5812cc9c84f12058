"""TensorBoard events of many short runs: a hundred bandits log ten thousand entries within seconds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.logger import Logger, TensorBoardOutputFormat
from tensorboard.compat.proto.summary_pb2 import Summary

FLUSH_SECONDS = 5.0
"""How old an entry may become before TensorBoard can see it."""


class OneEvent(TensorBoardOutputFormat):
    """SB3's TensorBoard output with all numbers of an entry in one event, and not flushed after each.

    Args:
        folder: Where the event file goes.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._flushed = time.monotonic()

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        """Write what is not excluded; see SB3."""
        shown = {key: value for key, value in key_values.items() if "tensorboard" not in (key_excluded[key] or ())}
        numbers = {key: value for key, value in shown.items() if isinstance(value, (int, float, np.number))}
        if len(numbers) < len(shown):
            rest = {key: value for key, value in shown.items() if key not in numbers}
            super().write(rest, dict.fromkeys(rest, ()), step)
        if numbers and self.writer.file_writer is not None:
            values = [Summary.Value(tag=key, simple_value=float(value)) for key, value in sorted(numbers.items())]
            self.writer.file_writer.add_summary(Summary(value=values), step)
        if time.monotonic() > self._flushed + FLUSH_SECONDS:
            self.writer.flush()
            self._flushed = time.monotonic()


def events_logger(folder: Path) -> Logger:
    """A logger that writes TensorBoard events alone."""
    folder.mkdir(parents=True, exist_ok=True)
    return Logger(str(folder), [OneEvent(str(folder))])
