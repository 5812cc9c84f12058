"""Prompts, held-out questions and reward functions: one grade for TRL, verl and the environments."""

import json
import random
from importlib.util import find_spec

import gymnasium as gym
import pytest

import tpo_gym  # noqa: F401  (registers the environments)
from tpo_gym.envs.text_tasks import GSM8KTask, ReasoningGymTask, grade
from tpo_gym.llm.solutions import ShortQuestions, solution
from tpo_gym.llm.tasks import compute_score, exact_match, make_tasks, prompt_rows, reward, split, write_parquet

GRAPHS = {"min_num_vertices": 4, "max_num_vertices": 5, "edge_probability": 0.4}
needs_reasoning_gym = pytest.mark.skipif(
    find_spec("reasoning_gym") is None,
    reason="needs the package reasoning_gym (the extra llm)",
)


def test_texts_and_conversations_are_graded_alike():
    columns = {"data_source": ["openai/gsm8k"] * 2, "ground_truth": ["5", "6"]}
    texts = ["It is 5.\n#### 5", "#### 5"]
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    for function in (reward, exact_match):
        assert function(completions=texts, prompts=["?"] * 2, **columns) == [1.0, 0.0]
        assert function(completions=chats, trainer_state=None, **columns) == [1.0, 0.0]


@needs_reasoning_gym
@pytest.mark.parametrize("min_credit", [0.0, 1.0])
def test_trl_verl_and_the_environment_agree(min_credit):
    arguments = {"dataset": "graph_color", "config": GRAPHS, "min_credit": min_credit}
    env = gym.make("tpo_gym/ReasoningGym-v0", **arguments).unwrapped
    row = prompt_rows(env.task, [7], chat=False)[0]
    question, info = env.reset(options={"index": 7})
    assert row["prompt"] == question + "\n"
    assert (row["data_source"], row["ground_truth"]) == (info["data_source"], info["ground_truth"])
    answers = [solution(env.task, 7, random.Random(0), cot) for cot in (False, True)] + ["{}", "junk", ""]
    earned = env.score_actions(answers).tolist()
    assert earned == pytest.approx([1.0, 1.0, 0.0 if min_credit else 0.01, 0.0, 0.0])
    many = {name: [row[name]] * len(answers) for name in ("data_source", "ground_truth")}
    assert reward(answers, **many) == pytest.approx(earned)
    assert exact_match(answers, **many) == [1.0, 1.0, 0.0, 0.0, 0.0]
    for answer, score in zip(answers, earned, strict=True):
        assert compute_score(row["data_source"], answer, row["ground_truth"], {"index": 7}) == {
            "score": pytest.approx(score),
            "acc": float(score == 1),
        }


@needs_reasoning_gym
@pytest.mark.parametrize(
    ("name", "config", "short"),
    [("graph_color", GRAPHS, True), ("chain_sum", {"max_terms": 3}, True), ("gsm_symbolic", {}, False)],
)
def test_solutions_are_right(name, config, short):
    task, train, _, held_out = make_tasks(name, config=config, train_size=20, eval_size=5, short=short)
    for index in [*train, *held_out]:
        for chain_of_thought in (False, True):
            text = solution(task, index, random.Random(index), chain_of_thought)
            assert grade(task.data_source, task.ground_truth(index), text).exact_match


@needs_reasoning_gym
def test_solutions_vary_where_several_are_right():
    task = ReasoningGymTask("graph_color", GRAPHS)
    assert len({solution(task, 0, random.Random(seed)) for seed in range(30)}) > 2


@needs_reasoning_gym
def test_solutions_that_there_are_not():
    with pytest.raises(ValueError, match="No steps are known for 'knights_knaves'"):
        solution(ReasoningGymTask("knights_knaves"), 0, random.Random(0), chain_of_thought=True)
    with pytest.raises(ValueError, match="'knights_knaves' has no short questions; there are some for: graph_color"):
        ShortQuestions(ReasoningGymTask("knights_knaves"))


@needs_reasoning_gym
def test_held_out_questions_are_others():
    """There are 64 graphs of four vertices: a later index is often an earlier question."""
    config = {**GRAPHS, "max_num_vertices": 4}
    task, train, same, held_out = make_tasks("graph_color", config=config, train_size=30, eval_size=10, short=True)
    assert same is task
    asked = [task.question(i) for i in train]
    tested = [task.question(i) for i in held_out]
    assert (len(train), len(tested), len(set(tested))) == (30, 10, 10)
    assert not set(asked) & set(tested)
    with pytest.raises(ValueError, match="of 60 held-out questions differ from the 30"):
        make_tasks("graph_color", config=config, train_size=30, eval_size=60, short=True)


def test_problems_of_a_file_are_split(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in (1, 2, 3, 1, 4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    task, train, _, held_out = make_tasks("gsm8k", source=str(path), train_size=3, eval_size=1)
    assert (train, held_out) == ([0, 1, 2], [4])  # the fourth repeats the first
    assert solution(task, 4, random.Random(0)) == "#### 5"
    _, train, other, held_out = make_tasks("gsm8k", source="sample", eval_source=str(path), train_size=50, eval_size=9)
    assert len(train) == 12
    assert [other.question(i) for i in held_out][:2] == ["1 + 1?", "2 + 1?"]
    with pytest.raises(ValueError, match="Only 0 of 5"):
        split(GSM8KTask("sample"), 12, 5)
    with pytest.raises(ValueError, match="eval_size=0"):
        make_tasks("gsm8k", source="sample", eval_size=0)


def test_prompts():
    task = GSM8KTask("sample")
    (plain,), (chat,) = prompt_rows(task, [3], chat=False), prompt_rows(task, [3], chat=True)
    assert plain["prompt"].startswith("Timo runs 3 km")
    assert plain["prompt"].endswith("####.\n")
    assert chat["prompt"] == [{"role": "user", "content": plain["prompt"][:-1]}]
    assert chat["ground_truth"] == "29"


def test_files_for_verl(tmp_path):
    datasets = pytest.importorskip("datasets", reason="needs the extra llm")
    task = GSM8KTask("sample")
    path = write_parquet(task, [3, 5], tmp_path / "data" / "train.parquet", "train")
    rows = list(datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path)))
    assert [row["extra_info"] for row in rows] == [{"split": "train", "index": 3}, {"split": "train", "index": 5}]
    assert rows[0]["prompt"][0]["role"] == "user"
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        assert row["reward_model"]["style"] == "rule"
        assert compute_score(row["data_source"], f"#### {truth}", truth)["score"] == 1.0
