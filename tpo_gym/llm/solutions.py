"""Worked solutions and one-line questions for some tasks: what a model of a million parameters is warmed up on.

Solutions are derived from the generators' own metadata. Several may be right; ``rng`` picks one, so that a model
trained on them keeps different candidates for reinforcement learning to choose from.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tpo_gym.envs.text_tasks import GSM8KTask, ReasoningGymTask, TextTask

Entry = dict[str, Any]


class ShortQuestions:
    """A Reasoning Gym task with questions of one line: the same items and grades, for models that read characters.

    Args:
        task: Of the generator ``graph_color`` or ``chain_sum``.

    Raises:
        ValueError: The generator has no short form.
    """

    def __init__(self, task: ReasoningGymTask) -> None:
        if task.dataset not in _SHORT:
            raise ValueError(f"{task.dataset!r} has no short questions; there are some for: {', '.join(_SHORT)}.")
        self.task = task
        self.data_source = task.data_source

    def __len__(self) -> int:
        return len(self.task)

    def question(self, index: int) -> str:
        return _SHORT[self.task.dataset](self.task.entry(index))

    def ground_truth(self, index: int) -> str:
        return self.task.ground_truth(index)


def solution(task: TextTask, index: int, rng: random.Random, chain_of_thought: bool = False) -> str:
    """Writes a right answer, as a model should complete the prompt.

    Args:
        task: The task of the question.
        index: The question's.
        rng: Picks among several right answers.
        chain_of_thought: Write the steps first and the answer between answer tags. For ``graph_color`` and
            ``chain_sum``; ``gsm_symbolic`` and GSM8K have their own reference solutions, which are always steps.

    Raises:
        ValueError: The generator has no solution in its metadata, or no steps are known for it.
    """
    inner = task.task if isinstance(task, ShortQuestions) else task
    if isinstance(inner, GSM8KTask):
        return inner.solution(index)
    if not isinstance(inner, ReasoningGymTask):
        raise ValueError(f"{type(inner).__name__} has no solutions: warm up on Reasoning Gym or GSM8K.")
    entry = inner.entry(index)
    if inner.dataset in _WORKED:
        steps, answer = _WORKED[inner.dataset](entry, rng)
        return f"{steps}<answer>{answer}</answer>" if chain_of_thought else answer
    if inner.dataset == "gsm_symbolic":
        return f"{entry['metadata']['answer_cot']}\n<answer>{entry['answer']}</answer>"
    if chain_of_thought:
        raise ValueError(f"No steps are known for {inner.dataset!r}: leave chain_of_thought out.")
    if not isinstance(entry["answer"], str):
        raise ValueError(f"{inner.dataset!r} comes without an answer, so there is nothing to warm up on.")
    return entry["answer"]


def _short_graph(entry: Entry) -> str:
    puzzle = entry["metadata"]["puzzle"]
    edges = " ".join(f"{a}-{b}" for a, b in puzzle["edges"])
    return f"{len(puzzle['vertices'])} vertices, {puzzle['num_colors']} colors, edges {edges or 'none'}: "


def _short_sum(entry: Entry) -> str:
    return entry["metadata"]["expression"] + " = "


def _color_graph(entry: Entry, rng: random.Random) -> tuple[str, str]:
    """The generator's coloring with its colors renamed, and for each vertex the colors that its neighbors take."""
    puzzle = entry["metadata"]["puzzle"]
    names = rng.sample(puzzle["color_options"], puzzle["num_colors"])
    found = {int(v): names[c - 1] for v, c in entry["metadata"]["possible_answer"].items()}
    steps = []
    for vertex in puzzle["vertices"]:
        before = (a if b == vertex else b for a, b in puzzle["edges"] if max(a, b) == vertex)
        taken = sorted({found[other] for other in before})
        steps.append(f"{vertex}: {'not ' + ' '.join(map(str, taken)) + ', ' if taken else ''}{found[vertex]}\n")
    return "".join(steps), json.dumps({str(vertex): found[vertex] for vertex in puzzle["vertices"]})


def _add_up(entry: Entry, rng: random.Random) -> tuple[str, str]:
    """The running total after each term."""
    terms = entry["metadata"]["expression"].split()
    total, steps = int(terms[0]), []
    for sign, term in zip(terms[1::2], terms[2::2], strict=True):
        before, total = total, total + int(term) * (1 if sign == "+" else -1)
        steps.append(f"{before} {sign} {term} = {total}\n")
    if str(total) != entry["answer"]:
        raise ValueError(f"{entry['metadata']['expression']!r} gives {total}, not {entry['answer']}: not a sum.")
    return "".join(steps), entry["answer"]


_SHORT: dict[str, Callable[[Entry], str]] = {"graph_color": _short_graph, "chain_sum": _short_sum}
_WORKED: dict[str, Callable[[Entry, random.Random], tuple[str, str]]] = {
    "graph_color": _color_graph,
    "chain_sum": _add_up,
}
