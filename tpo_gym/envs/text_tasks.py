"""Questions and how answers to them are graded: Reasoning Gym's generators and GSM8K.

A task is a list of questions. What is needed to grade a completion of one of them is a single string, its *ground
truth*: it travels as a column of a data set, so that the environments here and reward functions in the processes of
another engine grade by the same few lines.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tpo_gym.envs.text_answers import Grade, extract_answer, grade_number

REASONING_GYM = "reasoning_gym/"
"""Prefix of the data source of a Reasoning Gym question; the generator's name follows."""
GSM8K = "openai/gsm8k"
"""Data source of a GSM8K question, the name of the data set on the hub."""

REASONING_GYM_INSTRUCTION = (
    "Think step by step. Then give only the final answer between <answer> and </answer>, in the form asked for."
)
GSM8K_INSTRUCTION = "Think step by step. Then give the final number on a line of its own after ####."

SAMPLE = Path(__file__).parent / "data" / "word_problems.jsonl"
_log = logging.getLogger(__name__)


class TextTask(Protocol):
    """A list of questions that are answered in text."""

    @property
    def data_source(self) -> str:
        """Says how the ground truths are to be read."""

    def __len__(self) -> int: ...

    def question(self, index: int) -> str:
        """The text of a question, without instructions about the form of the answer."""

    def ground_truth(self, index: int) -> str:
        """What ``grade`` needs to know about a question."""


def grade(data_source: str, ground_truth: str, completion: str, *, strict: bool = False) -> Grade:
    """Grades a completion.

    Args:
        data_source: As given by the task: ``"reasoning_gym/<name>"`` or ``"openai/gsm8k"``.
        ground_truth: As given by the task.
        completion: Generated text, with or without a chain of thought.
        strict: Accept only answers that are marked as such; see ``extract_answer`` and ``extract_number``.

    Raises:
        ValueError: The data source is unknown, or the ground truth does not fit it.
        ImportError: Reasoning Gym is needed and not installed.
    """
    if data_source == GSM8K:
        return grade_number(completion, ground_truth, strict=strict)
    if data_source.startswith(REASONING_GYM):
        return _grade_reasoning_gym(ground_truth, completion, strict)
    raise ValueError(f"Unknown data_source {data_source!r}: use {GSM8K!r} or {REASONING_GYM + '<name>'!r}.")


# --- Reasoning Gym ----------------------------------------------------------------------------------------------------


class ReasoningGymTask:
    """Questions of one generator of Reasoning Gym (arXiv 2505.24760), in their order.

    Question ``i`` of seed ``s`` is question ``0`` of seed ``s + i`` for nearly all generators: held-out questions need
    a seed that is further away than ``size``, or indices of the same task beyond those trained on, and a check for
    equal texts, for small generators repeat themselves.

    Args:
        dataset: Name of the generator, such as ``"graph_color"``, ``"knights_knaves"`` or ``"gsm_symbolic"``.
        config: Its own settings, for example ``{"num_colors": 3}``; None for its defaults.
        seed: Of the generator.
        size: Number of questions.
        min_credit: Scores below it count as 0. Several generators pay 0.01 for a wrong answer that can be parsed
            (``graph_color``); in a group of such scores, standardization makes 0.01 against 0 as strong as 1
            against 0, so that the form is rewarded until one answer is right. The default 0 keeps Reasoning Gym's
            scores, as the paper does; 0.02 removes these crumbs and keeps partial credit (``knights_knaves``: 0.65 for
            half of the roles); 1 pays exact answers only.

    Raises:
        ImportError: Reasoning Gym is not installed.
        ValueError: The generator or a setting is unknown, or a value is out of range.
    """

    def __init__(
        self,
        dataset: str,
        config: Mapping[str, Any] | None = None,
        seed: int = 0,
        size: int = 500,
        min_credit: float = 0.0,
    ) -> None:
        if size < 1:
            raise ValueError(f"size={size} must be at least 1: it is the number of questions.")
        if not 0 <= min_credit <= 1:
            raise ValueError(f"min_credit={min_credit} must lie in [0, 1]: scores below it count as 0.")
        self.dataset = dataset
        self.size = size
        self._recipe: dict[str, Any] = {
            "dataset": dataset,
            "config": json.dumps(dict(config or {}), sort_keys=True),  # text can be a key of a cache
            "seed": int(seed),
            "size": int(size),  # some generators plan all of their questions ahead
        }
        self.min_credit = min_credit
        _generator(**self._recipe)  # errors come now, not with the first question

    @property
    def data_source(self) -> str:
        return REASONING_GYM + self.dataset

    def __len__(self) -> int:
        return self.size

    def entry(self, index: int) -> dict[str, Any]:
        """Reasoning Gym's own item: ``question``, ``answer`` and ``metadata``."""
        if not 0 <= index < self.size:
            raise IndexError(f"index={index} is outside of the {self.size} questions.")
        return _entry(**self._recipe, index=index)

    def question(self, index: int) -> str:
        return str(self.entry(index)["question"])

    def ground_truth(self, index: int) -> str:
        """How to make the question again, with a checksum of its text."""
        checksum = _checksum(self.question(index))
        return json.dumps({**self._recipe, "index": index, "checksum": checksum, "min_credit": self.min_credit})


