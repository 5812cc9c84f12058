"""Answers in generated text: where they are found, and which numbers are equal."""

import time
from fractions import Fraction

import pytest

from tpo_gym.envs.text_answers import MAX_DIGITS, extract_answer, extract_number, grade_number, numbers


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("$1,234.50 and 1,000,000 dollars", ["2469/2", "1000000"]),
        ("-$5, $-5, −7 degrees", ["-5", "-5", "-7"]),
        ("10-5 = 5, 10 - 5 = 5, 3*-4", ["10", "5", "5", "10", "5", "5", "3", "-4"]),
        ("3,4 and 1,2345", ["3", "4", "1", "2345"]),  # commas that part no thousands
        (r"12.5\% of \frac{3}{4}, .5 and 1/3", ["25/2", "3/4", "1/2", "1/3"]),
        (r"1{,}234 \text{ apples}", ["1234"]),
        ("version v2, 5/0, the end.", []),
        ("It is 12.", ["12"]),
    ],
)
def test_numbers(text, values):
    assert numbers(text) == [Fraction(value) for value in values]


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("2 * 9 = 18\n#### 18", 18),
        ("#### $1,080.00 dollars", 1080),
        ("#### 3 * 4 = 12", 12),
        (r"first \boxed{5}, no: \boxed{\text{6 apples}}", 6),
        (r"\boxed{\frac{1}{2}}", Fraction(1, 2)),
        (r"#### \boxed{9}", 9),
        (r"\boxed{\boxed{7}} or so", 7),
        ("<answer>$7</answer>", 7),
        (r"#### 5 and then <answer>6</answer>", 6),  # the last mark counts
        (r"<think>\boxed{3}</think> It is \boxed{4}", 4),
        (r"\boxed{3 \text{ or } 4}", None),  # naming several numbers earns nothing
        ("#### none", None),
        (r"\boxed{18", None),  # cut off
        ("#### " + "9" * (MAX_DIGITS + 1), None),
    ],
)
def test_marked_numbers(completion, value):
    assert extract_number(completion, strict=True) == value


def test_unmarked_numbers():
    assert extract_number("5 and 7 make 12.") == 12
    assert extract_number("5 and 7 make 12.", strict=True) is None
    assert extract_number("<think>12</think>I do not know.") is None
    assert extract_number(r"\boxed{18") == 18
    assert extract_number("") is None


def test_grades_of_numbers():
    assert grade_number("so 720 cars\n#### 720.0", "144 * 5 = 720\n#### 720") == ("720", 1.0, True)
    assert grade_number("#### 721", "720") == ("721", 0.0, False)
    assert grade_number("no idea", "1,005") == (None, 0.0, False)
    with pytest.raises(ValueError, match="'unknown' holds no number"):
        grade_number("#### 5", "unknown")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<think>2</think>So <answer> 4 </answer>.", "4"),
        ("<answer>a</answer> or <answer>b</answer>", "b"),
        ('```json\n{"0": 1}\n```', '{"0": 1}'),
        (r"It is \boxed{Zoey is a {hero}}.", "Zoey is a {hero}"),
        (" plain text\n", "plain text"),
        ("<think>never ends", "<think>never ends"),
        ("<think>only thoughts</think>", None),
        ("<answer></answer>", None),
        ("", None),
    ],
)
def test_answers(completion, answer):
    assert extract_answer(completion) == answer


def test_strict_answers_need_tags():
    assert extract_answer(r"\boxed{4}", strict=True) is None
    assert extract_answer("<answer>4</answer> \\boxed{5}", strict=True) == "4"


@pytest.mark.parametrize("unit", [r"\boxed{", "<answer>", "```\n", "1,", "9", "1,111", "####\n", "\\text{", r"\frac{1"])
def test_endless_repetition_takes_no_time(unit):
    """A model may repeat an opening mark without end; a search from each of them takes minutes."""
    started = time.process_time()
    extract_answer(unit * 20_000)
    extract_number(unit * 20_000)
    assert time.process_time() - started < 10
