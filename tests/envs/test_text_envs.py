"""The environments of questions and answers: Gymnasium's habits, and what answers earn."""

import copy
import json
import pickle
import subprocess
import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

import tpo_gym  # noqa: F401  (registers the environments)
from tpo_gym.envs.registration import TEXT_ENVIRONMENTS
from tpo_gym.envs.text_tasks import SAMPLE, GSM8KTask, ReasoningGymTask, grade, import_reasoning_gym

GENERATORS = ("graph_color", "knights_knaves", "chain_sum", "gsm_symbolic")


def skip_without_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning_gym (the extra llm)")


def make(name: str, **kwargs) -> gym.Env:
    """An environment by the name of a generator, or GSM8K on our own problems."""
    if name == "sample":
        return gym.make("tpo_gym/GSM8K-v0", source="sample", **kwargs)
    skip_without_reasoning_gym()
    return gym.make("tpo_gym/ReasoningGym-v0", dataset=name, **kwargs)


@pytest.mark.parametrize("name", [*GENERATORS, "sample"])
def test_gymnasium_is_content(name):
    env = make(name, render_mode="ansi")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    assert EnvSpec.from_json(env.spec.to_json()).kwargs == env.spec.kwargs
    assert {f"tpo_gym/{name}-v0" for name in TEXT_ENVIRONMENTS} <= set(gym.registry)


@pytest.mark.parametrize("name", GENERATORS)
def test_every_question_fits_the_space(name):
    env = make(name, size=300).unwrapped
    for index in range(300):
        question, info = env.reset(options={"index": index})
        assert question in env.observation_space
        assert info["index"] == index


def test_an_episode():
    env = make("sample").unwrapped
    question, info = env.reset(seed=0, options={"index": 2})
    assert question.startswith("A library has 1,250 books.")
    assert question.endswith("####.")
    assert info == {"index": 2, "data_source": "openai/gsm8k", "ground_truth": "1005"}
    good = "1250 - 385 + 140\n#### 1,005"
    assert env.score_actions(good) == 1.0
    scores = env.score_actions([good, "#### 5", ""])
    assert scores.dtype == np.float32
    assert scores.tolist() == [1.0, 0.0, 0.0]
    observation, reward, terminated, truncated, info = env.step(good)
    assert (observation, reward, terminated, truncated) == (question, 1.0, True, False)
    assert info == {"answer": "1005", "exact_match": True, "token_accuracy": 1.0, "is_success": True}


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"])
@pytest.mark.parametrize("name", ["chain_sum", "sample"])
def test_copies_go_on_alike(name, clone):
    env = make(name)
    env.reset(seed=1)
    twin = clone(env)
    assert env.step("#### 4") == twin.step("#### 4")
    assert [env.reset()[0] for _ in range(5)] == [twin.reset()[0] for _ in range(5)]


def test_vector_environments():
    vec = gym.make_vec("tpo_gym/GSM8K-v0", 3, vectorization_mode="sync", source="sample")
    questions, infos = vec.reset(seed=0)
    assert len(questions) == 3
    _, rewards, terminations, _, _ = vec.step(tuple(f"#### {truth}" for truth in infos["ground_truth"]))
    assert rewards.tolist() == [1.0] * 3
    assert terminations.all()


def test_reasoning_gym_pays_what_it_pays():
    env = make("graph_color", config={"min_num_vertices": 4, "max_num_vertices": 4}).unwrapped
    env.reset(options={"index": 3})
    solution = {str(k): v for k, v in env.task.entry(3)["metadata"]["possible_answer"].items()}
    answers = [
        f"I color greedily.\n<answer>{json.dumps(solution)}</answer>",
        json.dumps(solution),
        "<answer>{}</answer>",
        "<answer>no</answer>",
        "",
    ]
    assert env.score_actions(answers).tolist() == pytest.approx([1.0, 1.0, 0.01, 0.0, 0.0])
    assert env.step(answers[0])[4]["exact_match"] is True


def test_credit_for_the_form_can_be_left_out():
    """0.01 for anything that can be parsed would be blown up to a full reward by standardization."""
    skip_without_reasoning_gym()
    entry = ReasoningGymTask("knights_knaves").entry(0)
    right = entry["answer"]
    head, _, last = right.rstrip(".").rpartition(" ")
    terms = entry["metadata"]["knight_knave_terms"]
    half_right = f"{head} {terms['knave'] if last == terms['knight'] else terms['knight']}"
    for min_credit, parsed, half in ((0.0, 0.01, 0.65), (0.02, 0.0, 0.65), (1.0, 0.0, 0.0)):
        graph = ReasoningGymTask("graph_color", min_credit=min_credit)
        task = ReasoningGymTask("knights_knaves", min_credit=min_credit)
        assert grade(graph.data_source, graph.ground_truth(0), "{}").score == parsed
        assert grade(task.data_source, task.ground_truth(0), half_right).score == pytest.approx(half)
        assert grade(task.data_source, task.ground_truth(0), right) == (right, 1.0, True)