def _grade_reasoning_gym(ground_truth: str, completion: str, strict: bool) -> Grade:
    try:
        truth = json.loads(ground_truth)
        recipe = {key: truth[key] for key in ("dataset", "config", "seed", "size")}
        index, checksum, min_credit = truth["index"], truth["checksum"], truth["min_credit"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"ground_truth={ground_truth[:200]!r} is not one of ReasoningGymTask.ground_truth.") from error
    entry = _entry(**recipe, index=index)
    if checksum != _checksum(entry["question"]):
        raise ValueError(
            f"Question {index} of {recipe} is not the one that was asked: the generator does not repeat itself, or the "
            "data were made with another version of reasoning_gym. Make the data again; a generator that never "
            "repeats itself can be used in the environment only."
        )
    answer = extract_answer(completion, strict=strict)
    score = _score(_generator(**recipe), entry, answer)
    return Grade(answer, score if score >= min_credit else 0.0, score >= 1.0)


def _score(generator: Any, entry: dict[str, Any], answer: str | None) -> float:
    if answer is None:
        return 0.0
    try:
        return float(generator.score_answer(answer, entry))
    except Exception as error:  # several generators raise on an answer that they cannot parse
        _log.debug("%r could not be graded: %r", answer, error)
        return 0.0


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def import_reasoning_gym() -> Any:
    """Imports Reasoning Gym, which takes a second or two.

    Raises:
        ImportError: It is not installed; the message says what to install.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(
            "Reasoning Gym's questions need the package reasoning_gym: pip install 'tpo-gym[llm]' (or only "
            "reasoning-gym)."
        ) from error
    return reasoning_gym


@lru_cache(maxsize=32)
def _generator(dataset: str, config: str, seed: int, size: int) -> Any:
    """The generator, made once per process; it makes questions on demand."""
    reasoning_gym = import_reasoning_gym()
    known = reasoning_gym.factory.DATASETS
    if dataset not in known:
        raise ValueError(f"Reasoning Gym has no generator {dataset!r}; it has: {', '.join(sorted(known))}.")
    settings = json.loads(config)
    reserved = sorted({"seed", "size"} & set(settings))
    if reserved:
        raise ValueError(f"config={settings} must not hold {', '.join(reserved)}: these are arguments of the task.")
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"Reasoning Gym refuses config={settings} for {dataset!r}: {error}") from error


@lru_cache(maxsize=2**14)
def _entry(dataset: str, config: str, seed: int, size: int, index: int) -> dict[str, Any]:
    entry: dict[str, Any] = _generator(dataset, config, seed, size)[index]
    return entry


# --- GSM8K ------------------------------------------------------------------------------------------------------------


class GSM8KTask:
    """Grade-school word problems with a number as the answer (arXiv 2110.14168).

    Args:
        source: Where the problems come from. ``"hub"``: GSM8K itself, ``openai/gsm8k`` on the Hugging Face hub, through
            the package ``datasets`` (its cache serves later calls offline). A path: a JSON-lines file in GSM8K's form,
            each line with ``question`` and ``answer``, the latter ending with ``#### n`` (or being the number).
            ``"sample"``: a few problems written for this package, which are **not** from GSM8K; for tests and first
            steps.
        split: ``"train"`` or ``"test"`` of the hub's data. A path names its own split; the sample has one.
        size: Keep only the first ``size`` problems; None for all.

    Raises:
        ImportError: ``source="hub"`` and ``datasets`` is not installed.
        OSError: The file or the hub cannot be read.
        ValueError: An argument is unknown, or a line has no question or no number.
    """

    data_source = GSM8K

    def __init__(self, source: str | Path = "hub", split: str = "train", size: int | None = None) -> None:
        if split not in ("train", "test"):
            raise ValueError(f"split={split!r} is unknown: use 'train' or 'test'.")
        if size is not None and size < 1:
            raise ValueError(f"size={size} must be at least 1, or None for all problems.")
        self.items = _problems(str(source), split)[:size]

    def __len__(self) -> int:
        return len(self.items)

    def question(self, index: int) -> str:
        return self.items[index][0]

    def solution(self, index: int) -> str:
        """The reference solution, ending with ``#### n``."""
        return self.items[index][1]

    def ground_truth(self, index: int) -> str:
        """The right number as text, without thousands separators."""
        return self.solution(index).rpartition("####")[2].strip().replace(",", "")


@lru_cache(maxsize=8)
def _problems(source: str, split: str) -> tuple[tuple[str, str], ...]:
    """Questions and solutions, read once per process and checked."""
    if source == "hub":
        rows = _hub_rows(split)
    else:
        path = SAMPLE if source == "sample" else Path(source).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"source={source!r} is no file; use a JSON-lines file, 'hub' or 'sample'.")
        rows = [_parse(line, f"{path}:{n}") for n, line in enumerate(path.read_text("utf-8").splitlines(), 1) if line]
    for number, row in enumerate(rows, 1):
        if not {"question", "answer"} <= row.keys():
            raise ValueError(
                f"Problem {number} of {source!r} has the keys {sorted(row)}; it needs question and answer."
            )
        grade_number("", str(row["answer"]))  # raises where the answer holds no number
    if not rows:
        raise ValueError(f"source={source!r} holds no problem.")
    return tuple((str(row["question"]), str(row["answer"])) for row in rows)


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON ({error}); each line is one object with question and answer.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place} is {type(row).__name__}; each line is one object with question and answer.")
    return row


def _hub_rows(split: str) -> list[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError("source='hub' needs the package datasets: pip install 'tpo-gym[llm]'.") from error
    try:
        return list(load_dataset(GSM8K, "main", split=split))
    except Exception as error:  # the hub's client raises many kinds, from its own and from the network's packages
        raise OSError(
            f"{GSM8K} could not be loaded from the hub ({error}). Offline, give source= a JSON-lines file with "
            "question and answer, or source='sample' for a few problems of this package."
        ) from error
