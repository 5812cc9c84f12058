"""One-step tasks with a right answer per context: the bandit and the contextual bandit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from tpo_gym.envs import rendering
from tpo_gym.envs.batched import BatchedEnv, Rows, Step
from tpo_gym.envs.checks import as_int, as_integers, as_seed, check_range
from tpo_gym.envs.single import SingleEnv


class BatchedAnswers(BatchedEnv):
    """Base of the one-step tasks: a context is an index into a table of right answers; 1 is paid for the right one.

    Args:
        observation_space: Space of one observation.
        num_actions: Number of actions.
        answers: The right action per context, int64 (number of contexts,), on any device.
        **kwargs: See ``BatchedEnv``.
    """

    _state_fields: ClassVar[tuple[str, ...]] = ("_context", "_labels", "_choice")

    def __init__(self, observation_space: gym.Space[Any], num_actions: int, answers: Tensor, **kwargs: Any) -> None:
        super().__init__(observation_space, spaces.Discrete(num_actions), horizon=1, **kwargs)
        self._answers = answers.to(self.device)
        self._context = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._labels = torch.zeros_like(self._context)
        self._choice = torch.full_like(self._context, -1)

    @property
    def labels(self) -> Tensor:
        """The right action of the current contexts, int64 (num_envs,)."""
        self._require_start()
        return self._labels.clone()

    @property
    def answers(self) -> Tensor:
        """The right action of every context that there is, int64 (num_contexts,)."""
        return self._answers.clone()

    @property
    def num_contexts(self) -> int:
        """Number of contexts that there are."""
        return self._answers.shape[0]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """As ``BatchedEnv.reset``, with one more option.

        Args:
            seed: See there.
            options: Also ``contexts``, int64 (num_envs // group_size,): the contexts to start with, one per group,
                instead of drawn ones. Later autoresets draw again.

        Returns:
            Observations (num_envs, ...) and an empty info.

        Raises:
            TypeError: See there, or the contexts are not integers.
            ValueError: See there, or the contexts have another shape, are out of range or come with ``reset_mask``.
        """
        options = dict(options or {})
        given = options.pop("contexts", None)
        if given is not None and options.get("reset_mask") is not None:
            raise ValueError("reset got both 'contexts' and 'reset_mask': contexts are given to all sub-environments.")
        observations, info = super().reset(seed=seed, options=options)
        if given is None:
            return observations, info
        contexts = as_integers("options['contexts']", given, self.device)
        if contexts.shape != (self.num_envs // self.group_size,):
            raise ValueError(
                f"options['contexts'] has shape {tuple(contexts.shape)}, but it needs one context per group: "
                f"({self.num_envs // self.group_size},)."
            )
        check_range("options['contexts']", contexts, self.num_contexts)
        self._begin(contexts.repeat_interleave(self.group_size), slice(None))
        return self._observe(), info

    def _draw_contexts(self, count: int) -> Tensor:
        return torch.randint(self._answers.shape[0], (count,), generator=self._generator, device=self.device)

    def _begin(self, contexts: Tensor, rows: Rows) -> None:
        self._context[rows] = contexts
        self._labels[rows] = self._answers[contexts]
        self._choice[rows] = -1

    def _observe(self) -> Tensor:
        return self._context.clone()

    def _score(self, actions: Tensor, rows: Rows, step: Step) -> Tensor:
        return (actions == self._labels[rows].unsqueeze(1)).float()

    def _act(self, actions: Tensor, rows: Rows, step: Step) -> Tensor:
        self._choice[rows] = actions
        return (actions == self._labels[rows]).float()

    def _outcome(self) -> tuple[Tensor, Tensor]:
        right = self._choice == self._labels
        return right, right.float()

    def _shown(self, index: int) -> tuple[int, int, int | None]:
        """Returns context, right action and chosen action (None before the step) of one sub-environment."""
        context, choice = int(self._context[index]), int(self._choice[index])
        return context, int(self._labels[index]), None if choice < 0 else choice

    def ansi(self, index: int) -> str:
        """Draws the arms in characters; the right one in brackets, a star at the chosen one."""
        context, answer, choice = self._shown(index)
        return f"context {context}\n" + rendering.choice_text(self._num_actions, answer, choice)

    def picture(self, index: int) -> np.ndarray:
        """Draws the arms as cells; the right one framed, the chosen one filled."""
        _, answer, choice = self._shown(index)
        return rendering.choice_picture(self._num_actions, answer, choice)


class BatchedBandit(BatchedAnswers):
    """A bandit with one right arm and one constant context, Discrete(1).

    Args:
        num_actions: Number of arms.
        correct_action: The arm that pays 1.
        **kwargs: ``num_envs``, ``device``, ``autoreset_mode``, ``render_mode``: see ``BatchedEnv``.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: ``num_actions`` < 1 or ``correct_action`` is not one of the arms.
    """

    def __init__(self, num_actions: int = 100, correct_action: int = 0, **kwargs: Any) -> None:
        num_actions = as_int("num_actions", num_actions, minimum=1)
        correct_action = as_int("correct_action", correct_action, minimum=0)
        if correct_action >= num_actions:
            raise ValueError(
                f"correct_action={correct_action} must be below num_actions={num_actions}: arms count from 0."
            )
        super().__init__(spaces.Discrete(1), num_actions, torch.tensor([correct_action]), **kwargs)


class BatchedContextualBandit(BatchedAnswers):
    """A bandit whose right arm depends on the observed context, drawn uniformly at every reset.

    Args:
        num_contexts: Number of contexts.
        num_actions: Number of arms.
        correct_actions: The right arm of every context (num_contexts integers). None draws them, uniformly, from
            ``layout_seed``, so that a training and an evaluation copy agree whatever seed they are reset with.
        layout_seed: Seed of that draw.
        **kwargs: ``num_envs``, ``device``, ``autoreset_mode``, ``render_mode``: see ``BatchedEnv``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range or ``correct_actions`` has another length.
    """

    def __init__(
        self,
        num_contexts: int = 100,
        num_actions: int = 10,
        correct_actions: Sequence[int] | np.ndarray | Tensor | None = None,
        layout_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        num_contexts = as_int("num_contexts", num_contexts, minimum=1)
        num_actions = as_int("num_actions", num_actions, minimum=1)
        if correct_actions is None:
            layout = np.random.default_rng(as_seed(as_int("layout_seed", layout_seed, minimum=0)))
            answers = layout.integers(num_actions, size=num_contexts)
        else:
            answers = _check_answers(correct_actions, num_contexts, num_actions)
        super().__init__(spaces.Discrete(num_contexts), num_actions, torch.from_numpy(answers), **kwargs)


def _check_answers(values: Any, num_contexts: int, num_actions: int) -> np.ndarray:
    answers = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if answers.dtype.kind not in "iu":
        raise TypeError(f"correct_actions holds {answers.dtype} values, but it must hold integers.")
    if answers.shape != (num_contexts,):
        raise ValueError(
            f"correct_actions has shape {answers.shape}, but it needs one entry per context: ({num_contexts},)."
        )
    wrong = (answers < 0) | (answers >= num_actions)
    if wrong.any():
        where = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"correct_actions[{where}]={answers[where]} must be from 0 to num_actions - 1 = {num_actions - 1}."
        )
    return answers.astype(np.int64)


class Bandit(SingleEnv):
    """One ``BatchedBandit`` as a ``gymnasium.Env``; same arguments."""

    batched_class = BatchedBandit


class ContextualBandit(SingleEnv):
    """One ``BatchedContextualBandit`` as a ``gymnasium.Env``; same arguments."""

    batched_class = BatchedContextualBandit
