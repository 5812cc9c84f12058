"""Token tasks: targets and rewards by hand, whole sequences, arguments."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded

PROMPT = [0, 2, 1]
TARGETS = {  # of PROMPT with V = 3
    "TokenCopy": [0, 2, 1],
    "TokenFlip": [2, 0, 1],
    "TokenReversal": [1, 2, 0],
    "TokenReverseFlip": [1, 0, 2],
}
# Right (1) and wrong (0) tokens, and what each reward pays step by step.
PAID = {
    "bag_of_tokens": {(1, 1, 1): [1, 1, 1], (1, 0, 1): [1, 0, 1], (0, 1, 1): [0, 1, 1], (0, 0, 0): [0, 0, 0]},
    "sequential": {(1, 1, 1): [1, 1, 1], (1, 0, 1): [1, 0, 0], (0, 1, 1): [0, 0, 0], (0, 0, 0): [0, 0, 0]},
    "terminal": {(1, 1, 1): [0, 0, 1], (1, 0, 1): [0, 0, 0], (0, 1, 1): [0, 0, 0], (0, 0, 0): [0, 0, 0]},
}


def make(name="TokenReversal", num_envs=1, **kwargs):
    return gym.make_vec(f"tpo_gym/{name}-v0", num_envs, **{"sequence_length": 3, "vocab_size": 3, **kwargs})


def with_prompt(env, prompt):
    """Resets, and puts the prompt in place of the drawn one."""
    env.reset(seed=0)
    state = env.get_state()
    state["board"][:, : len(prompt)] = torch.tensor(prompt)
    env.set_state(state)


@pytest.mark.parametrize("reward", list(PAID))
@pytest.mark.parametrize("name", list(TARGETS))
def test_rewards_by_hand(name, reward, device):
    target = torch.tensor(TARGETS[name])
    for right, paid in PAID[reward].items():
        env = make(name, reward=reward, device=device)
        with_prompt(env, PROMPT)
        tokens = torch.where(torch.tensor(right) == 1, target, (target + 1) % 3)
        scores = env.score_sequences(torch.tensor([PROMPT]), tokens[None])
        assert scores.tolist() == [paid]
        rewards = []
        for step in range(3):
            observation, step_rewards, terminated, _, infos = env.step(tokens[step : step + 1])
            rewards.append(step_rewards.item())
            shown = infos["final_obs"] if terminated.item() else observation
            assert shown[0].tolist() == PROMPT + tokens[: step + 1].tolist() + [3] * (2 - step)
        assert rewards == paid
        assert env.max_return == (1 if reward == "terminal" else 3)
        assert (sum(paid) == env.max_return) == all(right)
        final = infos["final_info"]
        assert final["exact_match"].item() is final["is_success"].item() is all(right)
        assert final["token_accuracy"].item() == pytest.approx(sum(right) / 3)


def test_defaults():
    env = gym.make("tpo_gym/TokenReversal-v0")
    assert env.observation_space == spaces.MultiDiscrete([3] * 20)
    assert env.action_space == spaces.Discrete(2)
    assert env.unwrapped.max_return == 10
    assert gym.make("tpo_gym/TokenReversalSparse-v0").unwrapped.max_return == 1


def test_sparse_is_reversal_with_terminal_reward():
    sparse, plain = make("TokenReversalSparse", 50), make("TokenReversal", 50, reward="terminal")
    assert torch.equal(sparse.reset(seed=0)[0], plain.reset(seed=0)[0])
    actions = torch.ones(50, dtype=torch.int64)
    for _ in range(6):
        assert torch.equal(sparse.step(actions)[1], plain.step(actions)[1])
    with pytest.raises(TypeError, match="TokenReversal to choose another reward"):
        make("TokenReversalSparse", reward="sequential")


@pytest.mark.parametrize("reward", list(PAID))
@pytest.mark.parametrize("name", [*TARGETS, "TokenReversalSparse"])
def test_whole_sequences_equal_steps(name, reward, device):
    kwargs = {} if name == "TokenReversalSparse" else {"reward": reward}
    by_step, whole = (make(name, 24, vocab_size=2, device=device, **kwargs) for _ in range(2))
    for env in (by_step, whole):
        env.reset(seed=5, options={"group_size": 4})
    for _ in range(3):
        prompts = whole.observations()[:, :3]
        tokens = torch.randint(2, (24, 3), device=device)
        rewards, infos = whole.step_sequences(tokens)
        stepped = [by_step.step(tokens[:, step]) for step in range(3)]
        assert torch.equal(rewards, torch.stack([step[1] for step in stepped], dim=1))
        assert torch.equal(rewards, whole.score_sequences(prompts, tokens))
        assert torch.equal(whole.observations(), stepped[-1][0])
        final, expected = infos["final_info"], stepped[-1][4]["final_info"]
        assert final.keys() == expected.keys()
        assert all(torch.equal(final[key], expected[key]) for key in final)
        assert torch.equal(infos["final_obs"], stepped[-1][4]["final_obs"])
        candidates = torch.stack([tokens, 1 - tokens], dim=1)
        scores = whole.score_sequences(prompts, candidates)
        assert scores.shape == (24, 2, 3)
        assert torch.equal(scores[:, 0], rewards)
        assert torch.equal(scores[:, 1], whole.score_sequences(prompts, 1 - tokens))


def test_sequences_need_a_fresh_start_and_same_step():
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ResetNeeded):
        make().step_sequences(tokens)
    env = make()
    env.reset()
    env.step(tokens[:, 0])
    with pytest.raises(RuntimeError, match="under way"):
        env.step_sequences(tokens)
    env = make(autoreset_mode="NextStep")
    env.reset()
    with pytest.raises(RuntimeError, match="SameStep"):
        env.step_sequences(tokens)


@pytest.mark.parametrize(
    ("tokens", "error", "match"),
    [
        (np.zeros((2, 4), int), ValueError, "sequence_length=3"),
        (np.zeros(3, int), ValueError, r"shape \(3,\)"),
        (np.zeros((2, 3)), TypeError, "float64"),
        (np.full((2, 3), 3), ValueError, "holds 3"),
        (np.zeros((3, 3), int), ValueError, r"\(3, 3\)"),
    ],
)
def test_bad_sequences(tokens, error, match):
    env = make(num_envs=2)
    env.reset()
    with pytest.raises(error, match=match):
        env.step_sequences(tokens)
    with pytest.raises(error, match=match):
        env.score_sequences(np.zeros((2, 3), int), tokens)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"sequence_length": 0}, ValueError, "sequence_length=0"),
        ({"sequence_length": "ten"}, TypeError, "sequence_length='ten'"),
        ({"vocab_size": 1}, ValueError, "vocab_size=1"),
        ({"vocab_size": 2.5}, TypeError, "vocab_size=2.5"),
        ({"reward": "dense"}, ValueError, "reward='dense'.*bag_of_tokens, sequential, terminal"),
    ],
)
def test_bad_arguments(kwargs, error, match):
    with pytest.raises(error, match=match):
        make(**kwargs)
    with pytest.raises(error, match=match):
        gym.make("tpo_gym/TokenFlip-v0", **kwargs)


def test_prompts_are_uniform():
    env = make(num_envs=6000)
    prompts = env.reset(seed=0)[0][:, :3]
    shares = torch.stack([(prompts == token).float().mean(dim=0) for token in range(3)])
    assert (shares - 1 / 3).abs().max() < 0.03
