"""Prompts and reward functions: the same questions and grades for TRL, for verl and for the environments.

A row holds a prompt, a data source and a ground truth. The reward functions read nothing else, so they work in any
process, and :func:`reward` (TRL) and :func:`compute_score` (verl) agree with ``tpo_gym.envs.text`` on every completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tpo_gym.envs.text_answers import Grade
from tpo_gym.envs.text_tasks import (
    GSM8K_INSTRUCTION,
    REASONING_GYM_INSTRUCTION,
    GSM8KTask,
    ReasoningGymTask,
    TextTask,
    grade,
)
from tpo_gym.llm.solutions import ShortQuestions

__all__ = ["compute_score", "exact_match", "make_tasks", "prompt_rows", "reward", "split", "write_parquet"]

Messages = list[dict[str, str]]
_SPARE = 50
"""How many questions are looked at for each held-out one that is wanted: small generators repeat themselves."""


def reward(
    completions: Sequence[str | Messages], data_source: Sequence[str], ground_truth: Sequence[str], **_: Any
) -> list[float]:
    """The scores of completions, in the form of TRL's reward functions.

    Args:
        completions: Texts, or conversations whose last message is graded.
        data_source: Of each completion's prompt, as in :func:`prompt_rows`.
        ground_truth: Of each completion's prompt.
        **_: TRL's other columns.

    Returns:
        A number in [0, 1] for each completion.

    Example:
        >>> reward(["2 + 3 = 5. #### 5", "6"], ["openai/gsm8k"] * 2, ["5", "5"])
        [1.0, 0.0]
    """
    return [item.score for item in _grades(completions, data_source, ground_truth)]


def exact_match(
    completions: Sequence[str | Messages], data_source: Sequence[str], ground_truth: Sequence[str], **_: Any
) -> list[float]:
    """Whether each answer is fully right, 1 or 0; arguments as in :func:`reward`. With weight 0, TRL only logs it."""
    return [float(item.exact_match) for item in _grades(completions, data_source, ground_truth)]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """The score of one completion, in the form of verl's custom reward functions.

    Args:
        data_source: As in :func:`prompt_rows`; verl's own GSM8K files have the same one.
        solution_str: The completion.
        ground_truth: As in :func:`prompt_rows`.
        extra_info: Not used.
        **_: Not used.

    Returns:
        ``score``, and ``acc`` (exact match), which verl logs.
    """
    result = grade(data_source, ground_truth, solution_str)
    return {"score": result.score, "acc": float(result.exact_match)}


def _grades(completions: Sequence[Any], sources: Sequence[str], truths: Sequence[str]) -> Iterable[Grade]:
    for completion, source, truth in zip(completions, sources, truths, strict=True):
        yield grade(source, truth, completion if isinstance(completion, str) else completion[-1]["content"])


def make_tasks(
    name: str,
    *,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
    train_size: int = 5000,
    eval_size: int = 200,
    source: str = "hub",
    eval_source: str | None = None,
    min_credit: float = 0.0,
    short: bool = False,
) -> tuple[TextTask, list[int], TextTask, list[int]]:
    """The questions to train on and the held-out ones, which have no text in common.

    Args:
        name: ``"gsm8k"``, or a generator of Reasoning Gym.
        config: The generator's settings.
        seed: The generator's seed.
        train_size: Number of questions to train on, at most.
        eval_size: Number of held-out questions, at most.
        source: GSM8K: ``"hub"``, ``"sample"`` or a JSON-lines file.
        eval_source: GSM8K: a JSON-lines file of held-out problems; None: the hub's test split, or, where ``source`` is
            not the hub, the problems after the first ``train_size``.
        min_credit: Scores below it count as 0; see ``ReasoningGymTask``.
        short: Questions of one line, for ``graph_color`` and ``chain_sum``.

    Returns:
        A task and the indices to train on; a task and the indices held out.

    Raises:
        ImportError: A package is missing.
        OSError: A file or the hub cannot be read.
        ValueError: For a setting out of range, or too few different questions.
    """
    if train_size < 1 or eval_size < 1:
        raise ValueError(f"train_size={train_size} and eval_size={eval_size} must be at least 1.")
    task: TextTask
    if name == "gsm8k":
        task = GSM8KTask(source, "train")
        if source == "hub" or eval_source is not None:
            held_out = GSM8KTask(eval_source or "hub", "test")
            known = {task.question(i) for i in range(min(train_size, len(task)))}
            rest = [i for i in range(len(held_out)) if held_out.question(i) not in known]
            return task, list(range(min(train_size, len(task)))), held_out, rest[:eval_size]
    else:
        plain = ReasoningGymTask(name, config, seed, train_size + _SPARE * eval_size, min_credit)
        task = ShortQuestions(plain) if short else plain
    train, rest = split(task, train_size, eval_size)
    return task, train, task, rest


def split(task: TextTask, train_size: int, eval_size: int) -> tuple[list[int], list[int]]:
    """The first ``train_size`` questions, and later ones whose texts differ from all of these and from each other.

    Raises:
        ValueError: The task has too few different questions.
    """
    seen = {task.question(index) for index in range(min(train_size, len(task)))}
    held_out: list[int] = []
    for index in range(train_size, len(task)):
        if len(held_out) == eval_size:
            break
        if task.question(index) not in seen:
            seen.add(task.question(index))
            held_out.append(index)
    if len(held_out) < eval_size:
        raise ValueError(
            f"Only {len(held_out)} of {eval_size} held-out questions differ from the {train_size} to train on: lower "
            "train_size or eval_size, or choose settings with more different questions."
        )
    return list(range(train_size)), held_out


def instruction(data_source: str) -> str:
    """What follows a question, about the form of the answer."""
    return GSM8K_INSTRUCTION if data_source == GSM8KTask.data_source else REASONING_GYM_INSTRUCTION


def prompt_rows(task: TextTask, indices: Iterable[int], chat: bool) -> list[dict[str, Any]]:
    """Rows of a data set for TRL.

    Args:
        task: The questions; short ones are left as they are, the others get an instruction about the form.
        indices: Which of them.
        chat: Write a prompt as messages of a conversation, for models with a chat template; else as plain text.

    Returns:
        For each question ``prompt``, ``data_source`` and ``ground_truth``.
    """
    rows = []
    for index in indices:
        text = task.question(index)
        if not isinstance(task, ShortQuestions):
            text = f"{text}\n\n{instruction(task.data_source)}" + ("" if chat else "\n")
        prompt = [{"role": "user", "content": text}] if chat else text
        rows.append({"prompt": prompt, "data_source": task.data_source, "ground_truth": task.ground_truth(index)})
    return rows


def write_parquet(task: TextTask, indices: Sequence[int], path: str | Path, split_name: str) -> Path:
    """Writes questions as a file for verl, to be graded by :func:`compute_score`.

    Args:
        task: The questions.
        indices: Which of them.
        path: Of the file; its folder is made.
        split_name: ``"train"`` or ``"test"``, noted in each row.

    Returns:
        The path.
    """
    from datasets import Dataset

    rows = [
        {
            "data_source": row["data_source"],
            "prompt": row["prompt"],
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": row["ground_truth"]},
            "extra_info": {"split": split_name, "index": index},
        }
        for index, row in zip(indices, prompt_rows(task, indices, chat=True), strict=True)
    ]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    Dataset.from_list(rows).to_parquet(str(path))
    return path
