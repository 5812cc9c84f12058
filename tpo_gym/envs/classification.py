"""Classification from bandit feedback: see an example, name its class, hear only whether that was right."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tpo_gym.envs import rendering
from tpo_gym.envs.bandits import BatchedAnswers
from tpo_gym.envs.batched import Rows
from tpo_gym.envs.checks import as_device
from tpo_gym.envs.datasets import Dataset, load_image_dataset, load_npz_dataset, make_dataset
from tpo_gym.envs.single import SingleEnv


class BatchedExamples(BatchedAnswers):
    """Base of the classification bandits: examples drawn uniformly, with replacement, from a dataset on the device.

    Args:
        dataset: The examples. uint8 features are shown divided by 255, in [0, 1].
        shape: Shape of one observation.
        **kwargs: See ``BatchedEnv``.
    """

    def __init__(self, dataset: Dataset, shape: tuple[int, ...], **kwargs: Any) -> None:
        features = dataset.features
        self._is_image = features.dtype == torch.uint8
        low, high = (0.0, 1.0) if self._is_image else (float(features.min()), float(features.max()))
        if low == high:  # Gymnasium warns about an empty Box
            high = low + max(1.0, abs(low))
        super().__init__(spaces.Box(low, high, shape, np.float32), dataset.num_classes, dataset.labels, **kwargs)
        self.dataset = dataset
        self._shape = shape
        # Making the observations costs more than all the rest of a step, so they are made once per context.
        self._view: Tensor | None = None

    def features(self, rows: Tensor | None = None) -> Tensor:
        """Returns the observations of dataset rows, int64 (n,), as float32 (n, ...); None for the whole dataset."""
        features = self.dataset.features
        # index_select copies whole rows, an order of magnitude faster on a CPU than indexing, which copies elements.
        chosen = features.clone() if rows is None else features.index_select(0, rows)
        if self._is_image:
            chosen = chosen.float().div_(255)
        return chosen.reshape(-1, *self._shape)

    def set_state(self, state: dict[str, Any]) -> None:
        """See ``BatchedEnv.set_state``."""
        super().set_state(state)
        self._view = None

    def _begin(self, contexts: Tensor, rows: Rows) -> None:
        super()._begin(contexts, rows)
        self._view = None

    def _observe(self) -> Tensor:
        if self._view is None:
            self._view = self.features(self._context)
        return self._view.clone()

    def _last_observe(self) -> Tensor:
        view, self._view = self._view, None
        return self.features(self._context) if view is None else view

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the observations, and the labels, for which the dataset's own pickle cares."""
        return {**super().__getstate__(), "_answers": None, "_view": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the labels from the dataset."""
        super().__setstate__(state)
        self._answers = self.dataset.labels

    def _brightness(self, index: int) -> np.ndarray:
        """Returns the example as an image in [0, 1], (height, width)."""
        context = self._context[index : index + 1]
        example = self.dataset.features[context][0].float().cpu().numpy()
        low, high = (0.0, 255.0) if self._is_image else (example.min(), max(example.max(), example.min() + 1e-6))
        image = example if example.ndim > 1 else example[None]
        return (image.reshape(image.shape[0], -1) - low) / (high - low)

    def ansi(self, index: int) -> str:
        """Draws the example in characters, over the classes; the right one in brackets, a star at the chosen one."""
        _, answer, choice = self._shown(index)
        image = rendering.shade_text(self._brightness(index))
        return image + rendering.choice_text(self._num_actions, answer, choice)

    def picture(self, index: int) -> np.ndarray:
        """Draws the example over the cells of the classes; the right one framed, the chosen one filled."""
        _, answer, choice = self._shown(index)
        return rendering.image_picture(self._brightness(index), self._num_actions, answer, choice)


class BatchedClassificationBandit(BatchedExamples):
    """Any labelled data as a bandit. Observations are Box(smallest, largest feature), float32.

    Args:
        features: (N, ...) numbers. uint8 counts as images: kept as they are, shown divided by 255.
        labels: (N,) integers from 0; the largest one gives the number of actions.
        path: Instead of the arrays: a ``.npz`` file that holds ``features`` and ``labels``. It is read once per process
            and device, so prefer it where many copies are made.
        **kwargs: ``num_envs``, ``device``, ``autoreset_mode``, ``render_mode``: see ``BatchedEnv``.

    Raises:
        FileNotFoundError: There is no file at ``path``.
        TypeError: The arrays have a wrong dtype.
        ValueError: Neither or both of arrays and path are given, or they do not fit.
    """

    def __init__(
        self, features: Any = None, labels: Any = None, path: str | os.PathLike[str] | None = None, **kwargs: Any
    ) -> None:
        device = str(as_device(kwargs.get("device", "cpu")))
        if path is not None:
            if features is not None or labels is not None:
                raise ValueError(
                    "ClassificationBandit got both arrays and path; give either features and labels or path."
                )
            dataset = load_npz_dataset(os.fspath(path), device)
        elif features is None or labels is None:
            raise ValueError("ClassificationBandit needs data: features and labels (arrays), or path to a .npz file.")
        else:
            dataset = make_dataset(features, labels, device)
        super().__init__(dataset, tuple(dataset.features.shape[1:]), **kwargs)


class BatchedMNISTBandit(BatchedExamples):
    """MNIST as a bandit with 10 actions. Observations are Box [0, 1], float32.

    Args:
        split: "train" (60,000 images) or "test" (10,000).
        flatten: True gives observations (784,), False gives (1, 28, 28).
        data_dir: A directory with IDX files (``.gz`` or plain) to use instead, such as Fashion-MNIST; other image sizes
            and more classes work.
        **kwargs: ``num_envs``, ``device``, ``autoreset_mode``, ``render_mode``: see ``BatchedEnv``.

    Raises:
        FileNotFoundError: ``data_dir`` or a file in it is missing.
        TypeError: ``flatten`` is not a bool.
        ValueError: ``split`` is unknown, or a file is damaged; the message names it.
    """

    def __init__(
        self,
        split: str = "train",
        flatten: bool = True,
        data_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(flatten, (bool, np.bool_)):
            raise TypeError(f"flatten={flatten!r} must be True or False.")
        device = str(as_device(kwargs.get("device", "cpu")))
        dataset = load_image_dataset(split, None if data_dir is None else os.fspath(data_dir), device)
        height, width = dataset.features.shape[1:]
        super().__init__(dataset, (height * width,) if flatten else (1, height, width), **kwargs)


class ClassificationBandit(SingleEnv):
    """One ``BatchedClassificationBandit`` as a ``gymnasium.Env``; same arguments."""

    batched_class = BatchedClassificationBandit


class MNISTBandit(SingleEnv):
    """One ``BatchedMNISTBandit`` as a ``gymnasium.Env``; same arguments."""

    batched_class = BatchedMNISTBandit
