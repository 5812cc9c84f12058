"""Answers in generated text: where they stand, and whether two numbers are equal. Pure functions of strings."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MAX_DIGITS = 40
"""Longer digit strings are not read as numbers: a model may repeat a digit without end."""

_HASHED = re.compile(r"####[ \t]*([^\n]*)")
# A sign belongs to the number only where it does not join two of them ("10-5"); commas only where they part thousands.
_NUMBER = re.compile(
    r"(?<![\w.)])(?P<sign>[-+]?)(?:[$€£]\s?)?(?P<sign2>-?)"
    r"(?P<whole>\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?P<part>\.\d+)?(?:/(?P<below>\d+))?"
)
_BRACE = re.compile(r"\\boxed\{|[{}]")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\s*\{([^{}]*)\}")


class Grade(NamedTuple):
    """What a completion is worth.

    Attributes:
        answer: The part that was graded; ``None`` where none was found.
        score: The reward, in [0, 1].
        exact_match: Whether the answer is fully right.
    """

    answer: str | None
    score: float
    exact_match: bool


def after_thinking(completion: str) -> str:
    """The completion without its chain of thought: what follows the last ``</think>``, or all of it without one."""
    return completion.rpartition("</think>")[2]


# The searches below take one pass, or start from the end: a model may repeat an opening mark without end.
def _last_between(text: str, opening: str, closing: str) -> tuple[int, str] | None:
    """Start and content of the last text between two marks."""
    end = text.rfind(closing)
    start = text.rfind(opening, 0, max(end, 0))
    return None if start < 0 else (start, text[start + len(opening) : end].strip())


def _last_fenced(text: str) -> str:
    """The last fenced block without its first line, which names a language; empty without one."""
    found = _last_between(text, "```", "```")
    return "" if found is None else found[1].partition("\n")[2].strip()


def boxed(text: str) -> str | None:
    r"""The content of the ``\boxed{...}`` that ends last, braces inside it balanced; ``None`` without one."""
    found = _last_box(text)
    return None if found is None else found[1]


def _last_box(text: str) -> tuple[int, str] | None:
    """Start and content of that box."""
    opened: list[tuple[int, bool]] = []
    found = None
    for match in _BRACE.finditer(text):
        if match[0] != "}":
            opened.append((match.end(), match[0] != "{"))
        elif opened:
            start, is_box = opened.pop()
            found = (start, text[start : match.start()].strip()) if is_box else found
    return found


def extract_answer(completion: str, *, strict: bool = False) -> str | None:
    r"""Finds the answer in a completion.

    Args:
        completion: Generated text, with or without a chain of thought.
        strict: Take only what stands between ``<answer>`` and ``</answer>``.

    Returns:
        The first of these that there is, read after the last ``</think>``: the last text between answer tags, the last
        ``\boxed{...}``, the last fenced block, the whole text. ``None`` where that is empty.

    Example:
        >>> extract_answer("<think>2 and 2</think>So <answer> 4 </answer>.")
        '4'
        >>> extract_answer('Here it is:\n```json\n{"0": 1}\n```')
        '{"0": 1}'
    """
    text = after_thinking(completion)
    tagged = _last_between(text, "<answer>", "</answer>")
    if tagged is not None:
        return tagged[1] or None
    if strict:
        return None
    return boxed(text) or _last_fenced(text) or text.strip() or None


def numbers(text: str) -> list[Fraction]:
    r"""All numbers of a text in order, exactly.

    Currency signs, units, percent signs, thousands separators and LaTeX around a number do not matter; ``a/b`` and
    ``\frac{a}{b}`` are one number. Numbers of more than ``MAX_DIGITS`` digits are left out.

    Example:
        >>> numbers("from $1,234.50 to -7 apples, 10-5 = 5")
        [Fraction(2469, 2), Fraction(-7, 1), Fraction(10, 1), Fraction(5, 1), Fraction(5, 1)]
    """
    text = _FRACTION.sub(r"\1/\2", _TEXT.sub(r" \1 ", text)).replace(r"\$", "$").replace(r"\!", "").replace("{,}", ",")
    found = []
    for match in _NUMBER.finditer(text.replace("−", "-").replace(r"\%", "%")):
        whole, part, below = match["whole"] or "", match["part"] or "", match["below"]
        digits = whole.replace(",", "") + part
        if not digits or len(digits) > MAX_DIGITS or len(below or "") > MAX_DIGITS or (below and not int(below)):
            continue
        value = Fraction(digits if whole else "0" + part) / int(below or 1)
        found.append(-value if "-" in (match["sign"], match["sign2"]) else value)
    return found


def extract_number(completion: str, *, strict: bool = False) -> Fraction | None:
    r"""Finds the final number of a worked solution.

    Args:
        completion: Generated text, with or without a chain of thought.
        strict: Take only an answer that is marked as such.

    Returns:
        The number of the last marked answer after the last ``</think>``: ``#### n``, ``\boxed{n}`` or
        ``<answer>n</answer>``. ``None`` where the mark holds no number or several different ones. Without a mark: the
        last number of the text, or ``None`` if ``strict``.

    Example:
        >>> extract_number(r"So she has \boxed{\$1,080 \text{ dollars}}")
        Fraction(1080, 1)
        >>> extract_number("5 + 7 = 12\n#### 12")
        Fraction(12, 1)
        >>> extract_number(r"\boxed{3 \text{ or } 4}") is None
        True
    """
    text = after_thinking(completion)
    marked = [(match.start(), match[1]) for match in _HASHED.finditer(text)]
    marked += [found for found in (_last_between(text, "<answer>", "</answer>"), _last_box(text)) if found is not None]
    if marked:
        content = max(marked)[1]
        values = set(numbers((boxed(content) or content).rpartition("=")[2]))
        return values.pop() if len(values) == 1 else None
    values_in_text = [] if strict else numbers(text)
    return values_in_text[-1] if values_in_text else None


def grade_number(completion: str, truth: str, *, strict: bool = False) -> Grade:
    """Grades a worked solution by its final number: 1 if it equals the right one, else 0.

    Args:
        completion: Generated text.
        truth: The right number, or a reference solution that ends with ``#### n`` (GSM8K's form).
        strict: As in ``extract_number``.

    Raises:
        ValueError: ``truth`` holds no number.
    """
    wanted = extract_number(truth)
    if wanted is None:
        raise ValueError(f"The right answer {truth!r} holds no number: give it as '18' or as a text with '#### 18'.")
    found = extract_number(completion, strict=strict)
    return Grade(None if found is None else str(found), float(found == wanted), found == wanted)
