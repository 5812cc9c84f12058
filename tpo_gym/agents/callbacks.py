"""Callbacks beside SB3's own, all of which work with these algorithms."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING

from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback, ProgressBarCallback

if TYPE_CHECKING:
    from tpo_gym.agents.checkpoint import CheckpointMixin

logger = logging.getLogger("tpo_gym")
UNITS = ("updates", "timesteps")


def listens(callback: BaseCallback) -> bool:
    """Whether a callback may read what a step did, or change the model within an update; SB3 wraps ``None``, too.

    A class of ours says that it does neither by ``passive = True``.
    """
    if isinstance(callback, CallbackList):
        return any(map(listens, callback.callbacks))
    if isinstance(callback, ConvertCallback):
        return callback.callback is not None
    return not (type(callback) is ProgressBarCallback or type(callback).__dict__.get("passive", False))


class ResumeCallback(BaseCallback):
    """Save the model again and again, so that :meth:`TPO.resume` can go on after a crash as if it had not happened.

    Files are written atomically, when training begins, between updates, and when training ends. They are named as
    SB3's ``CheckpointCallback`` names them, ``{name_prefix}_{timesteps}_steps.zip``.

    Args:
        path: Folder of the checkpoints of this training. Give every training a folder of its own.
        every: Save after this many ``unit``.
        unit: ``"updates"`` (rollout batches with their training), or ``"timesteps"`` (interactions; saved at the first
            update boundary after as many).
        keep: Newest files to keep; older ones are deleted.
        name_prefix: Start of the file names.
        allow_pickle: See :meth:`CheckpointMixin.save`.
        verbose: 2: tell of every file.

    Raises:
        ValueError: For an argument out of range, or a path that names a file.

    Example:
        >>> import tempfile, tpo_gym
        >>> from tpo_gym.agents.callbacks import ResumeCallback
        >>> folder = tempfile.mkdtemp()
        >>> model = tpo_gym.TPO("TabularPolicy", "tpo_gym/Bandit-v0", seed=0)
        >>> model = model.learn(500, callback=ResumeCallback(folder, every=5))
        >>> model = tpo_gym.TPO.resume(folder)
        >>> model.num_timesteps, model.remaining_timesteps
        (500, 0)
    """

    model: CheckpointMixin
    passive = True

    def __init__(
        self,
        path: str | Path,
        every: int = 10,
        unit: str = "updates",
        keep: int = 2,
        name_prefix: str = "checkpoint",
        allow_pickle: bool = False,
        verbose: int = 0,
    ) -> None:
        super().__init__(verbose)
        for name, value in (("every", every), ("keep", keep)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if unit not in UNITS:
            raise ValueError(f"Unknown unit {unit!r}: choose one of {', '.join(map(repr, UNITS))}.")
        self.path = Path(path)
        if self.path.suffix == ".zip" or self.path.is_file():
            raise ValueError(f"{path} names a file: give a folder, which will hold the last {keep} checkpoints.")
        self.every = every
        self.unit = unit
        self.keep = keep
        self.name_prefix = name_prefix
        self.allow_pickle = allow_pickle
        self._updates = 0
        self._saved_at: int | None = None

    def _init_callback(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in self.path.glob(f".{self.name_prefix}_*.partial"):
            leftover.unlink(missing_ok=True)  # of a process that was killed while it wrote
        self._updates, self._saved_at = 0, None

    def _on_rollout_start(self) -> None:
        # The previous update is complete, and nothing of the next one has happened.
        count = self._updates if self.unit == "updates" else self.model.num_timesteps
        if self._saved_at is None or count - self._saved_at >= self.every:
            self._saved_at = count
            self._save()
        self._updates += 1

    def _on_training_end(self) -> None:
        if not self.model._updating:  # else interrupted within an update: the last file is the one to go on from
            self._save()

    def _on_step(self) -> bool:
        return True

    def _save(self) -> None:
        if not self.model._processes.writes:
            return
        newest = self.path / f"{self.name_prefix}_{self.model.num_timesteps}_steps.zip"
        self.model.save(newest, allow_pickle=self.allow_pickle)
        if self.verbose >= 2:
            print(f"Saved {newest}")
        for old in sorted(self._checkpoints(), key=lambda file: file.stat().st_mtime_ns)[: -self.keep]:
            if old != newest:
                old.unlink(missing_ok=True)

    def _checkpoints(self) -> list[Path]:
        pattern = re.compile(rf"{re.escape(self.name_prefix)}_\d+_steps\.zip")
        return [file for file in self.path.iterdir() if pattern.fullmatch(file.name)]