def test_a_generator_that_raises_on_nonsense_gives_zero():
    skip_without_reasoning_gym()
    task = ReasoningGymTask("prime_factorization")
    with pytest.raises(ValueError, match="invalid literal"):
        import_reasoning_gym().create_dataset("prime_factorization", seed=0).score_answer("junk", task.entry(0))
    assert grade(task.data_source, task.ground_truth(0), "junk").score == 0.0


def test_ground_truths_work_in_other_processes():
    skip_without_reasoning_gym()
    task = ReasoningGymTask("gsm_symbolic", seed=5, size=20)
    code = (
        "import sys; from tpo_gym.envs.text_tasks import grade; "
        "print([grade('reasoning_gym/gsm_symbolic', sys.argv[1], f'<answer>{a}</answer>').score for a in sys.argv[2:]])"
    )
    command = [sys.executable, "-c", code, task.ground_truth(7), task.entry(7)["answer"], "-1"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.startswith("[1.0, 0.0")


def test_a_question_that_cannot_be_repeated_is_refused():
    skip_without_reasoning_gym()
    task = ReasoningGymTask("chain_sum", seed=5, size=20)
    truth = {**json.loads(task.ground_truth(7)), "checksum": 1}
    with pytest.raises(ValueError, match=r"Question 7 of .*chain_sum.* is not the one that was asked"):
        grade(task.data_source, json.dumps(truth), "5")


def test_local_problems(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"question": "1 + 1?", "answer": "Two.\n#### 2"}, {"question": "1,000 + 1?", "answer": "1,001"}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    task = GSM8KTask(path)
    assert [(task.question(i), task.ground_truth(i)) for i in range(len(task))] == [
        ("1 + 1?", "2"),
        ("1,000 + 1?", "1001"),
    ]
    assert len(GSM8KTask(path, size=1)) == 1
    env = gym.make("tpo_gym/GSM8K-v0", source=str(path), instruction=None)
    assert env.reset(seed=0)[0] in ("1 + 1?", "1,000 + 1?")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no problem"),
        ("nonsense", "mine.jsonl:1 is not JSON"),
        ("[1]", "mine.jsonl:1 is list"),
        ('{"question": "?"}', "Problem 1 of .* has the keys"),
        ('{"question": "?", "answer": "none"}', "'none' holds no number"),
    ],
)
def test_bad_problems(tmp_path, text, message):
    path = tmp_path / "mine.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        GSM8KTask(path)


def test_our_own_problems_are_labelled_and_right():
    task = GSM8KTask("sample")
    assert len(task) == 12
    for line in SAMPLE.read_text("utf-8").splitlines():
        assert json.loads(line)["source"] == "written for tpo_gym; not from GSM8K"
    for index in range(len(task)):
        assert grade(task.data_source, task.ground_truth(index), task.solution(index)).exact_match


def test_wrong_use():
    env = make("sample").unwrapped
    with pytest.raises(ResetNeeded):
        env.step("#### 5")
    env.reset(seed=0)
    with pytest.raises(TypeError, match="must be a string, got int"):
        env.step(5)
    env.step("")
    with pytest.raises(ResetNeeded):
        env.score_actions("#### 5")
    with pytest.raises(ValueError, match="index=12 is outside of the 12 questions"):
        env.reset(options={"index": 12})
    with pytest.raises(ValueError, match=r"Unknown options \['group_size'\]"):
        env.reset(options={"group_size": 2})
    with pytest.raises(ValueError, match="set max_question_length \\(now 20\\)"):
        make("sample", max_question_length=20).reset(seed=0)
    with pytest.raises(ValueError, match="render_mode='human'"):
        make("sample", render_mode="human")
    with pytest.raises(ValueError, match="split='dev'"):
        GSM8KTask("sample", split="dev")
    with pytest.raises(FileNotFoundError, match="is no file"):
        GSM8KTask("no/such/file.jsonl")
    with pytest.raises(ValueError, match="Unknown data_source 'math'"):
        grade("math", "5", "5")


def test_wrong_generators():
    skip_without_reasoning_gym()
    for kwargs, message in (
        ({"dataset": "graph_colour"}, "no generator 'graph_colour'; it has: .*graph_color"),
        ({"dataset": "chain_sum", "config": {"terms": 3}}, "refuses config={'terms': 3} for 'chain_sum'"),
        ({"dataset": "chain_sum", "config": {"seed": 3}}, "must not hold seed"),
        ({"dataset": "chain_sum", "size": 0}, "size=0"),
        ({"dataset": "chain_sum", "min_credit": 2}, "min_credit=2"),
    ):
        with pytest.raises(ValueError, match=message):
            ReasoningGymTask(**kwargs)


def test_a_missing_package_is_named():
    code = (
        "import sys; sys.modules['reasoning_gym'] = None\n"
        "import gymnasium, tpo_gym\n"
        "try: gymnasium.make('tpo_gym/ReasoningGym-v0')\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'tpo-gym[llm]'" in done.stdout


def test_rendering():
    env = make("sample", render_mode="ansi").unwrapped
    question, _ = env.reset(seed=0, options={"index": 0})
    assert env.render() == question
    env.step("It is 7.")
    assert env.render().endswith("> It is 7.\n\nread as '7', reward 0")
