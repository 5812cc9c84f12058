"""What is measured of stacked seeds, of all at once: as :mod:`tpo_gym.experiments.record`, in as many operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from tpo_gym.agents.categorical import softmax
from tpo_gym.agents.env_setup import native_env
from tpo_gym.agents.group_algorithm import GroupAlgorithm
from tpo_gym.agents.stack_observer import StackObserver
from tpo_gym.agents.stacked import Stack
from tpo_gym.experiments.events import events_logger
from tpo_gym.experiments.record import (
    RECORDERS,
    Classification,
    Progress,
    log_hparams,
    right_actions,
    table_error,
    table_misalignment,
)
from tpo_gym.experiments.settings import Settings


class Together(StackObserver, ABC):
    """Counts updates and keeps measurements, as :class:`~tpo_gym.experiments.record.Recorder`, of all seeds.

    Args:
        settings: Settings of the runs.
        folders: Where each seed's TensorBoard events go.
        progress: One per seed, told after every update.
    """

    def __init__(self, settings: Settings, folders: Sequence[Path], progress: Sequence[Progress]) -> None:
        self.settings = settings
        self.updates = 0
        """Updates so far."""
        self._folders = folders
        self._progress = progress

    def on_training_start(self, models: Sequence[GroupAlgorithm]) -> None:
        for model, folder in zip(models, self._folders, strict=True):
            model.set_logger(events_logger(folder))
            log_hparams(self.settings, model)

    def on_rollout_end(self, stack: Stack) -> None:
        self.updates += 1

    def goes_on(self) -> bool:
        answers = [tell(self.updates, error) for tell, error in zip(self._progress, self.errors(), strict=True)]
        return all(answers)

    @abstractmethod
    def errors(self) -> Sequence[Tensor | None]:
        """The latest error of every seed."""

    @abstractmethod
    def curves(self, i: int) -> dict[str, np.ndarray]:
        """The measurements of one seed: see :meth:`Recorder.curves`."""


class StackedTable(Together):
    """As :class:`~tpo_gym.experiments.record.Table`, of the tables of all seeds at once."""

    def __init__(self, settings: Settings, folders: Sequence[Path], progress: Sequence[Progress]) -> None:
        super().__init__(settings, folders, progress)
        self._first_step = False
        self._x: list[int] = []
        self._values: dict[str, list[Tensor]] = {}

    def on_training_start(self, models: Sequence[GroupAlgorithm]) -> None:
        super().on_training_start(models)
        tables: list[Tensor] = [model.policy.action_net.weight for model in models]  # type: ignore[misc]
        rights = [right_actions(native_env(model.env), table) for model, table in zip(models, tables, strict=True)]
        self._right = torch.stack(rights)
        self._policy = softmax(torch.stack(tables).detach().double())

    def on_rollout_end(self, stack: Stack) -> None:
        super().on_rollout_end(stack)
        self._first_step = True

    def before_step(self, stack: Stack, gradients: dict[str, Tensor]) -> None:
        if not self._first_step:
            return
        self._first_step = False
        (gradient,) = gradients.values()
        self._x.append(self.updates)
        self._note("error", table_error(self._policy, self._right))
        self._note("misalignment", table_misalignment(gradient, self._policy, self._right))

    def after_step(self, stack: Stack) -> None:
        (table,) = stack.networks.weights.values()
        self._policy = softmax(table.detach().double())
        self._note("error_after", table_error(self._policy, self._right))

    def _note(self, name: str, values: Tensor) -> None:
        self._values.setdefault(name, []).append(values)

    def errors(self) -> Sequence[Tensor | None]:
        return list(self._values["error"][-1]) if self._values else [None] * len(self._progress)

    def curves(self, i: int) -> dict[str, np.ndarray]:
        values = {name: torch.stack(steps)[:, i].float().cpu().numpy() for name, steps in self._values.items()}
        return {"x": np.array(self._x), **values}


class StackedClassification(Together):
    """As :class:`~tpo_gym.experiments.record.Classification`, of which every seed has one, that rests in between."""

    def __init__(self, settings: Settings, folders: Sequence[Path], progress: Sequence[Progress]) -> None:
        super().__init__(settings, folders, progress)
        kind = RECORDERS[settings.record]
        self._recorders = [cast(Classification, kind(settings, told)) for told in progress]

    def on_training_start(self, models: Sequence[GroupAlgorithm]) -> None:
        super().on_training_start(models)
        for recorder, model in zip(self._recorders, models, strict=True):
            recorder.init_callback(model)

    def on_rollout_end(self, stack: Stack) -> None:
        if self.updates and self.updates % self.settings.evaluate_every == 0:  # the last update's policy is still there
            examples = self._recorders[0].examples()
            for recorder in self._recorders:
                recorder.evaluate(examples)
        super().on_rollout_end(stack)
        for recorder in self._recorders:
            recorder.updates = self.updates

    def on_training_end(self) -> None:
        examples = cache(self._recorders[0].examples)
        for recorder in self._recorders:
            recorder.finish(examples)

    def errors(self) -> Sequence[Tensor | None]:
        return [recorder.latest_error for recorder in self._recorders]

    def curves(self, i: int) -> dict[str, np.ndarray]:
        return self._recorders[i].curves()


AT_ONCE: dict[str, type[Together]] = {
    "table": StackedTable,
    "classification": StackedClassification,
    "surplus": StackedClassification,
}
"""Kinds of record that are measured of all stacked seeds at once; others take a callback for each seed."""
