"""Two minutes of the whole way on one core: a warmup, reinforcement learning, and held-out questions."""

import pytest

pytest.importorskip("trl", reason="needs the extra llm")
pytest.importorskip("reasoning_gym", reason="needs the extra llm")

from tpo_gym.llm.evaluate import evaluate
from tpo_gym.llm.settings import load_settings
from tpo_gym.llm.train import train
from tpo_gym.llm.warmup import warmup

# Steps before the answer do not fit into five tokens, so rewards should lead away from them.
BRIEF = ["max_completion_length=5", "learning_rate=1e-4"]


@pytest.mark.slow
def test_rewards_teach_what_helps_on_held_out_questions(tmp_path):
    """The model starts with two ways to answer, of which one is too long.

    Seeds 0, 1, 2: exact matches 0.18, 0.19, 0.19 before and 0.33, 0.34, 0.39 after; answers that end in time 0.60 to
    0.73 before and 0.97 after.
    """
    start, run = str(tmp_path / "start"), str(tmp_path / "run")
    settings = load_settings("tiny-chain_sum", BRIEF, model=start)
    warmup(settings, steps=500, learning_rate=3e-3, hidden_size=64, layers=3, chain_of_thought=0.4)
    train(load_settings("tiny-chain_sum", BRIEF, model=start, output=run, steps=80))
    before = evaluate(settings, samples=8, batch_size=400)
    after = evaluate(load_settings("tiny-chain_sum", BRIEF, model=run), samples=8, batch_size=400)
    assert after["exact_match"]["mean"] > before["exact_match"]["mean"] + 0.07
    assert after["answered"] > before["answered"] + 0.15
