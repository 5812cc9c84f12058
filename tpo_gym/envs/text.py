"""Environments whose observations and actions are texts: a question, an answer, a grade. One step per episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.spaces import Text

from tpo_gym.envs.checks import as_seed
from tpo_gym.envs.text_answers import Grade
from tpo_gym.envs.text_tasks import (
    GSM8K_INSTRUCTION,
    REASONING_GYM_INSTRUCTION,
    GSM8KTask,
    ReasoningGymTask,
    TextTask,
    grade,
)


@lru_cache(maxsize=1)
def charset() -> str:
    """The characters of the spaces: what Reasoning Gym's and GSM8K's questions hold, and answers may.

    The printable ones up to U+2FFF (Latin, Greek, currencies, arrows, mathematics, boxes), line breaks and tabs, emoji,
    and variation selectors.
    """
    printable = (chr(code) for code in (*range(0x3000), *range(0x1F300, 0x1FB00)) if chr(code).isprintable())
    return "\t\n\r" + "".join(printable) + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))


class TextEnv(gym.Env[str, str]):
    """Asks a question of a task; the action is the whole answer, a chain of thought included; the reward is its grade.

    Any string is graded, also one that the action space does not hold. After the step the observation is the same
    question, the episode has terminated, and the info has ``answer`` (the part that was graded, or None),
    ``exact_match``, ``is_success`` and ``token_accuracy`` (the reward), like this package's other environments. Until
    then the info has ``index``, ``data_source`` and ``ground_truth`` of the question.

    Stable-Baselines3's policies do not read text; language models are trained by ``tpo_gym.llm``.

    Args:
        task: The questions.
        instruction: Follows every question; None for the bare question.
        strict: Accept only answers that are marked as the instruction asks.
        max_question_length: Longest observation, in characters.
        max_answer_length: Longest text of the action space.
        render_mode: None or "ansi".

    Raises:
        ValueError: An argument has a value that cannot be served.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}
    max_return = 1.0
    horizon = 1

    def __init__(
        self,
        task: TextTask,
        *,
        instruction: str | None = None,
        strict: bool = False,
        max_question_length: int = 16_384,
        max_answer_length: int = 16_384,
        render_mode: str | None = None,
    ) -> None:
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode={render_mode!r} is unknown; choose 'ansi' or None.")
        for name, value in (("max_question_length", max_question_length), ("max_answer_length", max_answer_length)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1: it is a number of characters.")
        self.task = task
        self.instruction = instruction
        self.strict = strict
        self.render_mode = render_mode
        self.observation_space = Text(max_question_length, charset=charset())
        self.action_space = Text(max_answer_length, min_length=0, charset=charset())
        self._index: int | None = None
        self._question = ""
        self._last: tuple[str, Grade] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Asks a question.

        Args:
            seed: Seeds ``np_random``, which draws this and all later questions. None goes on with its stream.
            options: ``{"index": i}`` asks question ``i`` instead of a random one.

        Returns:
            The question with the instruction, and an info with ``index``, ``data_source`` and ``ground_truth``.

        Raises:
            TypeError: ``seed`` is not an int or None.
            ValueError: An option is unknown, there is no such question, or its text does not fit the space.
        """
        super().reset(seed=as_seed(seed))
        options = dict(options or {})
        index = options.pop("index", None)
        if options:
            raise ValueError(f"Unknown options {sorted(options)}; there is 'index'.")
        index = int(self.np_random.integers(len(self.task))) if index is None else int(index)
        if not 0 <= index < len(self.task):
            raise ValueError(f"options index={index} is outside of the {len(self.task)} questions.")
        text = self.task.question(index)
        question = f"{text}\n\n{self.instruction}" if self.instruction else text
        if question not in self.observation_space:
            self._refuse(question, index)
        self._index, self._question, self._last = index, question, None
        return question, {
            "index": index,
            "data_source": self.task.data_source,
            "ground_truth": self.task.ground_truth(index),
        }

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Grades an answer and ends the episode.

        Args:
            action: The whole text of the answer.

        Returns:
            The question, the reward in [0, 1], True, False, and the info.

        Raises:
            ResetNeeded: No question is open.
            TypeError: ``action`` is not a string.
        """
        result = self._grade(action)
        self._last = (action, result)
        return self._question, result.score, True, False, self._info(result)

    def score_actions(self, actions: str | Sequence[str]) -> np.ndarray | float:
        """Returns what candidate answers would earn, without a step.

        Args:
            actions: One text, or K of them.

        Returns:
            A float, or float32 (K,).

        Raises:
            ResetNeeded: As in ``step``.
            TypeError: As in ``step``.
        """
        if isinstance(actions, str):
            return self._grade(actions).score
        return np.array([self._grade(action).score for action in actions], dtype=np.float32)

    def render(self) -> str | None:
        """Returns the question, and after the step the answer with its grade ("ansi")."""
        if self.render_mode is None:
            gym.logger.warn("render() needs a render_mode, e.g. gymnasium.make(id, render_mode='ansi').")
            return None
        if self._index is None:
            raise ResetNeeded("Call reset() before render().")
        if self._last is None:
            return self._question
        answer, result = self._last
        return f"{self._question}\n\n> {answer}\n\nread as {result.answer!r}, reward {result.score:g}"

    def _grade(self, answer: str) -> Grade:
        if self._index is None or self._last is not None:
            raise ResetNeeded("The episode is over, or has not begun: call reset() for a question.")
        if not isinstance(answer, str):
            raise TypeError(f"The action must be a string, got {type(answer).__name__}: give the text of the answer.")
        return grade(self.task.data_source, self.task.ground_truth(self._index), answer, strict=self.strict)

    @staticmethod
    def _info(result: Grade) -> dict[str, Any]:
        return {
            "answer": result.answer,
            "exact_match": result.exact_match,
            "token_accuracy": result.score,
            "is_success": result.exact_match,
        }

    def _refuse(self, question: str, index: int) -> None:
        space: Text = self.observation_space  # type: ignore[assignment]
        if len(question) > space.max_length:
            raise ValueError(
                f"Question {index} has {len(question)} characters: set max_question_length (now {space.max_length})."
            )
        foreign = sorted(set(question) - space.character_set)
        raise ValueError(f"Question {index} has characters that the observation space does not hold: {foreign}.")


class ReasoningGym(TextEnv):
    """Questions of one of Reasoning Gym's generators. Needs the package ``reasoning_gym`` (the extra ``llm``).

    Args:
        dataset: Name of the generator, such as ``"graph_color"``, ``"knights_knaves"`` or ``"gsm_symbolic"``.
        config: Its own settings, for example ``{"num_colors": 3}``; None for its defaults.
        dataset_seed: Seed of the generator. Question ``i`` of seed ``s`` is question 0 of seed ``s + i``: for other
            questions take a seed that is further away than ``size``.
        size: Number of questions; ``reset`` draws one of them.
        min_credit: Scores below it count as 0, see ``ReasoningGymTask``: 0.02 removes the 0.01 that some generators pay
            for a wrong answer in the right form, 1 leaves exact answers only.
        instruction: Follows every question; None for the bare question.
        **kwargs: See ``TextEnv``.

    Raises:
        ImportError: Reasoning Gym is not installed.
        ValueError: The generator or a setting is unknown, or a value is out of range.

    Example:
        >>> import tpo_gym
        >>> env = gym.make("tpo_gym/ReasoningGym-v0", dataset="chain_sum")  # doctest: +SKIP
        >>> question, info = env.reset(seed=0)  # doctest: +SKIP
        >>> env.step("I think it is <answer>12</answer>.")  # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: str = "graph_color",
        config: Mapping[str, Any] | None = None,
        dataset_seed: int = 0,
        size: int = 500,
        min_credit: float = 0.0,
        instruction: str | None = REASONING_GYM_INSTRUCTION,
        **kwargs: Any,
    ) -> None:
        task = ReasoningGymTask(dataset, config, dataset_seed, size, min_credit)
        super().__init__(task, instruction=instruction, **kwargs)


class GSM8K(TextEnv):
    r"""Word problems whose answer is a number: 1 for the right number, else 0.

    Args:
        source: ``"hub"``: GSM8K itself, from the Hugging Face hub (needs ``datasets``, the extra ``llm``). A path: a
            JSON-lines file in its form. ``"sample"``: twelve problems written for this package, not from GSM8K.
        split: ``"train"`` or ``"test"`` of the hub's data.
        size: Keep only the first ``size`` problems; None for all.
        instruction: Follows every question; None for the bare question.
        **kwargs: See ``TextEnv``.

    Raises:
        ImportError: ``source="hub"`` and ``datasets`` is not installed.
        OSError: The file or the hub cannot be read.
        ValueError: An argument is unknown, or a line is not a problem.

    Example:
        >>> import tpo_gym
        >>> env = gym.make("tpo_gym/GSM8K-v0", source="sample")
        >>> question, _ = env.reset(options={"index": 0})
        >>> question.splitlines()[0]
        'A ferry carries 36 cars on each crossing and makes 4 crossings a day. How many cars does it carry in 5 days?'
        >>> env.step("144 cars a day, so 5 * 144 = 720.\n#### 720")[1:3]
        (1.0, True)
    """

    def __init__(
        self,
        source: str | Path = "hub",
        split: str = "train",
        size: int | None = None,
        instruction: str | None = GSM8K_INSTRUCTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(GSM8KTask(source, split, size), instruction=instruction, **kwargs)
